"""Raw derived topics: queries of Spark's real-time trigger, from the changelog to the topic.

Delivery is at least once: a restarted query sends the changes since its last batch again. A record
has its change's id, version and offset, and readers skip versions that they have (law 2).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from everstate.changes.derived import Derivation, derivation_of
from everstate.config import Config
from everstate.errors import EverstateError, InvalidConfig, PipelineError, Unavailable
from everstate.log.client import spark_options, spark_sink_options
from everstate.pipeline.derive.declare import declare_topic
from everstate.pipeline.derive.deriver import TopicKeeper
from everstate.pipeline.derive.expressions import raw_records
from everstate.pipeline.spark.session import spark_errors
from everstate.private import private_folder
from everstate.views.control import BUILDING, LIVE, Control, ViewVersion
from everstate.views.project import Project
from everstate.views.tables import covers

logger = logging.getLogger(__name__)

_TRIGGER: Final = "30 seconds"
"""Batch length: a restarted query repeats at most this; its position is updated as often."""


def slots_needed(partitions: Mapping[str, int]) -> int:
    """Task slots of all queries: each query holds one per partition as long as it runs (C23)."""
    return sum(partitions.values()) + 2


def check_slots(spark: SparkSession, partitions: Mapping[str, int]) -> None:
    """Raise InvalidConfig when queries would wait for each other for ever."""
    wanted, found = slots_needed(partitions), spark.sparkContext.defaultParallelism
    if found < wanted:
        raise InvalidConfig(
            "pipeline.master",
            spark.sparkContext.master,
            f"{wanted} task slots, as many as the raw topics need",
        )


class RawDeriver(TopicKeeper):
    """Runs the queries of one raw derived topic: one for each version that is kept."""

    def __init__(
        self, config: Config, project: Project, derivation: Derivation, spark: SparkSession
    ) -> None:
        super().__init__(config, project, derivation)
        self._spark = spark
        self._queries: dict[int, StreamingQuery] = {}

    def close(self) -> None:
        """Stop the queries and close the connections."""
        for query in self._queries.values():
            query.stop()
        self._queries = {}
        super().close()

    def open(self) -> None:
        """Prepare a run; first the pipeline must have created the tables of the views."""
        with self._database.connected() as control:
            control.install()
            if not control.core_vector(self.entity):
                raise Unavailable("the pipeline has not created the tables of the views yet.")
        self.prepare()

    def may_pass(self, error: EverstateError) -> bool:
        """Only until queries run: then a new worker begins with the progress in the log."""
        return error.retryable and not self._queries

    def prepare(self) -> None:
        """Register the declared topic; the core must have been prepared."""
        self._note = self._opened()
        with self._database.connected() as control:
            self._tell_registry(control)
            declare_topic(self._config, control, self._declared)

    def step(self) -> None:
        """Start wanted queries that do not run, stop others, and store each query's position.

        Raises PipelineError when a query ended.
        """
        with self._database.connected() as control:
            rows = {row.version: row for row in control.versions(self.name)}
            wanted = {v for v, row in rows.items() if row.status in (LIVE, BUILDING)}
            for version in set(self._queries) - wanted:
                self._queries.pop(version).stop()
            for version in wanted:
                if version not in self._queries:
                    known = control.vector(self.name, version)
                    vector = known or self._begins(control, rows[version])
                    self._check_source(control, [vector])
                    self._queries[version] = self._start(rows[version])
                self._look(control, rows[version])
            self._switch(control, rows)

    def _start(self, row: ViewVersion) -> StreamingQuery:
        """Start the query of one version, at the log's first record or at its checkpoint."""
        derivation, spark = derivation_of(row.name, row.definition), self._spark
        derivation.check(self._project.entities)
        topic = self._topics.names.derived(self.name, row.version)
        check_slots(spark, {topic: self._topics.partitions(self._source)})
        self._topics.ensure_beside(self._source, topic)
        folder = private_folder(self._config.project.data_dir / "derive")
        trigger: Any = {"realTime": _TRIGGER}
        with spark_errors(f"raw topic {self.name}"):
            # Of members with the same name the last one counts, as in every other reader of JSON.
            spark.conf.set("spark.sql.variant.allowDuplicateKeys", "true")
            records = (
                spark.readStream.format("kafka")
                .options(**spark_options(self._config))
                .option("subscribe", self._source)
                .option("startingOffsets", "earliest")
                .load()
            )
            query: StreamingQuery = (
                raw_records(records, self._project.entities[self.entity], derivation)
                .writeStream.format("kafka")
                .options(**spark_sink_options(self._config))
                .option("topic", topic)
                .option("includeHeaders", "true")
                .option("checkpointLocation", str(folder / f"{self._config.log.prefix}-{topic}"))
                .queryName(topic)
                .outputMode("update")
                .trigger(**trigger)
                .start()
            )
            return query

    def _look(self, control: Control, row: ViewVersion) -> None:
        """Raise the error that ended a query; else store its position."""
        query = self._queries[row.version]
        if not query.isActive:
            self._queries.pop(row.version)
            reason = str(query.exception() or "it ended").splitlines()[0]
            control.record(row.name, row.version, error=reason)
            raise PipelineError(f"raw topic {self.name}: {reason}")
        self._mirror(control, {row.version: row}, {row.version: read_offsets(query, self._source)})
        if row.error is not None:
            control.record(row.name, row.version, error=None)

    def _switch(self, control: Control, rows: Mapping[int, ViewVersion]) -> None:
        """Publish a version that has caught up with the published one; the first one at once."""
        for version, row in rows.items():
            if row.status != BUILDING:
                continue
            seen = None if self._note is None else self._note.published
            before = {} if seen is None else control.vector(self.name, seen)
            mine = control.vector(self.name, version)
            if seen == version or (seen is not None and not covers(mine, before)):
                continue
            # The batches that end at the barriers are complete, so the ended topic has all changes
            # before them. It may have some of later ones, which readers get again.
            self._replace(control, version, self._offsets.beginnings, before)
            return


def read_offsets(query: StreamingQuery, source: str) -> dict[int, int]:
    """Next offset of each partition at the end of a query's last batch; empty before one."""
    progress: Any = query.lastProgress
    if not progress:
        return {}
    found = progress["sources"][0]["endOffset"]
    offsets = msgspec.json.decode(found) if isinstance(found, str) else found
    return {int(partition): int(at) for partition, at in (offsets or {}).get(source, {}).items()}
