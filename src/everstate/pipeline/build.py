"""Building a version of a view: in batch over the archive, up to a vector that is read once (V6).

The table of a version that no reader sees is filled by Spark, then trails until it meets the core.
A build that was killed begins again: its table is emptied first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession

from everstate.changes import EntityType
from everstate.config import Config
from everstate.errors import DataLoss, EverstateError, InvalidView, SparkLost
from everstate.parts import waits, works
from everstate.pipeline.accepted import accepted_changes, newest
from everstate.pipeline.archived import read_archive
from everstate.pipeline.plan import column_types
from everstate.pipeline.retries import Retries
from everstate.pipeline.session import spark_errors
from everstate.pipeline.spans import ArchivedOffsets
from everstate.pipeline.summed import live_entities, summed_up
from everstate.views.changing import forget_version
from everstate.views.control import BUILDING, Control, ViewVersion
from everstate.views.database import ViewsDatabase
from everstate.views.definition import ViewDefinition
from everstate.views.plan import LinearPlan, ViewPlan, compile_view
from everstate.views.project import Project
from everstate.views.stores import close_store, view_tables
from everstate.views.stores.postgres.loading import LoadHistory, LoadRows, LoadSums
from everstate.views.tables import HistoryTable, history_of, kept_table

log = logging.getLogger(__name__)

_POLL_S: Final = 0.5
_RETRY_S: Final = (5.0, 30.0, 300.0)
_POOL: Final = "build"
_CLEAN_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Built:
    """What one build did."""

    name: str
    version: int
    changes: int
    """Offsets of the archive that it was made of."""
    seconds: float


class Builder:
    """Builds the versions that wait for it, one after the other; one per project at a time."""

    def __init__(self, spark: SparkSession, config: Config, project: Project) -> None:
        self._spark, self._config, self._project = spark, config, project
        self._archived = ArchivedOffsets(config)
        self._retries = Retries()
        self._database = ViewsDatabase(config.views_dsn)
        self._cleaned_at = 0.0

    def close(self) -> None:
        """Give up the connections of this thread; the Spark session is the caller's."""
        close_store(self._config.views_dsn)
        self._database.close()

    def run(self, stop: threading.Event) -> None:
        """Build what waits until ``stop`` is set."""
        try:
            while not stop.is_set():
                try:
                    if self.step() is None:
                        stop.wait(_POLL_S)
                    works()
                except EverstateError as error:
                    if isinstance(error, SparkLost) or not error.retryable:
                        raise
                    waits(error, _RETRY_S[0])
                    stop.wait(_RETRY_S[0])
        finally:
            close_store(self._config.views_dsn)

    def step(self) -> Built | None:
        """Build one version; ``None``: there is none that waits. Raises Unavailable, SparkLost.

        A version that cannot be built has its reason, and is tried again with growing pauses.
        """
        with self._database.connected() as connection:
            control = Control(connection, self._config.views.schema_name)
            self._drop_old(control)
            for row in control.versions():
                waits_for_it = row.status == BUILDING and row.built is None
                if not waits_for_it or row.entity not in self._project.entities:
                    continue
                if self._retries.is_due(f"{row.name}__v{row.version}"):
                    return self._try(control, row)
        return None

    def _try(self, control: Control, row: ViewVersion) -> Built | None:
        name = f"{row.name}__v{row.version}"
        try:
            built = self._build(control, row)
        except SparkLost:
            raise
        except (EverstateError, KeyError) as error:
            if isinstance(error, EverstateError) and error.retryable:
                raise
            pause = self._retries.failed(name, _RETRY_S)
            log.error("view %s cannot be built, again in %.0f s: %s", row.name, pause, error)
            control.set_reason(row.name, row.version, str(error))
            return None
        self._retries.forget(name)
        log.info("view %s: version %d was built in %.1f s", *(row.name, row.version, built.seconds))
        return built

    def _build(self, control: Control, row: ViewVersion) -> Built:
        begun = time.monotonic()
        entity_type = self._project.entities[row.entity]
        plan = self._plan(row)
        vector = self._vector(control, row.entity)
        tables = view_tables(control)
        types = {} if plan is None else column_types(self._spark, entity_type, plan)
        with control.connection.transaction():
            tables.install(row.name, row.version, plan, types)
            tables.empty(row.name, row.version)
            control.close_positions(row.name, row.version)
            # From here on nothing that it needs behind this vector is trimmed.
            control.open_positions(row.name, row.version, row.entity, row.fingerprint, vector)
        changes = sum(vector.values())
        told = {f"1/{partition}": offset for partition, offset in vector.items()}
        if changes:
            control.set_reason(row.name, row.version, f"building from {changes:,} changes")
            self._load(control, row, entity_type, plan, vector)
        control.set_reason(row.name, row.version, None)
        control.set_built(row.name, row.version, {"vector": told})
        return Built(row.name, row.version, changes, time.monotonic() - begun)

    def _plan(self, row: ViewVersion) -> ViewPlan | None:
        if row.name == history_of(row.entity):
            return None
        plan = compile_view(ViewDefinition(row.name, row.definition["sql"]), self._project.entities)
        if plan.fingerprint != row.fingerprint:
            raise InvalidView(row.name, "this app's model gives its SQL another meaning.")
        return plan

    def _vector(self, control: Control, entity: str) -> dict[int, int]:
        """Up to where the version is built: the archive or the core, whichever is behind (V6)."""
        core = control.core_vector(entity)
        archived = self._archived.of(entity)
        if archived.position and any(archived.begins.get(p, 0) > 0 for p in core):
            raise DataLoss(
                f"the archive of {entity} does not reach back to the log's first changes.",
                advice="Restore the archive; readers keep the version that they see.",
            )
        return {p: min(offset, archived.position.get(p, 0)) for p, offset in core.items()}

    def _load(
        self,
        control: Control,
        row: ViewVersion,
        entity_type: EntityType,
        plan: ViewPlan | None,
        vector: Mapping[int, int],
    ) -> None:
        """Fill the table with what the batch comes to at the vector."""
        self._spark.sparkContext.setLocalProperty("spark.scheduler.pool", _POOL)
        positions = {(1, partition): offset for partition, offset in vector.items()}
        refused = control.refused_places(row.entity)
        place = (self._config.views_dsn, self._config.views.schema_name)
        with spark_errors(f"building {row.name}"):
            archive = read_archive(self._spark, self._config, entity_type)
            changes = accepted_changes(archive, positions, refused)
            if plan is None:
                history = HistoryTable(row.name, row.version)
                _run(changes.select(*LoadHistory.COLUMNS), LoadHistory(*place, history))
                return
            table = kept_table(plan, row.version)
            with live_entities(self._spark, newest(changes), entity_type, plan.name) as view:
                if isinstance(plan, LinearPlan):
                    rows = summed_up(self._spark.sql(plan.batch_sql(view)), plan)
                    _run(rows, LoadSums(*place, table))
                else:
                    rows = self._spark.sql(plan.batch_sql(view, "__key, __version"))
                    _run(rows, LoadRows(*place, table))

    def _drop_old(self, control: Control) -> None:
        """Drop versions that were replaced so long ago that nobody goes back to them."""
        if time.monotonic() - self._cleaned_at < _CLEAN_S:
            return
        self._cleaned_at = time.monotonic()
        for row in control.replaced_before(self._config.views.keep_old_hours):
            with control.connection.transaction():
                forget_version(control, row.name, row.version)
            log.info("view %s: version %d is gone", row.name, row.version)


def _run(rows: DataFrame, load: Any) -> None:
    rows.mapInArrow(lambda batches: load(batches), "rows long").collect()
