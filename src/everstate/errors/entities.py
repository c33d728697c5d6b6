"""Changes and entities: what is written, asked for, or in the way."""

from __future__ import annotations

from everstate.errors.base import EverstateError


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
            f"the change is {size:,} bytes (of its two states the larger one counts) and "
            f"log.message_bytes_max is {limit:,}. "
            "Raise the limit, or keep large values outside and store a reference.",
        )


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

    def __init__(
        self,
        path: str,
        row: int | None,
        reason: str,
        committed: int = 0,
        next_row: int | None = None,
        *,
        advice: str | None = None,
    ) -> None:
        self.path, self.row, self.reason, self.committed = path, row, reason, committed
        self.next_row = next_row
        where = f"{path}, row {row}" if row is not None else path
        before = "" if row is None else f" ({committed:,} rows before it were committed)"
        if next_row is not None:
            advice = (
                f"Mend the row, and import the file again with --from-row {next_row}; --check "
                "lists all rows that are wrong."
            )
        super().__init__(f"{where}: {reason}{before}.", advice=advice)


class InvalidQuery(EverstateError):
    """A question cannot be answered as it was put; names the part and what was expected."""

    exit_code = 2
    http_status = 400
