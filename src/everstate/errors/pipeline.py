"""The pipeline: archive, views, captures, proofs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from everstate.errors.base import EverstateError
from everstate.errors.servers import Unavailable


class PositionMoved(EverstateError):
    """Another attempt committed this range first; this attempt changed nothing (C11)."""

    retryable = True


class ArchiveError(EverstateError):
    """The archive cannot be read or written."""


class NoArchive(ArchiveError):
    """Nothing of the entity type was archived yet."""

    def __init__(self, entity: str) -> None:
        self.entity = entity
        super().__init__(
            f"there is no archive of {entity} yet.", advice="Start one with `everstate run`."
        )


class ArchiveDamaged(ArchiveError):
    """Bytes of the archive are not those that were written; the file is named."""

    def __init__(self, message: str) -> None:
        super().__init__(
            message,
            advice="`everstate archive verify` names each damaged file, and `everstate archive "
            "repair` writes its records again while the log has them. A file of an archive never "
            "changes: you may also put the one of the same name from a copy in its place, with its "
            "`.NAME.crc`. When a file of `_delta_log` or `_ledger` is damaged and there is no "
            "copy, set a new archive.path: `everstate run` archives the log again.",
        )


class ArchiveFull(ArchiveError):
    """The disk of the archive is full; nothing was committed, and archiving continues later."""

    retryable = True


class ArchiveUnreachable(ArchiveError, Unavailable):
    """The object store of the archive does not answer or refuses; everstate tries again later."""

    def __init__(self, message: str) -> None:
        super().__init__(
            message,
            advice="See whether the store runs, and which keys this process has: those of its "
            "environment, its profile or its role.",
        )


class PipelineError(EverstateError):
    """Spark failed; the message has its reason in one line."""


class SparkLost(PipelineError):
    """The JVM of Spark ended; its process must be started again to get a new session."""


class LocalStateError(EverstateError):
    """A local copy of states cannot be written, or cannot be rebuilt from the log (C10)."""

    exit_code = 9


class CaptureFailed(EverstateError):
    """Connect, Debezium or the captured database refused a request; the message has its reason."""

    exit_code = 10


class SourceReplaced(EverstateError):
    """A captured database was replaced by another one, or restored to an earlier state."""

    exit_code = 10
    sentence: ClassVar[str] = (
        "the database was replaced, or restored to an earlier copy ({reason}). Its log positions "
        "cannot be ordered after those of the earlier changes, so it is not read any further, and "
        "the log lacks what was written since."
    )
    remedy: ClassVar[str] = (
        "{again} reads the database as it is now and continues from there; or connect the capture "
        "to its former database."
    )

    def __init__(self, capture: str, reason: str, table: str = "") -> None:
        self.capture, self.table = capture, table
        again = f"`everstate cdc snapshot {capture} --new-epoch`"
        sentence = self.sentence.format(reason=reason, table=table)
        super().__init__(f"capture {capture}: {sentence}", advice=self.remedy.format(again=again))


class RowsUnplaced(SourceReplaced):
    """Rows of a captured database have no positions, so that re-reads and new rows look alike."""

    sentence = (
        "{reason}, so that rows that were read before look the same as new ones. No row was "
        "skipped: cleaning stopped before the first of them."
    )
    remedy = (
        "Set binlog_legacy_event_pos = ON on the server and in its configuration; then {again} "
        "reads the database as it is now."
    )


class TableReplaced(SourceReplaced):
    """A captured table was replaced by one of which the connector does not know the columns."""

    sentence = (
        "RENAME TABLE gave the name {reason} to a table that was there before the capture, so that "
        "its connector reads the rows by the columns of the former table. Cleaning stopped before "
        "them: no such row is in the log."
    )
    remedy = "{again} reads the database as it is now and continues from there."


class TableMisread(SourceReplaced):
    """The connector reads the rows of a table by other columns than the table has."""

    sentence = (
        "its connector reads the rows of {table} by other columns than the table has ({reason}): "
        "it did not see the statement that made them so, such as ALTER TABLE … RENAME TO of "
        "another table. Values that it read since that statement may stand in wrong fields; the "
        "clean role leaves the table out, or pauses the connector where it is the only one."
    )
    remedy = (
        "{again} reads the database as it is now: each wrong state gets a change that puts it "
        "right."
    )


class VerificationFailed(EverstateError):
    """A proof failed; the report has the rows that differ."""

    exit_code = 8


class ViewFailed(EverstateError):
    """One view cannot apply a change; the other views continue.

    ``offset`` and ``key`` name the change if it is known, else they are ``None``.
    """

    def __init__(
        self, view: str, reason: str, *, offset: int | None = None, key: str | None = None
    ) -> None:
        self.view, self.reason, self.offset, self.key = view, reason, offset, key
        where = "" if offset is None else f" at offset {offset:,} (key {key!r})"
        super().__init__(f"view {view} failed{where}: {reason}")

    def __reduce__(self) -> tuple[object, ...]:
        """Cross process borders whole: Spark pickles what a task raises."""
        again = partial(type(self), offset=self.offset, key=self.key)
        return again, (self.view, self.reason)


class StoreSilent(ViewFailed):
    """The store that has the rows of a view cannot be reached, or did not answer in time."""


class HeldOverflow(EverstateError):
    """More changes are held than `pipeline.held_max` allows; the core or capture stops."""

    def __init__(
        self,
        who: str,
        held: int,
        limit: int,
        *,
        why: str = "behind version gaps",
        advice: str = "Find the lost versions (`everstate archive verify`), or raise the limit.",
    ) -> None:
        self.who, self.held, self.limit = who, held, limit
        super().__init__(
            f"{who}: {held:,} changes wait {why}, and pipeline.held_max is {limit:,}.",
            advice=advice,
        )


class ViewRowsMissing(ViewFailed):
    """A store has no table of a view: it was emptied, or another server has its address now.

    Nothing is written there, because all earlier rows would be missing in silence.
    """

    def __init__(self, view: str, table: str) -> None:
        self.table = table
        super().__init__(view, f"its store does not have the table {table}.")
        self.advice = f"`everstate views rebuild {view}` builds it again."

    def __reduce__(self) -> tuple[object, ...]:
        """Cross process borders whole: Spark pickles what a task raises."""
        return type(self), (self.view, self.table)


class PublishRefused(EverstateError):
    """SQL views of readers depend on columns that would change or go; readers see what they saw.

    ``is_dropped``: the name was to be dropped, and not to show a new version.
    """

    exit_code = 5

    def __init__(self, view: str, dependents: Sequence[str], *, is_dropped: bool = False) -> None:
        self.view, self.dependents = view, tuple(dependents)
        if is_dropped:
            super().__init__(
                f"view {view} is not dropped, because {', '.join(dependents)} depends on it.",
                advice="Drop the dependents first.",
            )
            return
        super().__init__(
            f"view {view}: its new version has other columns, and {', '.join(dependents)} depends "
            "on it. The old version stays published.",
            advice="Drop the dependents, or declare the view under a new name.",
        )


class BuildGivenUp(EverstateError):
    """The build of a version was cancelled or replaced; the published version stays."""

    def __init__(self, view: str, version: int) -> None:
        self.view, self.version = view, version
        super().__init__(f"version {version} of view {view} is no longer needed.")

    def __reduce__(self) -> tuple[object, ...]:
        """Cross process borders whole: Spark pickles what a task raises."""
        return BuildGivenUp, (self.view, self.version)


class BuildFailed(EverstateError):
    """A version cannot be built at present; what readers see stays, and so does the request."""

    def __init__(self, view: str, version: int, reason: str) -> None:
        self.view, self.version, self.reason = view, version, reason
        said = reason.removeprefix(f"view {view}: ").removesuffix(".")
        super().__init__(
            f"version {version} of view {view} cannot be built: {said}.",
            advice="It stays requested: `everstate run` tries again at its start and every few "
            f"minutes. `everstate views rebuild {view} --cancel` withdraws it.",
        )


class VersionsDiffer(EverstateError):
    """A new version of a view was to have the rows of the one that readers see, and has others."""

    exit_code = 5

    def __init__(self, view: str, version: int, different: int) -> None:
        self.view, self.version, self.different = view, version, different
        super().__init__(
            f"version {version} of view {view} is not published: {different:,} rows differ from "
            "the version that readers see.",
            advice=f"`everstate views rebuild {view}` publishes the version all the same; with "
            "`--cancel` the command gives it up.",
        )


class RequestCancelled(EverstateError):
    """A running pipeline does not carry out a request; nothing was changed."""

    def __init__(self, verb: str, reason: str) -> None:
        self.verb, self.reason = verb, reason
        super().__init__(f"{verb}: {reason}.", advice="Run the command again.")


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
    """Too many versions are missing, probably by a wrong version number; nothing was done."""

    exit_code = 5
    http_status = 409

    def __init__(self, entity: str, key: str, missing: int, limit: int) -> None:
        self.entity, self.key, self.missing, self.limit = entity, key, missing, limit
        super().__init__(
            f"{entity} {key!r}: {missing:,} versions are missing, and at most {limit:,} are "
            "accepted.",
            advice="Check the message that waits: its writer may have given it a wrong version.",
        )


class ViewStoreError(EverstateError):
    """The tables that all views of an entity type need cannot be written; nothing was changed."""
