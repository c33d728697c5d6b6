"""The pipeline: archive, views, captures, proofs."""

from __future__ import annotations

from collections.abc import Sequence

from everstate.errors.base import EverstateError


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


class SparkLost(PipelineError):
    """The JVM of Spark is gone: a session does not come back, its process has to start again."""


class LocalStateError(EverstateError):
    """A local copy of states cannot be written, or cannot be made again from the log (C10)."""

    exit_code = 9


class CaptureFailed(EverstateError):
    """Connect, Debezium or the captured database refused; the message has its reason."""

    exit_code = 10


class VerificationFailed(EverstateError):
    """A proof did not hold; the report has the rows."""

    exit_code = 8


class ViewFailed(EverstateError):
    """One view cannot take a change; the others can, without it.

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
    """More changes wait than may be held; the core or capture stops, nothing is lost."""

    def __init__(
        self,
        who: str,
        held: int,
        limit: int,
        *,
        why: str = "behind version gaps",
        advice: str = "Look for the lost versions (everstate archive verify), or raise the limit.",
    ) -> None:
        self.who, self.held, self.limit = who, held, limit
        super().__init__(
            f"{who}: {held:,} changes wait {why}, and pipeline.held_max is {limit:,}.",
            advice=advice,
        )


class PublishRefused(EverstateError):
    """Readers' views depend on a name whose columns would change; readers keep the old version."""

    exit_code = 5

    def __init__(self, view: str, dependents: Sequence[str]) -> None:
        self.view, self.dependents = view, tuple(dependents)
        super().__init__(
            f"view {view}: its new version has other columns, and {', '.join(dependents)} depends "
            "on it. Readers keep the old version.",
            advice="Drop what depends on it, or declare the view under a new name.",
        )


class NoGap(EverstateError):
    """No change of the key waits for a missing version; nothing was done."""

    exit_code = 4
    http_status = 404

    def __init__(self, entity: str, key: str) -> None:
        self.entity, self.key = entity, key
        super().__init__(
            f"{entity} {key!r}: no change waits for a missing version.",
            advice="`everstate gaps list` shows the keys that have one.",
        )


class GapTooWide(EverstateError):
    """So many versions are missing that a wrong version number is likelier; nothing was done."""

    exit_code = 5
    http_status = 409

    def __init__(self, entity: str, key: str, missing: int, limit: int) -> None:
        self.entity, self.key, self.missing, self.limit = entity, key, missing, limit
        super().__init__(
            f"{entity} {key!r}: {missing:,} versions are missing, and at most {limit:,} are "
            "accepted.",
            advice="Look at the message that waits: who wrote that version?",
        )


class ViewStoreError(EverstateError):
    """The tables that all views of an entity type need cannot be written; nothing was changed."""
