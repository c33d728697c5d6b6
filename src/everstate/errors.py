"""One tree of errors: each says what happened, carries its data, and tells the next step.

``retryable`` is a fact of the class: the same call may succeed later without anybody changing
anything. ``exit_code`` is what the command line returns, ``http_status`` what the API answers.
Foreign errors (psycopg, librdkafka, Spark) are translated into this tree once, in the room that
is the driver's home.
"""

from __future__ import annotations

from typing import ClassVar


class EverstateError(Exception):
    """Anything everstate refuses, or cannot do, that a caller may want to handle."""

    retryable: ClassVar[bool] = False
    exit_code: int = 1
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, *, advice: str | None = None) -> None:
        super().__init__(message)
        self.advice = advice

    @property
    def message(self) -> str:
        """The sentence without the advice."""
        return str(self.args[0])

    def __str__(self) -> str:
        return f"{self.message} {self.advice}" if self.advice else self.message


class InvalidConfig(EverstateError):
    """A setting cannot be what it was set to."""

    exit_code = 2
    http_status = 500

    def __init__(self, field: str, value: object, expected: str) -> None:
        self.field, self.value, self.expected = field, value, expected
        super().__init__(
            f"{field} is {value!r}; expected {expected}.",
            advice="Set it in everstate.toml or by its environment variable.",
        )


class InvalidEntityType(EverstateError):
    """An entity type cannot be registered; the message names model, field and reason."""

    exit_code = 2


class InvalidView(EverstateError):
    """A view's SQL cannot be kept incrementally; the advice is the nearest form that can."""

    exit_code = 2

    def __init__(self, view: str, reason: str, *, advice: str | None = None) -> None:
        self.view, self.reason = view, reason
        super().__init__(f"view {view}: {reason}", advice=advice)


class InvalidCapture(EverstateError):
    """A capture cannot be declared; the message names capture, table and reason."""

    exit_code = 2

    def __init__(self, capture: str, reason: str, *, advice: str | None = None) -> None:
        self.capture, self.reason = capture, reason
        super().__init__(f"capture {capture}: {reason}", advice=advice)


class UnknownEntity(EverstateError):
    """No entity type of that name is registered with the app."""

    exit_code = 2
    http_status = 404

    def __init__(self, name: str, known: tuple[str, ...] = ()) -> None:
        self.name, self.known = name, known
        listing = ", ".join(known) if known else "none"
        super().__init__(f"unknown entity type {name!r} (registered: {listing}).")


class UnknownView(EverstateError):
    """No view of that name is declared by the app."""

    exit_code = 2
    http_status = 404

    def __init__(self, name: str, known: tuple[str, ...] = ()) -> None:
        self.name, self.known = name, known
        listing = ", ".join(known) if known else "none"
        super().__init__(f"unknown view {name!r} (declared: {listing}).")


class UnknownCapture(EverstateError):
    """No capture of that name is declared by the app."""

    exit_code = 2
    http_status = 404

    def __init__(self, name: str, known: tuple[str, ...] = ()) -> None:
        self.name, self.known = name, known
        listing = ", ".join(known) if known else "none"
        super().__init__(f"unknown capture {name!r} (declared: {listing}).")


class NotFound(EverstateError):
    """The entity has no state at that time or version."""

    exit_code = 4
    http_status = 404


class InvalidChange(EverstateError):
    """A change breaks a rule of the envelope; names entity, key and field."""

    exit_code = 2
    http_status = 422

    def __init__(self, entity: str, key: str | None, field: str, reason: str) -> None:
        self.entity, self.key, self.field, self.reason = entity, key, field, reason
        super().__init__(f"{entity} {key!r}: {field}: {reason}")


class MissingProvenance(InvalidChange):
    """A write came without its provenance; every change says who made it."""

    def __init__(self, entity: str, key: str | None, field: str) -> None:
        super().__init__(entity, key, field, "provenance is required and must not be empty")


class ChangeTooLarge(InvalidChange):
    """The message would be larger than the log takes; nothing was written."""

    http_status = 413

    def __init__(self, entity: str, key: str, size: int, limit: int) -> None:
        self.size, self.limit = size, limit
        super().__init__(
            entity,
            key,
            "size",
            f"the change is {size:,} bytes and log.message_bytes_max is {limit:,}. "
            "Raise the limit, or keep large values outside and store a reference.",
        )


class CorruptRecord(EverstateError):
    """A record of the log cannot be read as a change."""

    def __init__(self, topic: str, partition: int, offset: int, reason: str) -> None:
        self.topic, self.partition, self.offset, self.reason = topic, partition, offset, reason
        super().__init__(f"{topic}[{partition}]@{offset}: {reason}")


class VersionConflict(EverstateError):
    """Somebody else wrote the entity first; read it again and decide again."""

    retryable = True
    exit_code = 5
    http_status = 412

    def __init__(self, entity: str, key: str, expected: int, actual: int) -> None:
        self.entity, self.key, self.expected, self.actual = entity, key, expected, actual
        super().__init__(
            f"{entity} {key!r}: expected version {expected}, found {actual}.",
            advice="Read the entity again and decide on its present state.",
        )


class Rejected(EverstateError):
    """A domain rule refuses a command; ``decide`` raises or returns it, the sender is told.

    ``code`` is a short name that programs can test, ``data`` what they may want to show.
    """

    exit_code = 5
    http_status = 422

    def __init__(self, reason: str, *, code: str | None = None, **data: object) -> None:
        self.reason, self.code, self.data = reason, code, data
        super().__init__(reason)


class CommandTimedOut(EverstateError):
    """No answer came in time; the same command with the same id may be sent again."""

    retryable = True
    exit_code = 6
    http_status = 504

    def __init__(self, entity: str, key: str, command_id: str, timeout_s: float) -> None:
        self.entity, self.key, self.command_id = entity, key, command_id
        super().__init__(
            f"{entity} {key!r}: command {command_id} was not answered within {timeout_s:g} s.",
            advice="Send it again with the same command id: it is decided once, whatever happened.",
        )


class CommandParked(EverstateError):
    """A command could not be decided (unreadable, or its code failed); it waits for a repair."""

    http_status = 500

    def __init__(self, entity: str, key: str, command_id: str, reason: str) -> None:
        self.entity, self.key, self.command_id, self.reason = entity, key, command_id, reason
        super().__init__(
            f"{entity} {key!r}: command {command_id} is parked: {reason}",
            advice=f"See everstate commands parked {entity}; mend the code, then replay it.",
        )


class InvalidCommand(EverstateError):
    """A command is not one of those that its entity type takes; nothing was sent."""

    exit_code = 2
    http_status = 422


class ProcessFailed(EverstateError):
    """A process manager's function failed on a change; it stays there until it is mended."""

    retryable = True

    def __init__(self, process: str, entity: str, key: str, cause: Exception) -> None:
        self.process, self.entity, self.key = process, entity, key
        super().__init__(
            f"process manager {process}: {entity} {key!r}: {type(cause).__name__}: {cause}.",
            advice="Mend its function and start the commands role again; nothing was passed over.",
        )


class StateStoreFailed(EverstateError):
    """A handler's local state cannot be read or written; it is made again from the log."""

    retryable = True


class ImportFailed(EverstateError):
    """A file cannot be imported; names file and row, and says how much had been committed."""

    exit_code = 2

    def __init__(
        self,
        path: str,
        row: int | None,
        reason: str,
        committed: int = 0,
        next_row: int | None = None,
    ) -> None:
        self.path, self.row, self.reason, self.committed = path, row, reason, committed
        self.next_row = next_row
        where = f"{path}, row {row}" if row is not None else path
        super().__init__(
            f"{where}: {reason} ({committed:,} rows before it were committed).",
            advice=None
            if next_row is None
            else f"Mend the row, and import the file again with --from-row {next_row}.",
        )


class Unavailable(EverstateError):
    """A server does not answer now; work goes on by itself when it is back."""

    retryable = True
    exit_code = 6
    http_status = 503


class SourceError(EverstateError):
    """A source of truth refused a request for a reason that waiting does not mend."""


class CaptureFailed(EverstateError):
    """Connect, Debezium or the captured database refused; the message has its reason."""

    exit_code = 10


class DeliveryFailed(EverstateError):
    """Kafka did not take a record; carries its key and the broker's reason."""

    retryable = True
    http_status = 503

    def __init__(self, topic: str, key: str | None, reason: str) -> None:
        self.topic, self.key, self.reason = topic, key, reason
        super().__init__(f"{topic}: record with key {key!r} was not delivered: {reason}")


class RecordRefused(DeliveryFailed):
    """Kafka will never take this record (too large, not allowed); sending it again cannot help."""

    retryable = False
    http_status = 422


class LogError(EverstateError):
    """The log refused a request for a reason that waiting does not mend."""


class Fenced(EverstateError):
    """Another process took over this role; this one must stop."""

    exit_code = 7


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


class LogIdentityChanged(EverstateError):
    """The topic is not the one the stored positions belong to (C8); nothing was read."""

    exit_code = 9


class DataLoss(EverstateError):
    """The log no longer holds offsets that were not yet read; nothing was skipped."""

    exit_code = 9


class RoleEnded(EverstateError):
    """A role of `everstate run` ended for a reason that starting it again does not mend.

    ``code`` is the role's exit code, and that of `everstate run`.
    """

    def __init__(self, role: str, code: int, said: str, log: str) -> None:
        self.role, self.code, self.exit_code = role, code, code
        super().__init__(f"{role} ended: {said}", advice=f"Its log is {log}.")


class PositionMoved(EverstateError):
    """Another attempt committed this range first; this attempt changed nothing (C11)."""

    retryable = True


class ArchiveError(EverstateError):
    """The archive cannot be read or written."""


class ArchiveFull(ArchiveError):
    """There is no room for the archive; nothing was committed, and work goes on when there is."""

    retryable = True


class PipelineError(EverstateError):
    """Spark could not do what was asked; the message has its reason in one line."""


class LocalStateError(EverstateError):
    """A local copy of states cannot be written, or cannot be made again from the log (C10)."""

    exit_code = 7


class SparkLost(PipelineError):
    """The JVM of Spark is gone: a session does not come back, its process has to start again."""


class LocalStackError(EverstateError):
    """A server of the local stack did not start, or stopped; names its log file."""

    exit_code = 6


class VerificationFailed(EverstateError):
    """A proof did not hold; the report has the rows."""

    exit_code = 8


class InvalidQuery(EverstateError):
    """A question cannot be answered as it was put; names the part and what was expected."""

    exit_code = 2
    http_status = 400


class ViewFailed(EverstateError):
    """One view of a group cannot take a change; the others can, without it.

    ``offset`` and ``key`` name the change when it could be told, else they are ``None``.
    """

    def __init__(
        self, view: str, reason: str, *, offset: int | None = None, key: str | None = None
    ) -> None:
        self.view, self.reason, self.offset, self.key = view, reason, offset, key
        where = "" if offset is None else f" at offset {offset:,} (key {key!r})"
        super().__init__(f"view {view} failed{where}: {reason}")

    def __reduce__(self) -> tuple[object, ...]:
        """Cross process borders whole: Spark pickles what a task raises."""
        return _view_failed, (self.view, self.reason, self.offset, self.key)


def _view_failed(view: str, reason: str, offset: int | None, key: str | None) -> ViewFailed:
    return ViewFailed(view, reason, offset=offset, key=key)


class HeldOverflow(EverstateError):
    """More changes wait behind version gaps than may be held; the group stops, nothing is lost."""

    def __init__(self, view_group: str, held: int, limit: int) -> None:
        self.view_group, self.held, self.limit = view_group, held, limit
        super().__init__(
            f"{view_group}: {held:,} changes wait behind version gaps, "
            f"and pipeline.held_max is {limit:,}.",
            advice="Look for the lost versions (everstate archive verify), or raise the limit.",
        )


class ViewStoreError(EverstateError):
    """The tables that all views of an entity type need cannot be written; nothing was changed."""


class WrongSource(EverstateError):
    """An entity type is written only through its one source of truth; nothing was written."""

    exit_code = 2
    http_status = 409

    def __init__(self, entity: str, declared: str, asked: str) -> None:
        self.entity, self.declared, self.asked = entity, declared, asked
        super().__init__(
            f"the source of truth of {entity} is {declared!r}; this would write it as {asked!r}.",
            advice="Write it through its source of truth, or migrate it to another one.",
        )


class InvalidRequest(EverstateError):
    """A request cannot be read; names the part and what was expected."""

    exit_code = 2
    http_status = 400


class Unauthenticated(EverstateError):
    """A request names no caller that everstate.toml knows."""

    http_status = 401


class AlreadyExists(EverstateError):
    """An entity of that key is there already; carries its version."""

    exit_code = 5
    http_status = 409

    def __init__(self, entity: str, key: str, version: int) -> None:
        self.entity, self.key, self.version = entity, key, version
        super().__init__(
            f"{entity} {key!r} exists already, at version {version}.",
            advice="Change it with PUT or PATCH, or give another key.",
        )


class PreconditionFailed(EverstateError):
    """If-Match or If-None-Match does not hold; ``version`` 0: there is no such entity."""

    exit_code = 5
    http_status = 412

    def __init__(self, entity: str, key: str, condition: str, version: int) -> None:
        self.entity, self.key, self.condition, self.version = entity, key, condition, version
        found = f"the version is {version}" if version else "it does not exist"
        super().__init__(
            f"{entity} {key!r}: {condition} does not hold, {found}.",
            advice="Read the entity again and decide on its present state.",
        )


class RequestTooLarge(EverstateError):
    """The body is larger than any change may be; nothing was read further."""

    http_status = 413

    def __init__(self, limit: int) -> None:
        self.limit = limit
        super().__init__(f"the body is larger than log.message_bytes_max, which is {limit:,}.")


class UnsupportedMediaType(EverstateError):
    """The body is of a type that this method does not take."""

    http_status = 415

    def __init__(self, found: str, accepted: tuple[str, ...]) -> None:
        self.found, self.accepted = found, accepted
        super().__init__(
            f"the body is {found or 'of no declared type'}; expected {' or '.join(accepted)}."
        )


class InvalidBody(EverstateError):
    """A body is no entity; ``problems`` names each field and its reason."""

    exit_code = 2
    http_status = 422

    def __init__(self, entity: str, problems: tuple[tuple[str, str], ...]) -> None:
        self.entity, self.problems = entity, problems
        listed = "; ".join(f"{field}: {reason}" for field, reason in problems)
        super().__init__(f"no {entity}: {listed}")


class IdempotencyKeyReused(EverstateError):
    """The Idempotency-Key came before with another request; nothing was written."""

    http_status = 422

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(
            f"Idempotency-Key {key!r} came before with another request.",
            advice="Use a new key for each request, and the same only to repeat one.",
        )


class EventConflict(EverstateError):
    """An event of that id was written with other content; the first one holds."""

    exit_code = 5
    http_status = 409

    def __init__(self, entity: str, key: str) -> None:
        self.entity, self.key = entity, key
        super().__init__(
            f"{entity} {key!r} was written with other content; events are never changed.",
            advice="Give each event an id of its own, and repeat one only as it was.",
        )
