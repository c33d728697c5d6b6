"""The outbox in a service's own database."""

from __future__ import annotations

from everstate.errors.base import EverstateError


class ChainBroken(EverstateError):
    """The `before` of an emitted change differs from the state that was emitted last (law 3)."""

    exit_code = 5
    http_status = 409

    def __init__(self, entity: str, key: str, reason: str) -> None:
        self.entity, self.key, self.reason = entity, key, reason
        super().__init__(
            f"{entity} {key!r}: {reason}; nothing was emitted.",
            advice="Another writer did not call emit, or `before` was not read under a lock; "
            "chain='mend' adds the missing change.",
        )


class NotRegistered(EverstateError):
    """The outbox of this database does not know the entity type, or is not installed."""

    exit_code = 2

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"{reason}.", advice="Run `everstate outbox install` on this database.")


class NotAllowed(EverstateError):
    """A database role lacks a privilege that this needs; nothing was changed."""

    exit_code = 2
    http_status = 403
