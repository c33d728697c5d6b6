"""Law 6: a kept view equals its definition, run in batch over the archive at one position."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

import psycopg
from psycopg import sql
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from everstate.archive import ArchiveReader
from everstate.changes import EntityType
from everstate.config import Config
from everstate.errors import (
    EverstateError,
    InvalidView,
    NotFound,
    PipelineError,
    Unavailable,
    UnknownView,
)
from everstate.log.extent import log_extent
from everstate.pipeline.accepted import Positions, accepted_changes, newest
from everstate.pipeline.archived import read_archive
from everstate.pipeline.as_read import ROWS_MAX, is_plain, read_differently
from everstate.pipeline.compare import (
    DIFFERENCES_MAX,
    Comparison,
    Difference,
    KeptRows,
    compare,
)
from everstate.pipeline.session import spark_errors
from everstate.pipeline.summed import live_entities, summed_up
from everstate.views.control import Control, ViewVersion
from everstate.views.database import connect_views, views_errors
from everstate.views.definition import ViewDefinition
from everstate.views.plan import LinearPlan, Output, ViewPlan, compile_view
from everstate.views.project import Project, kept_always
from everstate.views.stores import kept_query
from everstate.views.tables import LATEST_COLUMNS, history_of, latest_of

log = logging.getLogger(__name__)

_ROWS_PER_BUCKET: Final = 200_000
_WAIT_POLL_S: Final = 0.5
_WAIT_SPARE_S: Final = 60.0

# Provenance is not compared: the batch side has it typed, and it comes from the same message.
_LATEST: Final = tuple(name for name in LATEST_COLUMNS if name != "provenance")


@dataclass(frozen=True, slots=True)
class ViewReport:
    """The proof of one view: both sides' rows and hashes, and the rows that differ.

    Rows and hashes are of what is kept: groups and accumulators, keys and rows. ``as_read`` tells
    of the columns that readers see.
    """

    name: str
    version: int
    entity: str
    holds: bool
    expected_rows: int
    kept_rows: int
    expected_hash: str
    kept_hash: str
    different_rows: int
    differences: tuple[Difference, ...]
    as_read: str
    """`equal`, `different`, or `not compared` and why: what readers see, and the author's SQL."""
    position: Mapping[str, int]
    """`generation/partition` → next offset, at which both sides were taken."""
    not_read: tuple[str, ...]
    """Records of the log that no position reaches, or why the log was not asked; the former make
    the proof fail."""
    seconds: float


def verify_views(
    spark: SparkSession,
    config: Config,
    project: Project,
    names: Iterable[str] | None = None,
    *,
    on_report: Callable[[ViewReport], None] = lambda _report: None,
) -> list[ViewReport]:
    """Prove views by rows and by hash; ``None``: all of them, `latest` and `history` included.

    Each is compared at its own position, in one database snapshot, with the batch result over
    the archive at that position; the kept side may go on meanwhile. Waits while the archive is
    behind the views. Raises UnknownView, and Unavailable when the archive stays behind. Cost: for
    each view one pass over the archive and one scan or more of its table, and for an SQL view of
    at most 10,000 rows another one, for what its readers see.
    """
    wanted = _wanted(project, names)
    reports = []
    with views_errors(config.views_dsn), connect_views(config.views_dsn) as connection:
        Control(connection, config.views.schema_name).install()
    with _connected(config) as connection, connection.transaction():
        row = connection.execute("SELECT pg_export_snapshot()").fetchone()
        assert row is not None
        verifier = _Verifier(spark, config, project, connection, str(row[0]))
        for name, entity in wanted.items():
            report = verifier.verify(name, entity)
            reports.append(report)
            on_report(report)
    with _connected(config) as connection, connection.transaction():
        for report in reports:
            note = asdict(report)
            del note["differences"]
            control = Control(connection, config.views.schema_name)
            control.set_verified(report.name, report.version, note)
    return reports


def _wanted(project: Project, names: Iterable[str] | None) -> dict[str, str]:
    """View name → entity, in the order of declaration."""
    known = {
        f"{entity}_{kept}": entity
        for entity in project.entities
        for kept in kept_always(project, entity)
    }
    known |= {name: plan.entity for name, plan in project.views.items()}
    if names is None:
        return known
    listed = list(names)
    for name in listed:
        if name not in known:
            raise UnknownView(name, tuple(known))
    return {name: known[name] for name in listed}


@contextmanager
def _connected(config: Config) -> Iterator[psycopg.Connection[Any]]:
    dsn = config.views_dsn
    with views_errors(dsn), connect_views(dsn) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        yield connection


class _Verifier:
    """Compares views in one snapshot; keeps what several views of an entity type share."""

    def __init__(
        self,
        spark: SparkSession,
        config: Config,
        project: Project,
        connection: psycopg.Connection[Any],
        snapshot: str,
    ) -> None:
        self._spark, self._config, self._project = spark, config, project
        self._connection, self._snapshot = connection, snapshot
        self._control = Control(connection, config.views.schema_name)
        self._published = {row.name: row for row in self._control.versions() if row.published}
        self._places = self._control.positions()

    def verify(self, name: str, entity: str) -> ViewReport:
        """Compare the version of a view that readers see, at its own position."""
        began = time.monotonic()
        row = self._published.get(name)
        if row is None:
            raise NotFound(
                f"view {name} is not there yet.",
                advice="`everstate views list` shows whether it is built; `everstate run` does so.",
            )
        positions: Positions = {
            (place.generation, place.partition): place.next_offset
            for place in self._places
            if (place.view, place.version) == (name, row.version)
        }
        self._await_archive(entity, positions)
        with spark_errors(f"verifying {name}"):
            archive = read_archive(self._spark, self._config, self._project.entities[entity])
            refused = self._control.refused_places(entity)
            changes = accepted_changes(archive, positions, refused)
            result = self._compare(row, entity, changes)
        as_read, read = self._compare_as_read(row, entity, changes)
        unread, unasked = self._not_read(entity, positions)
        return ViewReport(
            name=name,
            version=row.version,
            entity=entity,
            holds=result.holds and not read and not unread,
            expected_rows=result.expected_rows,
            kept_rows=result.kept_rows,
            expected_hash=result.expected_hash,
            kept_hash=result.kept_hash,
            different_rows=result.different_rows + len(read),
            differences=(*result.differences, *read[:DIFFERENCES_MAX]),
            as_read=as_read,
            position={f"{g}/{p}": offset for (g, p), offset in positions.items()},
            not_read=(*unread, *unasked),
            seconds=time.monotonic() - began,
        )

    def _not_read(
        self, entity: str, positions: Positions
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What of the log no position reaches, and why the log was not asked."""
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

    def _compare(self, row: ViewVersion, entity: str, changes: DataFrame) -> Comparison:
        if row.name == history_of(entity):
            return self._compare_states(row, changes, key_columns=2)
        if row.name == latest_of(entity):
            return self._compare_states(row, newest(changes), key_columns=1)
        return self._compare_plan(
            self._plan(row), row.version, self._project.entities[entity], newest(changes)
        )

    def _plan(self, row: ViewVersion) -> ViewPlan:
        """The plan of the version that readers see, which is not always what is declared."""
        plan = compile_view(ViewDefinition(row.name, row.definition["sql"]), self._project.entities)
        if plan.fingerprint != row.fingerprint:
            raise InvalidView(
                row.name,
                "the version that readers see was made of another model.",
                advice="`everstate run` builds a new version; `everstate views list` shows it.",
            )
        return plan

    def _compare_states(
        self, row: ViewVersion, changes: DataFrame, *, key_columns: int
    ) -> Comparison:
        """Compare whole states, as the raw message has them, with what the table has."""
        columns = [F.col("id").alias(c) if c == "change_id" else F.col(c) for c in _LATEST[:-1]]
        state = F.when(F.col("kind") != "deleted", F.col("raw_value")).alias("raw_value")
        kept = kept_query(self._control, row.name, row.version, _LATEST)
        return compare(
            changes.select(*columns, state),
            self._kept(kept, "key"),
            key_columns=key_columns,
            buckets=self._buckets(kept),
        )

    def _compare_plan(
        self, plan: ViewPlan, version: int, entity_type: EntityType, changes: DataFrame
    ) -> Comparison:
        """Compute groups and accumulators, or rows, of the live entities; compare with the table.

        The expressions are those of the plan, evaluated in batch and not change by change.
        """
        kept = kept_query(self._control, plan.name, version, plan=plan)
        with live_entities(self._spark, changes, entity_type, plan.name) as table:
            if isinstance(plan, LinearPlan):
                # Groups have no key text that both engines would write alike: one bucket.
                return compare(
                    summed_up(self._spark.sql(plan.batch_sql(table)), plan),
                    self._kept(kept, None),
                    key_columns=len(plan.group),
                    buckets=1,
                )
            return compare(
                self._spark.sql(plan.batch_sql(table, "__key")),
                self._kept(kept, "key"),
                key_columns=1,
                buckets=self._buckets(kept),
            )

    def _compare_as_read(
        self, row: ViewVersion, entity: str, changes: DataFrame
    ) -> tuple[str, list[Difference]]:
        """Run the definition as it was written, and compare with what readers of the view see.

        Cost: one more pass over the archive for a view of few rows.
        """
        name = row.name
        if name in (latest_of(entity), history_of(entity)):
            return "not compared: it has no definition", []
        plan = self._plan(row)
        reader = self._control.table(name)
        outputs = plan.outputs if isinstance(plan, LinearPlan) else plan.row
        names = [output.name if isinstance(output, Output) else output.output for output in outputs]
        query = sql.SQL("SELECT {} FROM {} LIMIT {}").format(
            sql.SQL(", ").join(sql.Identifier(str(name)) for name in names), reader, ROWS_MAX + 1
        )
        kept = self._connection.execute(query).fetchall()
        if len(kept) > ROWS_MAX:
            return f"not compared: more than {ROWS_MAX:,} rows", []
        live = newest(changes).where(F.col("current").isNotNull()).select("current.*")
        try:
            with spark_errors(f"the SQL of {name}"), _named(live, entity):
                rows = self._spark.sql(plan.sql).limit(ROWS_MAX + 1).toArrow()
        except PipelineError as error:
            # Spark refuses what the store answers with null, such as a division by 0.
            return f"not compared: {error}", []
        if not is_plain(rows.schema):
            return "not compared: it has nested columns", []
        found = read_differently([tuple(row.values()) for row in rows.to_pylist()], kept)
        return ("different" if found else "equal"), found

    def _kept(self, query: sql.Composed, bucket_key: str | None) -> KeptRows:
        text = query.as_string(self._connection)
        return KeptRows(self._config.views_dsn, self._snapshot, text, bucket_key)

    def _buckets(self, kept: sql.Composed) -> int:
        query = sql.SQL("SELECT count(*) FROM ({}) AS kept").format(kept)
        row = self._connection.execute(query).fetchone()
        assert row is not None
        return 2 + int(row[0]) // _ROWS_PER_BUCKET

    def _await_archive(self, entity: str, positions: Positions) -> None:
        """Wait until the archive has everything before these positions."""
        reader = ArchiveReader(self._config, entity)
        deadline = time.monotonic() + 2 * self._config.archive.trigger_s + _WAIT_SPARE_S
        while behind := _behind(reader, positions):
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"the archive of {entity} is {behind:,} offsets behind the views.",
                    advice="Let `everstate run` go on until it has archived them.",
                )
            time.sleep(_WAIT_POLL_S)


@contextmanager
def _named(rows: DataFrame, entity: str) -> Iterator[None]:
    """Let the SQL of a definition find an entity type's rows under its name."""
    rows.createOrReplaceTempView(entity)
    try:
        yield
    finally:
        rows.sparkSession.catalog.dropTempView(entity)


def _behind(reader: ArchiveReader, positions: Positions) -> int:
    archived = reader.position()
    return sum(
        max(0, end - archived.get(generation, {}).get(partition, 0))
        for (generation, partition), end in positions.items()
    )


def failing(reports: Sequence[ViewReport]) -> list[ViewReport]:
    """The reports whose proof does not hold."""
    return [report for report in reports if not report.holds]
