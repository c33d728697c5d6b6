"""Law 5: the archive proves its own completeness, from its commits, its rows and the live log."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from pyspark.sql import DataFrame, Row, SparkSession, Window
from pyspark.sql import functions as F

from everstate.archive import (
    ArchiveLog,
    ArchiveReader,
    CommitNote,
    Ledger,
    LedgerRow,
    Position,
    frozen,
)
from everstate.archive.ordered import RECORD_COLUMNS
from everstate.archive.sums import check_table, require_sums
from everstate.changes import EntityType
from everstate.config import Config
from everstate.errors import ArchiveDamaged
from everstate.log.extent import LogExtent, log_extent
from everstate.log.topics import TopicNames
from everstate.pipeline.archiving.archiver import archived_topic
from everstate.pipeline.archiving.audit_columns import compared
from everstate.pipeline.archiving.audit_offsets import (
    PIECE_OFFSETS,
    SAMPLES_MAX,
    PieceCheck,
    PieceResult,
)
from everstate.pipeline.archiving.audit_states import (
    Digest,
    StateDigests,
    by_text,
    state_digests,
    with_digests,
)
from everstate.pipeline.spark.archived import lake_table
from everstate.pipeline.spark.outcomes import OUTCOME, outcomes_of
from everstate.pipeline.spark.session import spark_errors

_Place = tuple[int, int]
"""generation, partition"""


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault of the archive: the broken rule, the place, and how often it was found."""

    rule: str
    where: str
    message: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class UnservedRun:
    """Offsets ``[start, end)`` of committed ranges for which the log served no record."""

    generation: int
    partition: int
    start: int
    end: int
    kind: str
    """``marker`` (of a transaction), ``aborted``, ``unproved`` (the log is gone), ``lost``."""


@dataclass
class AuditReport:
    """The result of an audit; it holds when there is no problem."""

    entity: str
    version: int
    """Version of the table that was audited."""
    position: Position
    commits: int = 0
    rows: int = 0
    unreadable: int = 0
    keys: int = 0
    changes: int = 0
    """First occurrences of (key, version)."""
    duplicates: int = 0
    """Changes that are in the log twice, with the same id; harmless (C6)."""
    conflicts: int = 0
    """Records with a version that another id has already taken; they go to `.dead` (C6)."""
    marker_offsets: int = 0
    aborted_offsets: int = 0
    unproved_offsets: int = 0
    """Not served by the log when they were read; the log no longer has them, to check again."""
    compared_with_log: int = 0
    compared_with_messages: int | None = None
    """Records whose typed columns were compared with their message: those that were archived under
    the present model. ``None``: the model was not given."""
    runs: list[UnservedRun] = field(default_factory=list)
    conflict_rows: list[dict[str, Any]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    not_read: list[str] = field(default_factory=list)
    """Which parts of the log the audit did not read, and why."""
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether the archive is complete, without duplicates, with dense and chained versions."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        return {**asdict(self), "holds": self.holds}

    def lines(self) -> list[tuple[str, Any]]:
        """The report as named figures, in the order in which they are shown."""
        return [
            ("holds", self.holds),
            ("records", self.rows),
            ("unreadable", self.unreadable),
            ("changes", self.changes),
            ("entities", self.keys),
            ("written twice", self.duplicates),
            ("conflicts", self.conflicts),
            ("commits", self.commits),
            ("offsets of markers", self.marker_offsets),
            ("offsets of aborted records", self.aborted_offsets),
            ("offsets that the log no longer has", self.unproved_offsets),
            ("compared with the log", self.compared_with_log),
            ("columns compared with the message", self.compared_with_messages),
            ("not read", "; ".join(self.not_read) or "nothing"),
            ("seconds", round(self.seconds, 1)),
        ]


def audit(
    spark: SparkSession,
    config: Config,
    entity: str,
    *,
    against_log: bool = True,
    entity_type: EntityType | None = None,
) -> AuditReport:
    """Prove that the archive of an entity type is complete (law 5).

    The ranges of all commits cover the offsets from the archive's first one to its position, with
    no hole or overlap; each range has the number of rows in its commit, each offset once; offsets
    without a record are checked with independent readers of the live log; versions are dense and
    chained. ``against_log`` also compares every record that the log still has, byte for byte, with
    its headers and timestamp; without the log, a log that lost its end and was written to since is
    not detected. With ``entity_type``, typed columns are compared with their messages, and the
    states of a chain by the values of the model's fields, since an older model had others; without
    it, by all that they have. Raises NoArchive, Unavailable. Cost: one pass over
    offsets, one sort by key, one reading of the log, and one parsing of the messages; only the
    ledger is changed.
    """
    began = time.monotonic()
    log, ledger = ArchiveLog(config, entity), Ledger(config, entity)
    version, note = frozen(log, ledger)
    report = AuditReport(entity, version, note.positions)
    _audit_sums(report, ArchiveReader(config, entity), ledger)
    if report.problems:
        report.not_read.append("records and offsets, because of the damaged files")
        report.seconds = time.monotonic() - began
        return report
    ledger.sync(log)
    rows = [row for row in ledger.rows() if row.commit_version <= version]
    report.commits = len({row.commit_version for row in rows})
    report.problems += tiling_problems(rows, note)
    with spark_errors(f"auditing the archive of {entity}"):
        archive = lake_table(spark, config, entity, version=version)
        _audit_offsets(report, config, archive, rows, note, against_log=against_log)
        stored = archive.schema["current"].dataType
        _audit_versions(report, archive, state_digests(entity_type, stored))
        _audit_columns(report, archive, entity_type)
    report.seconds = time.monotonic() - began
    return report


def _audit_sums(report: AuditReport, reader: ArchiveReader, ledger: Ledger) -> None:
    """Each damaged file of the table, its log and its ledger."""
    files = [(reader.path, [file.path for file in reader.files()])]
    if ledger.exists():
        files.append((ledger.path, ledger.files()))
    for path, names in files:
        damaged, without = check_table(path, names)
        report.problems += [Problem("damaged", path, str(each)) for each in damaged.values()]
        if without:
            shown = ", ".join(without[:3]) + (" …" if len(without) > 3 else "")
            report.not_read.append(f"the sums of {len(without)} files of {path}: none ({shown})")
    try:
        require_sums(reader.path)
    except ArchiveDamaged as found:
        report.problems.append(Problem("no sums", reader.path, str(found)))


def tiling_problems(rows: Sequence[LedgerRow], note: CommitNote) -> Iterator[Problem]:
    """Holes and overlaps between the ranges of all commits, and missing commits."""
    epochs = sorted({row.epoch for row in rows})
    missing = set(range(epochs[-1] + 1 if epochs else 0)) - set(epochs)
    if missing:
        yield Problem("ranges", "ledger", f"epochs {sorted(missing)[:10]} have no ranges")
    reached: dict[_Place, int] = {}
    for row in rows:
        place = (row.generation, row.partition)
        where = f"g{row.generation}[{row.partition}] commit {row.commit_version}"
        at = reached.get(place, row.start if row.epoch == 0 else 0)
        if row.start > at:
            yield Problem("ranges", where, f"offsets {at:,} to {row.start:,} are in no commit")
        if row.start < at:
            yield Problem("ranges", where, f"offsets {row.start:,} to {at:,} are in two commits")
        reached[place] = max(row.end, at)
    for generation, offsets in note.positions.items():
        for partition, offset in offsets.items():
            found = reached.get((generation, partition), 0)
            if found != offset:
                where = f"g{generation}[{partition}]"
                yield Problem(
                    "ranges", where, f"the position is {offset:,}, but the ranges end at {found:,}"
                )


def _audit_offsets(
    report: AuditReport,
    config: Config,
    archive: DataFrame,
    rows: Sequence[LedgerRow],
    note: CommitNote,
    *,
    against_log: bool,
) -> None:
    names = TopicNames(config.log.prefix)
    topics = {generation: names.changes(report.entity, generation) for generation in note.positions}
    extents = _extents(report, config, topics, note)
    if not against_log:
        report.not_read.append("the log's records, because the comparison was not requested")
    pieces = list(_pieces(rows, extents))
    expected = archive.sparkSession.createDataFrame(
        [piece.expected() for piece in pieces], _EXPECTED
    )
    found = archive.select(
        "generation",
        "partition",
        F.floor(F.col("offset") / PIECE_OFFSETS).cast("bigint").alias("piece"),
        "offset",
        *(RECORD_COLUMNS[2:] if against_log else ()),
    )
    check = PieceCheck(config, topics, against_log)
    job = (
        found.unionByName(expected, allowMissingColumns=True)
        .groupBy("generation", "partition", "piece")
        .applyInArrow(lambda key, table: check(key, table), OUTCOME)
    )
    results = [PieceResult(**each) for each in outcomes_of(job)]
    by_piece = {(row.generation, row.partition, row.piece): row for row in results}
    counted: dict[int, int] = {}
    for piece in pieces:
        result = by_piece[piece.generation, piece.partition, piece.piece]
        for index, count in zip(piece.indexes, result.range_rows, strict=True):
            counted[index] = counted.get(index, 0) + count
    report.problems += _count_problems(rows, counted)
    for row in sorted(results, key=lambda r: (r.generation, r.partition, r.piece)):
        _take(report, row)


@dataclass
class _Piece:
    """One piece's part of the ledger."""

    generation: int
    partition: int
    piece: int
    log_begin: int
    log_end: int
    indexes: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def expected(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "indexes"}


_EXPECTED: Final = (
    "generation int, partition int, piece bigint, log_begin bigint, log_end bigint, "
    "starts array<bigint>, ends array<bigint>"
)


def _pieces(rows: Sequence[LedgerRow], extents: Mapping[int, LogExtent]) -> Iterator[_Piece]:
    """The ledger's ranges cut at the borders of pieces, by (generation, partition, piece)."""
    pieces: dict[tuple[int, int, int], _Piece] = {}
    for index, row in enumerate(rows):
        for number in range(row.start // PIECE_OFFSETS, -(-row.end // PIECE_OFFSETS)):
            start = max(row.start, number * PIECE_OFFSETS)
            end = min(row.end, (number + 1) * PIECE_OFFSETS)
            if start >= end:
                continue
            place, log = (row.generation, row.partition), extents[row.generation]
            ends = (log.begins.get(row.partition, 0), log.ends.get(row.partition, 0))
            piece = pieces.setdefault((*place, number), _Piece(*place, number, *ends))
            piece.indexes.append(index)
            piece.starts.append(start)
            piece.ends.append(end)
    for piece in pieces.values():
        in_order = sorted(range(len(piece.starts)), key=lambda at: piece.starts[at])
        for values in (piece.indexes, piece.starts, piece.ends):
            values[:] = [values[at] for at in in_order]
        yield piece


def _extents(
    report: AuditReport, config: Config, topics: Mapping[int, str], note: CommitNote
) -> dict[int, LogExtent]:
    """The offsets that the live log has of each generation; reports parts that nobody reads."""
    extents = {}
    for generation, topic in topics.items():
        stored = archived_topic(note, generation)
        found = log_extent(config, topic, stored, note.positions[generation])
        extents[generation] = found
        report.problems += [Problem("not read", f"g{generation}", each) for each in found.unread]
        report.not_read += [*found.unread, *([found.gone] if found.gone else [])]
    return extents


def _count_problems(rows: Sequence[LedgerRow], counted: Mapping[int, int]) -> Iterator[Problem]:
    wrong = [index for index, row in enumerate(rows) if counted.get(index, 0) != row.rows]
    for index in wrong[:SAMPLES_MAX]:
        row, count = rows[index], counted.get(index, 0)
        yield Problem(
            "rows",
            f"g{row.generation}[{row.partition}] commit {row.commit_version}",
            f"{count:,} rows in [{row.start:,}, {row.end:,}), but the commit added {row.rows:,}",
        )
    if len(wrong) > SAMPLES_MAX:
        yield Problem("rows", "table", "more ranges with wrong counts", len(wrong) - SAMPLES_MAX)


def _take(report: AuditReport, row: PieceResult) -> None:
    """Add one piece's result to the report."""
    report.rows += row.rows
    report.marker_offsets += row.marker_offsets
    report.aborted_offsets += row.aborted_offsets
    report.unproved_offsets += row.unproved_offsets
    report.compared_with_log += row.compared
    where = f"g{row.generation}[{row.partition}]"
    for rule, count, at, text in (
        ("offset twice", row.twice, row.twice_at, "offsets are archived twice"),
        ("outside", row.extra, row.extra_at, "rows are in no committed range"),
        ("lost", row.lost, row.lost_at, "records of the log are not in the archive"),
        ("differs", row.differing, row.differing_at, "records differ from those of the log"),
    ):
        if count:
            shown = ", ".join(str(offset) for offset in at[:5])
            report.problems.append(Problem(rule, where, f"{count:,} {text}: {shown}", count))
    for start, end, kind in zip(row.run_starts, row.run_ends, row.run_kinds, strict=True):
        if len(report.runs) < SAMPLES_MAX:
            report.runs.append(UnservedRun(row.generation, row.partition, start, end, kind))


def _audit_versions(report: AuditReport, archive: DataFrame, digests: StateDigests) -> None:
    judged = _judged(archive, by_text)
    figures = _figures(judged)
    if figures.chain:  # few writers give the original state another text than it had
        judged = _judged(archive, digests.by_values)
        figures = _figures(judged)
    report.changes, report.keys = figures.changes, figures.keys
    report.duplicates, report.conflicts = figures.duplicates, figures.conflicts
    report.unreadable = report.rows - figures.changes - figures.duplicates - figures.conflicts
    if figures.conflicts:
        conflicts = judged.where("nth > 1 AND id != first_id").limit(SAMPLES_MAX)
        columns = ("key", "version", "id", "first_id", "generation", "partition", "offset")
        report.conflict_rows = [row.asDict() for row in conflicts.select(*columns).collect()]
    for name in _VERSION_RULES:
        count = figures[name]
        if count:
            rows = judged.where(F.col("fault") == name).limit(SAMPLES_MAX).collect()
            for row in rows:
                before = row.previous.version if row.previous else 0
                place = f"g{row.generation}[{row.partition}]@{row.offset}"
                text = _VERSION_RULES[name].format(version=row.version, previous=before)
                report.problems.append(Problem(name, f"{row.key} {place}", text))
            if count > len(rows):
                report.problems.append(
                    Problem(name, "table", "more problems of this kind", count - len(rows))
                )


def _audit_columns(report: AuditReport, archive: DataFrame, entity_type: EntityType | None) -> None:
    if entity_type is None:
        report.not_read.append("the typed columns, because no app gave their model")
        return
    report.compared_with_messages, wrong = compared(archive, entity_type)
    for each in wrong:
        place = f"g{each.generation}[{each.partition}]@{each.offset}"
        text = (
            f"{each.count:,} records have other values in {', '.join(each.columns)} than their "
            f"messages, which are right: `everstate archive reparse {report.entity}` writes the "
            "columns again"
        )
        report.problems.append(Problem("columns", f"first {place}", text, each.count))


def _figures(judged: DataFrame) -> Row:
    return judged.agg(
        F.count_if(F.expr("nth = 1")).alias("changes"),
        F.count_if(F.expr("nth = 1 AND previous IS NULL")).alias("keys"),
        F.count_if(F.expr("nth > 1 AND id = first_id")).alias("duplicates"),
        F.count_if(F.expr("nth > 1 AND id != first_id")).alias("conflicts"),
        *(F.count_if(F.col("fault") == name).alias(name) for name in _VERSION_RULES),
    ).collect()[0]


_VERSION_RULES: Final = {
    "version gap": "version {version} follows version {previous}",
    "partition": "version {version} is in another partition than version {previous}",
    "order": "version {version} is before version {previous} in the log",
    "chain": "the original state of version {version} is not the current state of version "
    "{previous}",
}


def _judged(archive: DataFrame, digest: Digest) -> DataFrame:
    """Each readable record with its rank among the records of its version, and its fault if any."""
    messages = archive.where("reason IS NULL").select(
        "key", "version", "generation", "partition", "offset", "id", "kind", "raw_value"
    )
    changes = with_digests(messages, digest)
    in_order = Window.partitionBy("key").orderBy("version", "generation", "offset")
    of_version = Window.partitionBy("key", "version").orderBy("generation", "offset")
    ranked = changes.select(
        "*",
        F.row_number().over(of_version).alias("nth"),
        F.first("id").over(of_version).alias("first_id"),
    )
    earlier = in_order.rowsBetween(Window.unboundedPreceding, -1)
    step = F.struct("version", "generation", "partition", "offset", "after")
    previous = F.last(F.when(F.col("nth") == 1, step), ignorenulls=True).over(earlier)
    same_log = F.col("previous.generation") == F.col("generation")
    fault = (
        F.when(F.col("nth") > 1, None)
        .when(F.coalesce("previous.version", F.lit(0)) + 1 != F.col("version"), "version gap")
        .when(same_log & (F.col("previous.partition") != F.col("partition")), "partition")
        .when(same_log & (F.col("previous.offset") > F.col("offset")), "order")
        .when(
            (F.col("kind") != "event") & ~F.col("before").eqNullSafe(F.col("previous.after")),
            "chain",
        )
    )
    return ranked.select("*", previous.alias("previous")).select("*", fault.alias("fault"))
