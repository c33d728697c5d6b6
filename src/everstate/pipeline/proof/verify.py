"""Law 6: a kept view equals its definition, run in batch over the archive at one position.

Views at the same position are proved together: the archive is read once for all of them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Final, TypeAlias

import orjson
import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from everstate.config import Config
from everstate.errors import (
    EverstateError,
    InUse,
    InvalidView,
    PipelineError,
    SparkLost,
    StatementRefused,
    Unavailable,
    UnknownView,
    ViewFailed,
    ViewRowsMissing,
)
from everstate.log.extent import log_extent
from everstate.pipeline.batch.accepted import REVIVED, PartitionOffsets, accepted_changes, before
from everstate.pipeline.batch.awaiting import await_archive
from everstate.pipeline.batch.rows import (
    Accepted,
    as_written,
    batch_rows,
)
from everstate.pipeline.batch.rules import taken_by
from everstate.pipeline.derive.verify import not_archived, verify_topic
from everstate.pipeline.proof.as_read import ROWS_MAX, is_plain, read_differently
from everstate.pipeline.proof.compare import Comparison, KeptRows, RowsElsewhere, compare
from everstate.pipeline.reports import (
    DIFFERENCES_MAX,
    ProofOutcome,
    RowDifference,
    ViewReport,
)
from everstate.pipeline.spark.archived import read_archive
from everstate.pipeline.spark.functions import sharing_slots, ship_functions
from everstate.pipeline.spark.progress import OnProgress, Progress, watched
from everstate.pipeline.spark.session import spark_errors
from everstate.postgres import Connection, SharedSnapshot, refusals, shared_snapshot
from everstate.views.control import Control, ViewVersion, opened_control
from everstate.views.control.deferring import deferred_offsets
from everstate.views.kinds import ViewPlan
from everstate.views.kinds.kind import identifiers
from everstate.views.misfits import Misfit, slashed
from everstate.views.plan import plan_of
from everstate.views.project import Project, kept_always
from everstate.views.stores import ViewTables, versioned_store
from everstate.views.tables import HOME, latest_of, physical

_POOL: Final = "verify"
_ROWS_PER_BUCKET: Final = 200_000
_NO_ROWS: Final = (
    "{} has no version that readers see yet: `everstate views list` shows whether it is built or "
    "waits"
)
_AHEAD: Final = (
    "the rows that differ may be newer than its position: their keys have changed since; prove it "
    "again when it has caught up"
)
_KEYS: Final = pa.schema([("key", pa.string())])
_NAMED_MAX: Final = 20
"""Most records that a report names."""


def verify_views(
    spark: SparkSession,
    config: Config,
    project: Project,
    names: Iterable[str] | None = None,
    *,
    on_report: Callable[[ViewReport], object] = lambda _report: None,
    on_progress: OnProgress = lambda _progress: None,
) -> list[ViewReport]:
    """Prove views by rows and by hash; ``None``: all, `latest`, `history` and topics included.

    Each view is compared at its own position, in one database snapshot, with the batch result over
    the archive at that position; the pipeline may run meanwhile. Waits while the archive is behind
    the views. Raises UnknownView, and Unavailable when the archive stays behind. Cost: one pass
    over the archive for all views at one position, and one scan or more of each table; the shared
    changes are stored on Spark's local disk.
    """
    wanted = _wanted(project, names)
    ship_functions(project)
    with opened_control(config) as control:
        control.update()
        published = [row for row in control.versions() if row.published]
    elsewhere = {row.name for row in published if row.store != HOME}
    reports: list[ViewReport] = []
    named = "everstate views verify"
    of_views = {name: e for name, e in wanted.items() if name not in project.derivations}
    together = [{name: e for name, e in of_views.items() if name not in elsewhere}]
    # Rows in another store have no snapshot: each such view waits while it is compared.
    together += [{name: e} for name, e in of_views.items() if name in elsewhere]
    for some in filter(None, together):
        with (
            _held(config, elsewhere & some.keys()) as held,
            shared_snapshot(config.views_dsn, application_name=named) as (connection, snapshot),
        ):
            verifier = _Verifier(spark, config, project, connection, snapshot, on_progress, held)
            for report in verifier.reports(some):
                reports.append(report)
                on_report(report)
    for name in [name for name in wanted if name in project.derivations]:
        reports.append(verify_topic(spark, config, project, project.derivations[name]))
        on_report(reports[-1])
    with opened_control(config) as control, control.connection.transaction():
        for report in reports:
            if report.outcome != "not compared":
                note = report.note()
                del note["differences"]
                control.set_verified(report.name, report.version, note)
    return sorted(reports, key=lambda report: list(wanted).index(report.name))


@contextmanager
def _held(config: Config, names: Collection[str]) -> Iterator[set[tuple[str, int]]]:
    """Let nobody write to, or drop, the versions that readers see in other stores; gives them."""
    with opened_control(config) as control, ExitStack() as until_compared:
        rows = control.versions() if names else ()
        held = {(row.name, row.version) for row in rows if row.published and row.name in names}
        for version in held:
            until_compared.enter_context(control.writing(*version, waits=True))
        for place in control.positions() if held else ():
            if (place.view, place.version) in held:
                mine = (place.view, place.version, place.partition)
                until_compared.enter_context(control.writing(*mine, waits=True))
        yield held


def _wanted(project: Project, names: Iterable[str] | None) -> dict[str, str]:
    """View name → entity, in the order of declaration."""
    known = {
        f"{entity}_{kept}": entity
        for entity in project.entities
        for kept in kept_always(project, entity)
    }
    known |= {name: plan.entity for name, plan in project.views.items()}
    # A raw topic is made from the log without the core's verdicts, so it cannot be proved.
    topics = {n: each for n, each in project.derivations.items() if not each.is_raw}
    known |= {name: each.entity for name, each in topics.items()}
    if names is None:
        return known
    listed = list(names)
    for name in listed:
        if name not in known:
            raise UnknownView(name, tuple(known))
    return {name: known[name] for name in listed}


_Planned: TypeAlias = tuple[ViewVersion, ViewPlan]
_Read: TypeAlias = tuple[str, str, tuple[tuple[tuple[int, int], int], ...]]
"""Label of its positions in the report, entity type, and position by generation and partition."""


class _Verifier:
    """Compares views in one snapshot; views of one entity type at one position share a batch."""

    def __init__(
        self,
        spark: SparkSession,
        config: Config,
        project: Project,
        connection: Connection,
        snapshot: SharedSnapshot,
        on_progress: OnProgress,
        held: Collection[tuple[str, int]] = (),
    ) -> None:
        """``held``: versions in other stores to which nobody writes meanwhile."""
        self._held = held
        self._spark, self._config, self._project = spark, config, project
        self._connection, self._snapshot, self._on_progress = connection, snapshot, on_progress
        self._control = Control(connection, config.views.schema_name)
        self._published = {row.name: row for row in self._control.versions() if row.published}
        self._places = self._control.positions()
        spark.sparkContext.setLocalProperty("spark.scheduler.pool", _POOL)

    def reports(self, wanted: Mapping[str, str]) -> Iterator[ViewReport]:
        """Compare the versions that readers see, each at its own position."""
        together: dict[tuple[_Read, ...], list[_Planned]] = defaultdict(list)
        for name, entity in wanted.items():
            row = self._published.get(name)
            if row is None:
                reasons = (_NO_ROWS.format(name),)
                yield ViewReport(name, 0, entity, "not compared", not_compared=reasons)
                continue
            if row.store != HOME and (name, row.version) not in self._held:
                reasons = (
                    f"{name}: version {row.version} was published meanwhile; prove it again",
                )
                yield ViewReport(name, row.version, entity, "not compared", not_compared=reasons)
                continue
            try:
                plan = plan_of(row, self._project.entities, self._project.views)
            except InvalidView as refused:
                reasons = (f"{name}, version {row.version}, that readers see: {refused.message}",)
                yield ViewReport(name, row.version, entity, "not compared", not_compared=reasons)
                continue
            sources = [self._published[name] for name in plan.inputs] or [row]
            together[tuple(self._read(row, source) for source in sources)].append((row, plan))
        for reads, views in together.items():
            yield from self._prove(reads, views)

    def _read(self, row: ViewVersion, source: ViewVersion) -> _Read:
        """What a view reads of a source: of a refreshed view what its last refresh has seen."""
        stored = (row.built or {}).get("positions")
        if stored is None:
            place = self._positions(source)
        else:
            place = {(1, int(partition)): at for partition, at in stored[source.name].items()}
        label = f"{source.name} " if row.inputs else ""
        return label, source.entity, tuple(sorted(place.items()))

    def _positions(self, row: ViewVersion) -> PartitionOffsets:
        return {
            (place.generation, place.partition): place.next_offset
            for place in self._places
            if (place.view, place.version) == (row.name, row.version)
        }

    def _prove(self, reads: Sequence[_Read], views: Sequence[_Planned]) -> Iterator[ViewReport]:
        """Prove views that read the same at the same positions; the archive is read once."""
        begun = time.monotonic()
        entities = sorted({entity for _, entity, _ in reads})
        shared = ViewReport("", 0, "", "holds")
        if reasons := tuple(why for each in entities for why in not_archived(self._config, each)):
            shared = replace(shared, outcome="not compared", not_compared=reasons)
            for row, _ in views:
                yield replace(shared, name=row.name, version=row.version, entity=row.entity)
            return
        inputs: list[Accepted] = []
        with ExitStack() as stack:
            for label, entity, place in reads:
                positions = dict(place)
                await_archive(self._config, entity, positions, self._on_progress)
                unread, unasked = self._not_read(entity, positions)
                reading = self._shared(entity, positions, views)
                accepted, not_compared, misfits = stack.enter_context(reading)
                inputs.append(accepted)
                places = {f"{label}{g}/{p}": offset for (g, p), offset in place}
                shared = replace(
                    shared,
                    outcome="not all of the log was read" if unread else shared.outcome,
                    position={**shared.position, **places},
                    not_read=(*shared.not_read, *unread, *unasked),
                    not_compared=(*shared.not_compared, *not_compared),
                    misfits=(*shared.misfits, *misfits),
                )
            share_s = (time.monotonic() - begun) / len(views)
            for number, (row, plan) in enumerate(views):
                doing = f"comparing {row.name} ({number + 1} of {len(views)} of {row.entity})"
                self._on_progress(Progress(doing, number / len(views)))
                began = time.monotonic()
                mine = replace(shared, name=row.name, version=row.version, entity=row.entity)
                report = self._reported(mine, row, plan, inputs)
                yield replace(report, seconds=time.monotonic() - began + share_s)

    @contextmanager
    def _shared(
        self, entity: str, positions: PartitionOffsets, views: Sequence[_Planned]
    ) -> Iterator[tuple[Accepted, tuple[str, ...], tuple[str, ...]]]:
        """The accepted changes, read once and stored on Spark's disk.

        And what is not compared, and the misfits of the present model.
        """
        entity_type = self._project.entities[entity]
        doing, changes = f"reading the archive of {entity}", sum(positions.values())
        with spark_errors(f"verifying {entity}"):
            archive = read_archive(self._spark, self._config, entity_type)
            found = accepted_changes(archive, positions, self._control.dead_places(entity))
            found = found.select(*_columns_needed(views)).persist(StorageLevel.DISK_ONLY)
            try:
                with watched(self._spark, doing, self._on_progress, changes=changes, stages=2):
                    not_compared = _named(found)
                    misfits = _misfits(entity, found)
                readable = found.where(F.col("reason").isNull())
                yield Accepted(entity_type, readable), not_compared, misfits
            finally:
                found.unpersist()

    def _reported(
        self, mine: ViewReport, row: ViewVersion, plan: ViewPlan, inputs: Sequence[Accepted]
    ) -> ViewReport:
        """The proof of a view; one that cannot be read or computed does not end those of others."""
        # A store that does not answer says nothing about its rows, nor one that is ahead.
        outcome: ProofOutcome = "differs" if row.store == HOME else "not compared"
        accepted = inputs  # also of those changes that the view's rules leave out
        try:
            with refusals(), self._connection.transaction():
                if plan.rules:
                    # Deferred changes of a throttled view are not in its table yet.
                    deferred = list(deferred_offsets(self._control, row.name, row.version))
                    entity_type = self._project.entities[row.entity]
                    changes = inputs[0].changes
                    inputs = [taken_by(plan, entity_type, changes, deferred)]
                # The expressions are the plan's, evaluated in batch instead of change by change.
                with spark_errors(f"verifying {row.name}"), batch_rows(plan, inputs) as rows:
                    result = self._compare(plan, row, rows)
                found = _with_result(
                    mine, result, *self._compare_as_read(plan, row.version, inputs)
                )
                if not self._is_ahead(row, plan, accepted, found):
                    return found
                reason = _AHEAD
        except ViewRowsMissing as gone:
            outcome, reason = "differs", gone.message
        except (PipelineError, ViewFailed) as error:
            if isinstance(error, SparkLost):
                raise
            reason = error.message
        except InUse as cause:
            raise Unavailable(
                f"view {row.name} cannot be verified now: {cause.message}.",
                advice="Another session has locked its table. Verify it again.",
            ) from cause
        except StatementRefused as refused:
            reason = f"its rows cannot be read: {refused.message}"
        not_compared = (*mine.not_compared, f"{row.name}: {reason}")
        return replace(mine, outcome=outcome, not_compared=not_compared)

    def _is_ahead(
        self, row: ViewVersion, plan: ViewPlan, inputs: Sequence[Accepted], found: ViewReport
    ) -> bool:
        """Whether rows in another store differ, and all of them as newer rows than the position's.

        A task that was killed after it wrote, or control tables that were restored, leave such rows
        until the view has caught up. Their keys have changed since in the log, and each row is of
        such a change, or deleted by one.
        """
        if row.store == HOME or not found.differences:
            return False
        keys = [str(orjson.loads(each.key)[0]) for each in found.differences]
        proved, since = self._newest(row, inputs[0].changes, keys), self._changed_since(row, keys)
        for key, each in zip(keys, found.differences, strict=True):
            if each.kept is not None:
                version = int(orjson.loads(each.kept)[1])
            elif plan.replaces_rows:
                version = since.get(key, 0)
            else:
                return False  # no change deletes a row that was appended; others may be ignored
            # A later change ends the newest row of a view with times.
            newest = proved.get(key, 0) - (each.kept is not None and plan.has_times)
            if not newest < version <= since.get(key, 0):
                return False
        return True

    def _newest(self, row: ViewVersion, changes: DataFrame, keys: Sequence[str]) -> dict[str, int]:
        """The newest version of some keys in changes; one Spark job."""
        mine = changes.where(F.col("key").isin(list(keys)) & F.col("version").isNotNull())
        with spark_errors(f"verifying {row.name}"):
            return dict(map(tuple, mine.groupBy("key").agg(F.max("version")).collect()))

    def _changed_since(self, row: ViewVersion, keys: Sequence[str]) -> dict[str, int]:
        """The newest version of those keys that have changed since a view's position.

        The archive may be behind the core, and a core that was restored is behind the archive.
        """
        position, entity_type = self._positions(row), self._project.entities[row.entity]
        archive = read_archive(self._spark, self._config, entity_type)
        found = self._newest(row, archive.where(~before(position)), keys)
        latest = self._control.table(physical(latest_of(row.entity)))
        # A change that was held counts where it was released.
        query = (
            f'SELECT key, version, generation, partition, "offset" FROM {latest} '
            "WHERE key = ANY(%(keys)s) UNION ALL SELECT key, version, generation, partition, "
            "released_at FROM {held} WHERE entity = %(entity)s AND key = ANY(%(keys)s) "
            "AND released_at IS NOT NULL"
        )
        accepted = self._control.run(query, {"keys": list(keys), "entity": row.entity})
        for key, version, generation, partition, offset in accepted:
            if offset >= position.get((generation, partition), 0):
                found[key] = max(version, found.get(key, 0))
        return found

    def _not_read(
        self, entity: str, positions: PartitionOffsets
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Records of the log that no position covers, and reasons why the log was not read."""
        unread: list[str] = []
        unasked: list[str] = []
        for generation in sorted({generation for generation, _ in positions}):
            here = {p: at for (g, p), at in positions.items() if g == generation}
            stored = self._control.stored_topics(entity, generation)
            for topic, identity in stored.items():
                try:
                    found = log_extent(self._config, topic, identity, here)
                except EverstateError as error:
                    unasked.append(error.message)
                else:
                    unread += found.unread
                    unasked += [found.gone] if found.gone else []
        return tuple(unread), tuple(unasked)

    def _compare(self, plan: ViewPlan, row: ViewVersion, rows: DataFrame) -> Comparison:
        """Compare the rows of a version's table with the batch result of its definition."""
        if plan.store != HOME:
            place = (self._config, plan.name, plan.store, row.attempt)
            kept = RowsElsewhere(versioned_store(*place), plan.ruled_table(row.version))
            # An error in a task would come back without its class; a table that is gone differs.
            # With a store of its own: one that has connected may not be sent to a task any more.
            next(versioned_store(*place).read(kept.table, _KEYS), None)
            with sharing_slots(rows, is_long=True, tasks_max=1):  # the one that compares
                return compare(rows, kept, key_columns=len(plan.key), buckets=1)
        query = ViewTables(self._control).kept(plan, row.version)
        return compare(
            rows,
            KeptRows(self._snapshot, query, plan.is_divided),
            key_columns=len(plan.key),
            buckets=self._buckets(query) if plan.is_divided else 1,
        )

    def _compare_as_read(
        self, plan: ViewPlan, version: int, inputs: Sequence[Accepted]
    ) -> tuple[str, list[RowDifference]]:
        """Compare the rows that readers see with the author's SQL in Spark; at most `ROWS_MAX`."""
        if plan.store != HOME:
            return f"not compared: readers see its rows as the store {plan.store} has them", []
        if not plan.batch_as_read:
            why = (
                "it has no SQL definition"
                if plan.is_plain_sql
                else "its SQL is not all of its definition"
            )
            return f"not compared: {why}", []
        shown = ViewTables(self._control).unlimited(plan, version)
        query = f"SELECT {identifiers(plan.defined)} FROM ({shown}) AS shown LIMIT {ROWS_MAX + 1}"
        kept = self._connection.execute(query.encode()).fetchall()
        if len(kept) > ROWS_MAX:
            return f"not compared: more than {ROWS_MAX:,} rows", []
        try:
            with spark_errors(f"running the SQL of {plan.name}"):
                written = as_written(plan, inputs, plan.batch_as_read)
                rows = written.limit(ROWS_MAX + 1).toArrow()
        except PipelineError as error:
            # Spark fails where the store returns null, such as for a division by 0.
            return f"not compared: {error}", []
        if not is_plain(rows.schema):
            return "not compared: it has nested columns", []
        keys = [plan.defined.index(name) for name in plan.shown_key or () if name in plan.defined]
        expected = [tuple(row.values()) for row in rows.to_pylist()]
        found = read_differently(expected, kept, keys=keys)
        return ("different" if found else "equal"), found

    def _buckets(self, kept: str) -> int:
        row = self._connection.execute(f"SELECT count(*) FROM ({kept}) AS kept".encode()).fetchone()
        assert row is not None
        return 2 + int(row[0]) // _ROWS_PER_BUCKET


def _with_result(
    report: ViewReport, result: Comparison, as_read: str, read: Sequence[RowDifference]
) -> ViewReport:
    """A report with what was compared; ``read``: differences from the author's SQL."""
    return replace(
        report,
        outcome=report.outcome if result.holds and not read else "differs",
        as_read=as_read,
        **{
            **result._asdict(),
            "different_rows": result.different_rows + len(read),
            "differences": (*result.differences, *read[:DIFFERENCES_MAX]),
        },
    )


def _columns_needed(views: Sequence[_Planned]) -> list[str]:
    """Columns of changes that the proofs of these views read."""
    needed = ["key", "version", "kind", "reason", "generation", "partition", "offset", "is_newest"]
    needed += ["schema_version", "misfits"]
    for _, plan in views:
        needed += plan.columns_needed
        needed += ("original", "provenance") if plan.rules else ()
    return list(dict.fromkeys(needed))


def _named(found: DataFrame) -> tuple[str, ...]:
    """Records that the core and the present model read differently; reads everything once."""
    place = F.struct("reason", "generation", "partition", "offset")
    counted = found.groupBy(F.col("reason").isNotNull().alias("apart")).agg(
        F.count(F.lit(1)).alias("rows"),
        F.slice(F.collect_list(F.when(F.col("reason").isNotNull(), place)), 1, _NAMED_MAX).alias(
            "places"
        ),
    )
    places = []
    for row in counted.collect():
        if not row.apart:
            continue
        for reason, generation, partition, offset in row.places:
            what = (
                reason
                if reason == REVIVED
                else f"the core accepted it, and the present model cannot read it: {reason}"
            )
            places.append(f"offset {offset:,} of {generation}/{partition}: {what}")
        if row.rows > len(places):
            places.append(f"and {row.rows - len(places):,} more records like these")
    return tuple(places)


def _misfits(entity: str, found: DataFrame) -> tuple[str, ...]:
    """Values that the present model cannot hold, counted by field and schema version."""
    place = F.array("generation", F.col("partition").cast("long"), "offset")
    each = found.where(F.col("reason").isNull()).select(
        F.explode("misfits").alias("field"), "schema_version", place.alias("place")
    )
    counted = each.groupBy("field", "schema_version").agg(
        F.count(F.lit(1)).alias("count"),
        F.min("place").alias("first"),
        F.max("place").alias("last"),
    )
    misfits = [
        Misfit(
            entity,
            row.field,
            row.schema_version,
            row["count"],
            slashed(row["first"]),
            slashed(row["last"]),
        )
        for row in counted.orderBy("field", "schema_version").collect()
    ]
    return tuple(f"{entity}: {each.text}" for each in misfits)
