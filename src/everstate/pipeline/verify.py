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

from everstate.archive import ArchiveReader, table_path
from everstate.changes import EntityType
from everstate.config import Config
from everstate.errors import PipelineError, Unavailable, UnknownView
from everstate.pipeline.accepted import Positions, accepted_changes, newest
from everstate.pipeline.as_read import ROWS_MAX, is_plain, read_differently
from everstate.pipeline.compare import (
    DIFFERENCES_MAX,
    Comparison,
    Difference,
    KeptRows,
    compare,
)
from everstate.pipeline.session import spark_errors
from everstate.views import control
from everstate.views.database import connect_views, views_errors
from everstate.views.plan import LinearPlan, Output, ViewPlan
from everstate.views.project import Project, kept_always
from everstate.views.stores.postgres.apply import REFUSED
from everstate.views.stores.postgres.group import LATEST_COLUMNS, main_group, physical
from everstate.views.stores.postgres.tables import kept_rows, summed

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
            control.set_verified(connection, config.views.schema_name, report.name, note)
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
        self._schema = config.views.schema_name
        self._groups = {row.name: row.view_group for row in control.views(connection, self._schema)}

    def verify(self, name: str, entity: str) -> ViewReport:
        """Compare one view at its group's position."""
        began = time.monotonic()
        positions: Positions = {
            (row.generation, row.partition): row.next_offset
            for row in control.positions(
                self._connection, self._schema, self._groups.get(name, main_group(entity))
            )
        }
        self._await_archive(entity, positions)
        path = table_path(self._config, entity)
        with spark_errors(f"verifying {name}"):
            archive = self._spark.read.format("delta").load(path)
            changes = accepted_changes(archive, positions, self._refused(entity))
            result = self._compare(name, entity, changes)
        as_read, read = self._compare_as_read(name, entity, changes)
        return ViewReport(
            name=name,
            entity=entity,
            holds=result.holds and not read,
            expected_rows=result.expected_rows,
            kept_rows=result.kept_rows,
            expected_hash=result.expected_hash,
            kept_hash=result.kept_hash,
            different_rows=result.different_rows + len(read),
            differences=(*result.differences, *read[:DIFFERENCES_MAX]),
            as_read=as_read,
            position={f"{g}/{p}": offset for (g, p), offset in positions.items()},
            seconds=time.monotonic() - began,
        )

    def _refused(self, entity: str) -> dict[tuple[int, int], list[int]]:
        """Places of changes that the tables of every view refused: they are dead (C19)."""
        query = sql.SQL(
            'SELECT generation, partition, "offset" FROM {} WHERE entity = %s '
            "AND starts_with(reason, %s)"
        ).format(sql.Identifier(self._schema, "dead"))
        places: dict[tuple[int, int], list[int]] = {}
        for generation, partition, offset in self._connection.execute(query, (entity, REFUSED)):
            places.setdefault((generation, partition), []).append(offset)
        return places

    def _compare(self, name: str, entity: str, changes: DataFrame) -> Comparison:
        if name == f"{entity}_history":
            return self._compare_states(name, changes, key_columns=2)
        if name == f"{entity}_latest":
            return self._compare_states(name, newest(changes), key_columns=1)
        plan = self._project.views[name]
        live = newest(changes).where(F.col("current").isNotNull())
        return self._compare_plan(plan, self._project.entities[entity], live)

    def _compare_states(self, name: str, changes: DataFrame, *, key_columns: int) -> Comparison:
        """Compare whole states, as the raw message has them, with what the table has."""
        columns = [F.col("id").alias(c) if c == "change_id" else F.col(c) for c in _LATEST[:-1]]
        state = F.when(F.col("kind") != "deleted", F.col("raw_value")).alias("raw_value")
        table = sql.Identifier(self._schema, physical(name))
        names = sql.SQL(", ").join(sql.Identifier(column) for column in _LATEST)
        kept = sql.SQL("SELECT {} FROM {}").format(names, table)
        return compare(
            changes.select(*columns, state),
            self._kept(kept, "key"),
            key_columns=key_columns,
            buckets=self._buckets(table),
        )

    def _compare_plan(self, plan: ViewPlan, entity_type: EntityType, live: DataFrame) -> Comparison:
        """Compute groups and accumulators, or rows, of the live entities; compare with the table.

        The expressions are those of the plan, evaluated in batch and not change by change.
        """
        table = f"everstate_live_{plan.name}"
        fields = [F.col("current")[f.name].alias(f.name) for f in entity_type.arrow_schema]
        live.select(F.col("key").alias("__key"), *fields).createOrReplaceTempView(table)
        try:
            if isinstance(plan, LinearPlan):
                # Groups have no key text that both engines would write alike: one bucket.
                return compare(
                    self._spark.sql(plan.batch_sql(table)),
                    self._kept(summed(self._schema, plan), None),
                    key_columns=len(plan.group),
                    buckets=1,
                )
            return compare(
                self._spark.sql(plan.batch_sql(table, "__key")),
                self._kept(kept_rows(self._schema, plan), "key"),
                key_columns=1,
                buckets=self._buckets(sql.Identifier(self._schema, physical(plan.name))),
            )
        finally:
            self._spark.catalog.dropTempView(table)

    def _compare_as_read(
        self, name: str, entity: str, changes: DataFrame
    ) -> tuple[str, list[Difference]]:
        """Run the definition as it was written, and compare with what readers of the view see.

        Cost: one more pass over the archive for a view of few rows.
        """
        plan = self._project.views.get(name)
        if plan is None:
            return "not compared: it has no definition", []
        reader = sql.Identifier(self._schema, name)
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

    def _buckets(self, table: sql.Identifier) -> int:
        row = self._connection.execute(sql.SQL("SELECT count(*) FROM {}").format(table)).fetchone()
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
