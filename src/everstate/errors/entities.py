"""Changes and entities: errors of writes and of questions."""

from __future__ import annotations

from everstate.errors.base import EverstateError


class NotFound(EverstateError):
    """The entity has no state at that time or version."""

    exit_code = 4
    http_status = 404


class Deleted(NotFound):
    """The entity is deleted, or was at that time; ``version`` is the one that deleted it."""

    http_status = 410

    def __init__(self, message: str, version: int, *, advice: str | None = None) -> None:
        self.version = version
        super().__init__(message, advice=advice)


class NoViews(NotFound):
    """The views that are asked for were never made."""

    def __init__(self) -> None:
        super().__init__(
            "the views do not exist yet.",
            advice="`everstate run` makes them when it starts: start it, or start it again after "
            "a view was declared.",
        )


class InvalidChange(EverstateError):
    """A change breaks a rule of the envelope; names entity, key and field."""

    exit_code = 2
    http_status = 422

    def __init__(self, entity: str, key: str | None, field: str, reason: str) -> None:
        self.entity, self.key, self.field, self.reason = entity, key, field, reason
        super().__init__(f"{entity} {key!r}: {field}: {reason}")


class MissingProvenance(InvalidChange):
    """A write has no provenance; every change must name its writer."""

    def __init__(self, entity: str, key: str | None, field: str) -> None:
        super().__init__(entity, key, field, "provenance is required and must not be empty")


class ChangeTooLarge(InvalidChange):
    """The change is larger than `log.message_bytes_max`; nothing was written."""

    http_status = 413

    def __init__(self, entity: str, key: str, size: int, limit: int) -> None:
        self.size, self.limit = size, limit
        super().__init__(
            entity,
            key,
            "size",
            f"the change has {size:,} bytes (the larger of its two states counts), and "
            f"log.message_bytes_max is {limit:,}. "
            "Raise the limit, or keep large values outside and store a reference.",
        )


class VersionConflict(EverstateError):
    """Another writer changed the entity first; read it again and decide again."""

    retryable = True
    exit_code = 5
    http_status = 412

    def __init__(self, entity: str, key: str, expected: int, actual: int) -> None:
        self.entity, self.key, self.expected, self.actual = entity, key, expected, actual
        super().__init__(
            f"{entity} {key!r}: expected version {expected}, found {actual}.",
            advice="Read the entity again and decide on its current state.",
        )


class ImportFailed(EverstateError):
    """A file cannot be imported; names the file, the row, and how many rows were committed."""

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
                f"Correct the row, and import the file again with --from-row {next_row}; --check "
                "lists all invalid rows."
            )
        super().__init__(f"{where}: {reason}{before}.", advice=advice)


class InvalidQuery(EverstateError):
    """A query is invalid; names the part and what was expected."""

    exit_code = 2
    http_status = 400


class ContradictoryQuery(InvalidQuery):
    """Parts of a query are valid, but exclude each other; names them."""

    http_status = 422


class TooManyRows(InvalidQuery):
    """A view has more rows than can be compared at each of its positions."""

    http_status = 422

    def __init__(self, view: str, limit: int) -> None:
        self.view, self.limit = view, limit
        super().__init__(
            f"{view} has more than {limit:,} rows, which is too many for a subscription to it.",
            advice="Subscribe to its entity type (/stream/v1), or read its pages (/views/v1).",
        )


class InvalidToken(EverstateError):
    """A token is invalid, incomplete, or of another project or log; nothing was read."""

    exit_code = 2
    http_status = 422

    def __init__(self, reason: str, *, advice: str | None = None) -> None:
        self.reason = reason
        super().__init__(
            f"the token cannot be used: {reason}.",
            advice=advice or "Use a token of a write, a snapshot or a stream of this project.",
        )


class ThrottledChangesWait(EverstateError):
    """A view has throttled changes to apply, so no token says what its rows have."""

    retryable = True
    exit_code = 6
    http_status = 503

    def __init__(self, view: str) -> None:
        self.view = view
        super().__init__(
            f"{view} has throttled changes that it did not apply yet, so no token says which "
            "changes its rows have.",
            advice="`everstate views list` shows how many wait. Read it again when none waits, or "
            "read a view without a throttle.",
        )


class NotCaughtUp(EverstateError):
    """A view did not reach a token in time; the same query may be sent again."""

    retryable = True
    exit_code = 6
    http_status = 504

    def __init__(
        self, view: str, missing: str, waited_s: float, *, advice: str | None = None
    ) -> None:
        self.view, self.missing, self.waited_s = view, missing, waited_s
        super().__init__(
            f"{view} did not reach the token within {waited_s:g} s: {missing}.",
            advice=advice
            or "`everstate views list` shows its position, and `everstate run` advances it; or "
            "wait longer.",
            public=f"{view} did not apply the write within {waited_s:g} s: {missing}. Send the "
            "request again.",
        )
