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
    exit_code: ClassVar[int] = 1
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


class ImportFailed(EverstateError):
    """A file cannot be imported; names file and row, and says how much had been committed."""

    exit_code = 2

    def __init__(self, path: str, row: int | None, reason: str, committed: int = 0) -> None:
        self.path, self.row, self.reason, self.committed = path, row, reason, committed
        where = f"{path}, row {row}" if row is not None else path
        super().__init__(f"{where}: {reason} ({committed:,} rows before it were committed)")


class Unavailable(EverstateError):
    """A server does not answer now; work goes on by itself when it is back."""

    retryable = True
    exit_code = 6
    http_status = 503


class DeliveryFailed(EverstateError):
    """Kafka did not take a record; carries its key and the broker's reason."""

    retryable = True

    def __init__(self, topic: str, key: str | None, reason: str) -> None:
        self.topic, self.key, self.reason = topic, key, reason
        super().__init__(f"{topic}: record with key {key!r} was not delivered: {reason}")


class RecordRefused(DeliveryFailed):
    """Kafka will never take this record (too large, not allowed); sending it again cannot help."""

    retryable = False


class LogError(EverstateError):
    """The log refused a request for a reason that waiting does not mend."""


class Fenced(EverstateError):
    """Another process took over this role; this one must stop."""

    exit_code = 7


class LogIdentityChanged(EverstateError):
    """The topic is not the one the stored positions belong to (C8); nothing was read."""

    exit_code = 7


class DataLoss(EverstateError):
    """The log no longer holds offsets that were not yet read; nothing was skipped."""

    exit_code = 7


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
    """More changes wait behind version gaps than may be held; the partition stops, none is lost."""

    def __init__(self, view_group: str, held: int, limit: int) -> None:
        self.view_group, self.held, self.limit = view_group, held, limit
        super().__init__(
            f"{view_group}: {held:,} changes wait behind version gaps, "
            f"and pipeline.held_max is {limit:,}.",
            advice="Look for the lost versions (everstate archive verify), or raise the limit.",
        )


class ViewStoreError(EverstateError):
    """The tables that all views of an entity type need cannot be written; nothing was changed."""
