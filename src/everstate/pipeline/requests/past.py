"""Past entities, changes and views: a batch over the archive, for any time or position."""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.types import MapType

from everstate.archive import ArchiveReader
from everstate.changes.tokens import log_mark, parse_token
from everstate.config import Config
from everstate.errors import InvalidToken, UnknownEntity, UnknownView
from everstate.pipeline.batch.accepted import (
    PartitionOffsets,
    accepted_changes,
    mark_newest,
    only_changes,
)
from everstate.pipeline.batch.awaiting import await_archive
from everstate.pipeline.batch.rows import Accepted, as_written, batch_rows, entities_read
from everstate.pipeline.batch.rules import taken_by
from everstate.pipeline.requests.moment import Moment
from everstate.pipeline.spark.archived import read_archive
from everstate.pipeline.spark.functions import ship_functions
from everstate.pipeline.spark.progress import OnProgress
from everstate.pipeline.spark.session import spark_errors
from everstate.views.control import Control, opened_control
from everstate.views.kinds import ViewPlan
from everstate.views.project import Project, known_views
from everstate.views.tables import history_of, latest_of

_OF_CHANGE: Final = (
    *("key", "version", "id", "kind", "as_of", "occurred_at", "recorded_at", "schema_version"),
    *("generation", "partition", "offset", "provenance", "transaction", "event"),
    *("current", "original"),
)


class Past:
    """The accepted changes of an app's entity types at a moment, and the views computed from them.

    All frames are lazy. Cost: one shuffle by key of the archive up to the moment's position;
    columns that are not used are not read.
    """

    def __init__(
        self,
        spark: SparkSession,
        config: Config,
        project: Project,
        moment: Moment,
        on_progress: OnProgress = lambda _progress: None,
    ) -> None:
        self._spark, self._config, self._project = spark, config, project
        self._moment, self._on_progress = moment, on_progress
        self._positions: dict[str, PartitionOffsets] = {}

    def changes(self, entity: str) -> DataFrame:
        """Accepted changes, with the columns of a history, and `current` and `original` typed.

        A change that the core accepted and the present model cannot read fails the job. Raises
        UnknownEntity, InvalidToken, ArchiveError, Unavailable.
        """
        return self._changes(self._accepted(entity))

    def states(self, entity: str) -> DataFrame:
        """Entities that existed: the model's fields, `_key`, `_version`, `_as_of`, `_recorded_at`.

        The same columns as the relation with the entity type's name in the views' database.
        """
        names = self._project.entities[self._known(entity)].arrow_schema.names
        fields = [F.col("current")[name].alias(name) for name in names]
        own = ("key", "version", "as_of", "recorded_at")
        live = self._accepted(entity).where(F.col("is_newest") & F.col("current").isNotNull())
        return live.select(*fields, *(F.col(name).alias(f"_{name}") for name in own))

    def view(self, name: str) -> DataFrame:
        """Rows of a view by its own SQL; raises UnknownView.

        ``name`` may also be an entity type, or its `_latest` or `_history`.
        """
        if name in self._project.entities:
            return self.states(name)
        for entity in self._project.entities:
            if name == latest_of(entity):
                return self._changes(self._accepted(entity).where("is_newest"))
            if name == history_of(entity):
                return self.changes(entity)
        if name in self._project.refused_views:
            raise self._project.refused_views[name]
        if name not in self._project.views:
            raise UnknownView(name, known_views(self._project))
        plan = self._project.views[name]
        with spark_errors(f"view {name}"):
            accepted = [self._taken(plan, entity) for entity in entities_read(plan)]
            if plan.batch_as_shown:
                return as_written(plan, accepted, plan.batch_as_shown)
            ship_functions(self._project)
            # Spark resolves the name of the table here, so the table may be dropped after it.
            with batch_rows(plan, accepted) as rows:
                return rows.where(plan.is_shown).select(
                    *(F.col(column).alias(shown) for column, shown in plan.read_of_batch)
                )

    def _taken(self, plan: ViewPlan, entity: str) -> Accepted:
        return taken_by(plan, self._project.entities[entity], self._accepted(entity))

    def in_order(self, name: str) -> DataFrame:
        """Rows of a view ordered by their first columns, unless its SQL has an order."""
        rows, plan = self.view(name), self._project.views.get(name)
        if plan is not None and plan.is_ordered:
            return rows
        first = [field.name for field in rows.schema if not isinstance(field.dataType, MapType)]
        return rows.orderBy(*(F.col(f"`{column}`") for column in first[:2]))

    def positions(self, entity: str) -> PartitionOffsets:
        """The position up to which an entity type is read: judged by the core, and archived.

        Computed once. With a token it is the token's position; the call then waits for the archive
        to reach it.
        """
        if entity not in self._positions:
            self._positions[entity] = self._read_positions(self._known(entity))
        return self._positions[entity]

    def holding(self, entity: str) -> list[tuple[int, int]]:
        """Generation and partition of each place where changes are held at the position.

        They are held by then, and released later or not at all.
        """
        with opened_control(self._config) as control:
            positions = sorted(self.positions(entity).items())
            return [place for place, end in positions if control.is_holding(entity, *place, end)]

    def _read_positions(self, entity: str) -> PartitionOffsets:
        with opened_control(self._config) as control:
            core = {
                (place.generation, place.partition): place.next_offset
                for place in control.positions(entity)
                if place.view == latest_of(entity)
            }
            if self._moment.position is not None:
                wanted = self._wanted_position(control, entity, self._moment.position)
                if late := [at for at, offset in wanted.items() if core.get(at, 0) < offset]:
                    raise InvalidToken(
                        f"the core of {entity} has not reached its position ({late[0]})"
                    )
        if self._moment.position is not None:
            await_archive(self._config, entity, wanted, self._on_progress)
            return wanted
        archived = ArchiveReader(self._config, entity).position()
        return {(g, p): min(at, archived.get(g, {}).get(p, 0)) for (g, p), at in core.items()}

    @staticmethod
    def _changes(accepted: DataFrame) -> DataFrame:
        return accepted.select(*_OF_CHANGE).withColumnRenamed("id", "change_id")

    def _accepted(self, entity: str) -> DataFrame:
        entity = self._known(entity)
        positions = self.positions(entity)
        with opened_control(self._config) as control:
            dead = control.dead_places(entity)
        with spark_errors(f"reading the archive of {entity}"):
            archive = read_archive(self._spark, self._config, self._project.entities[entity])
            return self._until(only_changes(accepted_changes(archive, positions, dead)))

    def _until(self, changes: DataFrame) -> DataFrame:
        """The changes that count at the moment: of each key its versions up to one of them."""
        if self._moment.at is not None:
            # As-of times never decrease from version to version.
            return mark_newest(changes.where(F.col("as_of") <= F.lit(self._moment.at)))
        if self._moment.recorded_at is not None:
            recorded = F.when(
                F.col("recorded_at") <= F.lit(self._moment.recorded_at), F.col("version")
            )
            last = F.max(recorded).over(Window.partitionBy("key"))
            marked = changes.withColumn("__last", last)
            return mark_newest(marked.where(F.col("version") <= F.col("__last")).drop("__last"))
        return changes

    def _wanted_position(self, control: Control, entity: str, token: str) -> PartitionOffsets:
        position = parse_token(token).positions.get(entity)
        if position is None:
            raise InvalidToken(f"it has no position of {entity}")
        for topic, identity in control.stored_topics(entity).items():
            if position.log != log_mark(topic, identity.cluster_id, identity.topic_id):
                raise InvalidToken(f"its positions of {entity} belong to another log")
        return {at: spot.covered_by for at, spot in position.spots.items()}

    def _known(self, entity: str) -> str:
        if entity not in self._project.entities:
            raise UnknownEntity(entity, tuple(self._project.entities))
        return entity
