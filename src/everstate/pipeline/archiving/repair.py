"""Writes the records of an archive's damaged files again, from the log while it has them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias
from urllib.parse import unquote

from pyspark.sql import DataFrame, SparkSession

from everstate.archive import (
    ArchiveFile,
    ArchiveLog,
    ArchiveReader,
    CommitNote,
    Ledger,
    LedgerRow,
    frozen,
)
from everstate.archive.sums import check_table, write_sums
from everstate.archive.upkeep import forget_files, move_aside
from everstate.changes import EntityType
from everstate.config import Config
from everstate.errors import ArchiveError
from everstate.log.positions import Offsets, Range
from everstate.log.topics import Topics
from everstate.pipeline.archiving.archiver import archived_topic, conformed
from everstate.pipeline.spark.parse import parse
from everstate.pipeline.spark.session import spark_errors
from everstate.pipeline.spark.source import read_ranges

_NOTE: Final = "everstate_repair"
_PLACE: Final = ["generation", "partition", "offset"]

_Spans: TypeAlias = dict[int, dict[int, Range]]
"""generation → partition → offsets"""


@dataclass(frozen=True, slots=True)
class Repaired:
    """What was written again."""

    entity: str
    files: list[str]
    """The damaged files; they are in the folder `_damaged` of the table now."""
    records: int
    """Their records, which were written again from the log."""
    summed: list[str]
    """Files that had no sums and have some now; the sums of their pages, if any, are right."""
    seconds: float


def repair(
    spark: SparkSession,
    config: Config,
    entity_type: EntityType,
    *,
    offsets: Offsets,
    topics: Topics,
) -> Repaired:
    """Replace an archive's damaged files by the records that they had, read from the log.

    The damaged files are moved to the folder `_damaged` of the table, the records that no other
    file has are appended, and then the table forgets the files. A reader that needs one of them
    gets an error until then, so that nobody reads a record twice or misses one. After a kill at any
    point the next call goes on. Archiving may continue meanwhile. Raises ArchiveDamaged when the
    table's log or the ledger is damaged; ArchiveError when the log does not have all these records
    any more (nothing was changed); LogIdentityChanged, NoArchive, Unavailable. Cost: reads all
    files of the archive once, and the log twice over the offsets of the damaged files.
    """
    began = time.monotonic()
    entity = entity_type.name
    log, ledger, reader = (
        ArchiveLog(config, entity), Ledger(config, entity), ArchiveReader(config, entity)
    )  # fmt: skip
    version, note = frozen(log, ledger)
    files = {file.path: file for file in reader.files(version)}
    damaged, without = check_table(reader.path, list(files))
    for name in damaged.keys() - files.keys():
        raise damaged[name]
    written = 0
    if damaged:
        ledger.sync(log)
        rows = [row for row in ledger.rows() if row.commit_version <= version]
        wanted = _spans(rows, [files[name] for name in damaged])
        good = [file for name, file in files.items() if name not in damaged]
        with spark_errors(f"repairing the archive of {entity}"):
            missing = _of_log(spark, config, entity_type, wanted, note, offsets, topics).join(
                _held(spark, reader.path, good, wanted), on=_PLACE, how="left_anti"
            )
            lacking = sum(row.rows for row in rows) - sum(file.rows for file in good)
            written = _counted(missing, lacking, list(damaged))
            table = spark.read.format("delta").option("versionAsOf", version).load(reader.path)
            move_aside(config, entity, list(damaged))
            if written:
                _append(conformed(missing, table.schema), reader.path, list(damaged))
        forget_files(config, entity, list(damaged))
    unsummed = [name for name in without if name in files]
    write_sums(reader.path, unsummed)
    return Repaired(entity, list(damaged), written, unsummed, time.monotonic() - began)


def _spans(rows: Sequence[LedgerRow], damaged: Sequence[ArchiveFile]) -> _Spans:
    """The committed offsets that damaged files may have had, as one range a partition."""
    spans: _Spans = {}
    for row in rows:
        for file in damaged:
            if file.may_hold(row.partition, row.start, row.end):
                assert file.offset_min is not None
                assert file.offset_max is not None
                start, end = max(row.start, file.offset_min), min(row.end, file.offset_max + 1)
                of = spans.setdefault(row.generation, {})
                known = of.get(row.partition, Range(start, end))
                of[row.partition] = Range(min(known.start, start), max(known.end, end))
    return spans


def _of_log(
    spark: SparkSession,
    config: Config,
    entity_type: EntityType,
    spans: _Spans,
    note: CommitNote,
    offsets: Offsets,
    topics: Topics,
) -> DataFrame:
    """The records of these offsets that the log still has, in the columns of `parse`."""
    of_topic = {topics.names.changes(entity_type.name, each): each for each in spans}
    topics.check_identity({name: archived_topic(note, of_topic[name]) for name in of_topic})
    begins = offsets.beginnings(list(of_topic)) if of_topic else {}
    ranges = {
        name: {
            partition: Range(max(span.start, begins[name, partition]), span.end)
            for partition, span in spans[generation].items()
        }
        for name, generation in of_topic.items()
    }
    return parse(read_ranges(spark, config, ranges), entity_type)


def _held(spark: SparkSession, path: str, good: Sequence[ArchiveFile], spans: _Spans) -> DataFrame:
    """Places of the records that the other files have, as far as they may be the same."""
    near = [
        f"{path}/{unquote(file.path)}"
        for file in good
        if any(
            file.may_hold(partition, span.start, span.end)
            for of in spans.values()
            for partition, span in of.items()
        )
    ]
    schema = "generation int, partition int, offset bigint"
    return spark.read.schema(schema).parquet(*near) if near else spark.createDataFrame([], schema)


def _counted(missing: DataFrame, lacking: int, names: Sequence[str]) -> int:
    """The number of records to write; raises ArchiveError unless these are all that lack."""
    found = missing.count()
    if found != lacking:
        raise ArchiveError(
            f"{', '.join(names)}: the log has {found:,} of the {lacking:,} records that the "
            "archive lacks without these files; nothing was changed.",
            advice="Put the file of the same name from a copy in its place, with its `.NAME.crc`.",
        )
    return found


def _append(rows: DataFrame, path: str, names: Sequence[str]) -> None:
    (
        rows.repartition("generation", "partition")
        .sortWithinPartitions("partition", "offset")
        .write.format("delta")
        .mode("append")
        .option("mergeSchema", "true")
        .option("compression", "zstd")
        .option("userMetadata", json.dumps({_NOTE: {"files": names}}))
        .save(path)
    )
