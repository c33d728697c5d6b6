"""Building a version of a view: in batch over the archive, up to a fixed position vector (V6).

Spark fills the table of a version that no reader sees yet; then the version trails until it has
caught up with the core. A build that was killed starts again: its table is emptied first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from pyspark.sql import DataFrame, SparkSession

from everstate.config import Config
from everstate.errors import (
    BuildGivenUp,
    DataLoss,
    EverstateError,
    InUse,
    PublishRefused,
    SparkLost,
)
from everstate.pipeline.batch.accepted import accepted_changes, only_changes
from everstate.pipeline.batch.from_latest import LatestRows, latest_snapshot, live_of
from everstate.pipeline.batch.rows import Accepted, LiveOnly, batch_rows
from everstate.pipeline.batch.rules import taken_by
from everstate.pipeline.keeping.elsewhere import building
from everstate.pipeline.keeping.kept import ViewWorker
from everstate.pipeline.keeping.plan import column_types
from everstate.pipeline.keeping.spans import ArchivedOffsets
from everstate.pipeline.spark.archived import read_archive
from everstate.pipeline.spark.functions import sharing_slots, ship_functions
from everstate.pipeline.spark.progress import Progress, watched
from everstate.pipeline.spark.session import spark_errors
from everstate.postgres import refusals
from everstate.views.changing import drop_unused, forget_view
from everstate.views.control import BUILDING, Control, ControlConnection, ViewVersion
from everstate.views.kinds import ViewPlan
from everstate.views.plan import plan_of
from everstate.views.project import Project
from everstate.views.stores import LoadRows, VersionedStore, ViewTables, store_of
from everstate.views.stores.showing import types_text
from everstate.views.tables import HOME, attempt_text, placed
from everstate.views.versions import inputs_of

logger = logging.getLogger(__name__)

_RETRY_S: Final = (5.0, 30.0, 300.0)
_POOL: Final = "build"
CLEAN_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Built:
    """What one build did."""

    name: str
    version: int
    changes: int
    """Number of offsets of the archive that it was built from."""
    seconds: float


class Builder(ViewWorker):
    """Builds the waiting versions, one after the other; one builder per project at a time."""

    doing = "building of views"
    idle_s = 0.5
    retry_s = (5.0, 5.0)

    def __init__(
        self,
        spark: SparkSession,
        config: Config,
        project: Project,
        *,
        store: str | None = None,
        on_store: Callable[[str], object] = lambda _store: None,
    ) -> None:
        """``store``: build only the views in that store, so that no other waits for it.

        ``on_store`` is called, again and again, with each other store that has rows of a view,
        whether or not the project still declares one there.
        """
        super().__init__(config)
        self._store, self._on_store = store, on_store
        self._spark, self._project = spark, project
        self._archived = ArchivedOffsets(config)
        ship_functions(project)
        self._cleaned_at = 0.0

    def step(self) -> Built | None:
        """Build one version; ``None``: no version waits. Raises Unavailable, SparkLost.

        For a version that cannot be built the reason is stored, and the build is retried with
        growing pauses.
        """
        with self._database.connected() as control:
            stored = control.versions()
            for other in sorted({row.store for row in stored} - {HOME}):
                self._on_store(other)
            self._drop_old(control)
            for row in (each for each in stored if self._store in (None, each.store)):
                waits_for_it = row.status == BUILDING and row.built is None and not row.inputs
                if not waits_for_it or row.is_topic or row.entity not in self._project.entities:
                    continue
                if not self._retries.is_due(f"{row.name}__v{row.version}"):
                    continue
                if (built := self._try(control, row)) is not None:
                    return built
        return None

    def _try(self, control: Control, row: ViewVersion) -> Built | None:
        name = f"{row.name}__v{row.version}"
        try:
            with building(control, row.store) as is_mine:
                built = self._build(control, row) if is_mine else None
        except SparkLost:
            raise
        except BuildGivenUp as given_up:
            logger.info("%s", given_up)
            return None
        except EverstateError as error:
            if error.retryable:
                raise
            mine = (each for each in control.versions(row.name) if each.version == row.version)
            if not any(each.status == BUILDING for each in mine):
                return None  # a task has given the version up already
            pause = self._retries.failed(name, _RETRY_S)
            logger.error(
                "view %s cannot be built, and is retried in %.0f s: %s", row.name, pause, error
            )
            control.record(row.name, row.version, progress=None, error=str(error))
            return None
        if built is not None:
            self._retries.forget(name)
            logger.info(
                "view %s: version %d was built in %.1f s",
                *(built.name, built.version, built.seconds),
            )
        return built

    def _build(self, control: Control, row: ViewVersion) -> Built:
        begun = time.monotonic()
        entity_type = self._project.entities[row.entity]
        plan = plan_of(row, self._project.entities, self._project.views)
        types = column_types(self._spark, entity_type, plan)
        with ExitStack() as until_loaded:
            with control.installing():
                # Trimming ends before this lock, or keeps all that comes after this vector (V3).
                attempt = control.begin_build(row.name, row.version)
                if attempt is None:
                    raise BuildGivenUp(row.name, row.version)
                archived, latest = self._archived.of(row.entity), None
                vector = archived.vector(control.core_vector(row.entity))
                if not archived.is_whole:
                    latest = until_loaded.enter_context(self._latest(plan))
                    vector = latest.vector
                mine = "" if plan.store == HOME else attempt_text(attempt)
                if plan.store == HOME:
                    ViewTables(control).install(plan, row.version, types)
                    ViewTables(control).empty(row.name, row.version)
                else:
                    control.add_table(row.name, row.version, plan.store, mine)
                control.close_positions(row.name, row.version)
                place = (row.name, row.version, row.entity, placed(row.fingerprint, mine))
                control.open_positions(*place, vector)
            # Tasks of an earlier attempt write no more: this one is the present attempt.
            store = store_of(self._config, plan.name, plan.store, mine)
            if isinstance(store, VersionedStore):
                store.install(plan, row.version, types)
            changes = sum(vector.values())
            if changes:
                load = store.loader(plan.ruled_table(row.version), attempt)
                self._load(control, row, plan, vector, attempt, load, latest)
        seconds = time.monotonic() - begun
        built = {
            "vector": {f"1/{partition}": offset for partition, offset in vector.items()},
            "changes": changes,
            "seconds": round(seconds, 3),
        }
        if plan.store != HOME:
            built["attempt"] = mine
            built["core"] = {str(p): at for p, at in control.core_vector(row.entity).items()}
            built["types"] = types_text(types)
        if not control.end_build(row.name, row.version, attempt, built):
            raise BuildGivenUp(row.name, row.version)
        return Built(row.name, row.version, changes, seconds)

    def _latest(self, plan: ViewPlan) -> AbstractContextManager[LatestRows]:
        """A snapshot of `latest`, for a view of live entities with an incomplete archive.

        Raises DataLoss for other views: they need every change since the log's first.
        """
        # `latest` does not record which changes fired a trigger or were ignored.
        is_of_some = plan.rules.trigger is not None or bool(plan.rules.ignored)
        if plan.source != "live" or is_of_some:
            raise DataLoss(
                f"the archive of {plan.entity} lacks the first changes of the log, and {plan.name} "
                "needs all changes.",
                advice="Restore the archive; until then the published version stays.",
            )
        logger.warning(
            "view %s is built from `latest`, because its archive lacks the first changes", plan.name
        )
        return latest_snapshot(self._config, plan.entity)

    def _load(
        self,
        control: Control,
        row: ViewVersion,
        plan: ViewPlan,
        vector: Mapping[int, int],
        attempt: UUID,
        load: LoadRows,
        latest: LatestRows | None,
    ) -> None:
        """Fill the table with the batch result at the vector."""
        self._spark.sparkContext.setLocalProperty("spark.scheduler.pool", _POOL)
        config, entity_type = self._config, self._project.entities[row.entity]
        positions = {(1, partition): offset for partition, offset in vector.items()}
        with (
            spark_errors(f"building {row.name}"),
            closing(_StoredProgress(config, row, attempt)) as progress,
        ):
            # Reading, a shuffle by key, and one by group for sums.
            changes, stages = sum(vector.values()), 2 if plan.sums_kept is None else 3
            source: Accepted | LiveOnly
            if latest is not None:
                source = LiveOnly(live_of(self._spark, entity_type, latest))
            else:
                archive = read_archive(self._spark, config, entity_type)
                found = accepted_changes(archive, positions, control.dead_places(row.entity))
                source = taken_by(plan, entity_type, only_changes(found))
            with (
                batch_rows(plan, [source], for_table=True) as rows,
                watched(
                    self._spark, "reading the archive", progress, changes=changes, stages=stages
                ),
            ):
                elsewhere = plan.store != HOME
                with sharing_slots(rows, is_long=True) if elsewhere else nullcontext(rows) as mine:
                    _run(mine, load)

    def _drop_old(self, control: Control) -> None:
        """Drop what ``views.keep_old_hours`` keeps no longer, and parts that nothing reads."""
        if time.monotonic() - self._cleaned_at < CLEAN_S:
            return
        self._cleaned_at = time.monotonic()
        for _, _, store, _ in control.left_tables():  # also one that has no version any more
            self._on_store(store)
        if self._store in (None, HOME):
            for row in drop_unused(control, self._config.views.keep_old_hours):
                logger.info("view %s: version %d was dropped", row.name, row.version)
            self._drop_parts(control)

    def _drop_parts(self, control: Control) -> None:
        """Drop parts of views (inputs that nobody declared) that no version reads any more."""
        stored = control.versions()
        wanted = inputs_of(stored)
        wanted |= {part.name for plan in self._project.views.values() for part in plan.parts}
        for name in {row.name for row in stored if row.is_part} - wanted:
            try:
                with refusals(), control.connection.transaction():
                    forget_view(control, name)
            except (PublishRefused, InUse) as cause:
                logger.info("%s is dropped later: %s", name, cause)
                continue
            logger.info("%s was dropped, because no view is read from it any more", name)


class _StoredProgress:
    """Stores the progress of a build in the registry, from a thread of its own."""

    def __init__(self, config: Config, row: ViewVersion, attempt: UUID) -> None:
        self._database = ControlConnection(config)
        self._row, self._attempt = row, attempt

    def __call__(self, seen: Progress) -> None:
        """Store it; raises BuildGivenUp when this attempt to build is not the current one."""
        name, version = self._row.name, self._row.version
        with self._database.connected() as control:
            if not control.is_attempt(name, version, self._attempt):
                raise BuildGivenUp(name, version)
            control.record(name, version, progress=seen.note())

    def close(self) -> None:
        """Close the connection."""
        self._database.close()


def _run(rows: DataFrame, load: LoadRows) -> None:
    rows.mapInArrow(lambda batches: load(batches), "rows long").collect()
