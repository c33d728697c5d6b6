"""The outbox in a service's own database, and its replication."""

from __future__ import annotations

from everstate.errors.base import EverstateError


class ChainBroken(EverstateError):
    """The `before` of an emitted change is not the state that was emitted last (law 3)."""

    exit_code = 5
    http_status = 409

    def __init__(self, entity: str, key: str, reason: str) -> None:
        self.entity, self.key, self.reason = entity, key, reason
        super().__init__(
            f"{entity} {key!r}: {reason}; nothing was emitted.",
            advice="Somebody wrote without emit, or `before` was not read under a lock; "
            "chain='mend' adds the change that is missing.",
        )


class NotRegistered(EverstateError):
    """The outbox of this database does not know the entity type, or is not installed."""

    exit_code = 2

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"{reason}.", advice="Run `everstate outbox install` on this database.")


class NotAllowed(EverstateError):
    """A database role lacks a right that this needs; nothing was changed."""

    exit_code = 2
    http_status = 403


class FactNotKept(EverstateError):
    """No replication slot would keep a fact that stands in the WAL only; it was not emitted."""

    retryable = True
    http_status = 503


class ReplicationUnavailable(EverstateError):
    """The server or the role cannot replicate; the advice is the SQL that mends it."""

    exit_code = 2

    def __init__(self, reason: str, mend: str) -> None:
        self.reason, self.mend = reason, mend
        super().__init__(
            f"the relay cannot read by replication: {reason}.",
            advice=f'{mend}; or set [store] relay = "polling".',
        )


class ReplicationFailed(EverstateError):
    """The replication stream cannot be read for a reason that waiting does not mend."""


class SlotLost(EverstateError):
    """WAL that the relay has not read is gone; nothing goes out until somebody decides."""

    exit_code = 9

    def __init__(self, slot: str, state: str) -> None:
        self.slot, self.state = slot, state
        super().__init__(
            f"replication slot {slot} is {state}: WAL that was not read is gone.",
            advice='[store] slot_lost = "refill" publishes what the outbox table has; facts '
            "that stood in the WAL only are gone.",
        )
