"""Parsed records of known ranges, from the log or from the archive, whichever has them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from everstate.config import Config
from everstate.log.positions import Offsets, Range
from everstate.log.topics import TopicNames
from everstate.pipeline.archived import read_archived
from everstate.pipeline.parse import parse
from everstate.pipeline.source import SOURCE_SCHEMA, read_ranges
from everstate.pipeline.spans import ArchivedOffsets, Sources, divided
from everstate.pipeline.task import UNJUDGED
from everstate.views.project import Project

# A task costs 0.1 s of a core before its first change: a small batch is read by few.
_TASK_CHANGES: Final = 5_000
_TASK_PARTITIONS: Final = 4

Freed = tuple[int, int, bytes, bytes]
"""Partition, offset, key and message of a change that waited before a range."""


class ChangesReader:
    """Reads ranges of a project's changelogs, and of the archive where the log begins too late."""

    def __init__(
        self, spark: SparkSession, config: Config, project: Project, offsets: Offsets
    ) -> None:
        self._spark, self._config, self._project, self._offsets = spark, config, project, offsets
        self._names = TopicNames(config.log.prefix)
        self._archived = ArchivedOffsets(config)

    def archived(self, entity: str) -> dict[int, int]:
        """Up to where the archive of an entity type reaches, by partition."""
        return dict(self._archived.of(entity).position)

    def sources(self, entity: str, topic: str, spans: Mapping[int, Range]) -> Sources:
        """Where to read ranges; raises DataLoss when neither log nor archive has their start."""
        begins = {p: offset for (_, p), offset in self._offsets.beginnings([topic]).items()}
        if all(span.start >= begins[partition] for partition, span in spans.items()):
            return Sources(log=spans)
        return divided(topic, spans, begins, self._archived.of(entity))

    def parsed(
        self, entity: str, sources: Sources, *, judged: bool, freed: Sequence[Freed] = ()
    ) -> DataFrame:
        """Parsed records, a partition in one task and in the order of offsets.

        With ``judged`` every record is judged by the rules; without, one that is not plainly
        readable has `UNJUDGED` as its reason. ``freed`` are few records from before the ranges.
        """
        entity_type = self._project.entities[entity]
        unjudged = None if judged else UNJUDGED
        parts = []
        if spans := sources.log:
            topic = self._names.changes(entity)
            records = read_ranges(self._spark, self._config, {topic: spans})
            tasks = max(
                math.ceil(len(spans) / _TASK_PARTITIONS),
                math.ceil(sum(map(len, spans.values())) / _TASK_CHANGES),
            )
            parts.append(parse(records.coalesce(tasks), entity_type, unjudged=unjudged))
        if spans := sources.archive:
            parts.append(read_archived(self._spark, self._config, entity_type, spans))
        if freed:
            parts.append(parse(self._records(entity, freed), entity_type))
        # An archive that was written before a field came has no column of it.
        found = reduce(partial(DataFrame.unionByName, allowMissingColumns=True), parts)
        if freed:
            spread = found.repartition(len(sources.spans), F.col("partition"))
            found = spread.sortWithinPartitions("partition", "offset")
        return found

    def _records(self, entity: str, freed: Sequence[Freed]) -> DataFrame:
        topic = self._names.changes(entity)
        rows = [
            (key, value, topic, partition, offset, None, 0, None)
            for partition, offset, key, value in freed
        ]
        return self._spark.createDataFrame(rows, SOURCE_SCHEMA)
