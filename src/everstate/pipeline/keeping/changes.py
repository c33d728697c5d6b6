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
from everstate.pipeline.keeping.spans import ArchivedOffsets, Sources, divided
from everstate.pipeline.keeping.task import UNJUDGED
from everstate.pipeline.spark.archived import read_archived
from everstate.pipeline.spark.parse import parse
from everstate.pipeline.spark.source import SOURCE_SCHEMA, read_ranges
from everstate.views.project import Project

# A task costs 0.1 s of a core before its first change, so a small batch is read by few tasks.
_TASK_CHANGES: Final = 5_000
_TASK_PARTITIONS: Final = 4

ReleasedChange = tuple[int, int, bytes, bytes]
"""Partition, offset, key and message of a held change whose record lies before a range."""


class ChangesReader:
    """Reads ranges of a project's changelogs, and of the archive where the log begins too late."""

    def __init__(
        self, spark: SparkSession, config: Config, project: Project, offsets: Offsets
    ) -> None:
        self._spark, self._config, self._project, self._offsets = spark, config, project, offsets
        self._names = TopicNames(config.log.prefix)
        self._archived = ArchivedOffsets(config)

    def archived(self, entity: str) -> dict[int, int]:
        """The archive's position for an entity type, by partition."""
        return dict(self._archived.of(entity).position)

    def sources(self, entity: str, topic: str, spans: Mapping[int, Range]) -> Sources:
        """Where to read ranges; raises DataLoss when neither log nor archive has their start."""
        begins = {p: offset for (_, p), offset in self._offsets.beginnings([topic]).items()}
        if all(span.start >= begins[partition] for partition, span in spans.items()):
            return Sources(log=spans)
        return divided(topic, spans, begins, self._archived.of(entity))

    def parsed(
        self,
        entity: str,
        sources: Sources,
        *,
        judged: bool,
        headers: bool = False,
        released: Sequence[ReleasedChange] = (),
    ) -> DataFrame:
        """Parsed records, each partition in one task and in the order of offsets.

        With ``judged`` every record is checked by all rules; without it, a record that is not
        plainly readable gets `UNJUDGED` as its reason. ``headers``: also read the headers, for
        dead letters. ``released``: a few released changes from before the ranges.
        """
        entity_type = self._project.entities[entity]
        unjudged = None if judged else UNJUDGED
        parts = []
        if spans := sources.log:
            topic = self._names.changes(entity)
            records = read_ranges(self._spark, self._config, {topic: spans}, headers=headers)
            tasks = max(
                math.ceil(len(spans) / _TASK_PARTITIONS),
                math.ceil(sum(map(len, spans.values())) / _TASK_CHANGES),
            )
            if tasks < len(spans):
                # Only when it saves tasks, because it copies each record once more.
                records = records.coalesce(tasks)
            parts.append(parse(records, entity_type, unjudged=unjudged))
        if spans := sources.archive:
            parts.append(read_archived(self._spark, self._config, entity_type, spans))
        if released:
            parts.append(parse(self._records(entity, released), entity_type))
        # An archive that was written before a field was added has no column for it.
        found = reduce(partial(DataFrame.unionByName, allowMissingColumns=True), parts)
        if released:
            spread = found.repartition(len(sources.spans), F.col("partition"))
            found = spread.sortWithinPartitions("partition", "offset")
        return found

    def _records(self, entity: str, released: Sequence[ReleasedChange]) -> DataFrame:
        topic = self._names.changes(entity)
        rows = [
            (key, value, topic, partition, offset, None, 0, None)
            for partition, offset, key, value in released
        ]
        return self._spark.createDataFrame(rows, SOURCE_SCHEMA)
