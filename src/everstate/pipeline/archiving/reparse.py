"""Writing the typed columns of an archive again, from the messages beside them."""

from __future__ import annotations

import time
from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from everstate.archive import ArchiveLog, Ledger, frozen, table_path
from everstate.changes import EntityType
from everstate.config import Config
from everstate.errors import ArchiveError
from everstate.pipeline.archiving.archiver import conformed
from everstate.pipeline.spark.archived import lake_table, parsed_again
from everstate.pipeline.spark.session import spark_errors
from everstate.pipeline.spark.states import state_schema


@dataclass(frozen=True, slots=True)
class Reparsed:
    """What was written again."""

    entity: str
    records: int
    unreadable: int
    """Records that the present model and rules cannot read either."""
    seconds: float


def reparse(spark: SparkSession, config: Config, entity_type: EntityType) -> Reparsed:
    """Parse every archived message by the present model, and replace the typed columns.

    For columns that `archive verify` found wrong, and for records of an earlier model, which
    readers parse at each reading and of which other programs see the earlier columns only. Keys,
    values, headers and times stay byte for byte. The column of a field that the model no longer
    has becomes null; its values stay in the messages. One Delta commit replaces the files; records
    that are archived meanwhile are not touched, and the earlier files are kept for seven days.
    Raises NoArchive, and ArchiveError where a field has another type than its column: a column
    keeps its first type, so that its values would become null. Raises ArchiveFull, and
    PositionMoved when a compaction committed first (nothing changed). Cost: 0.1 ms of a core a
    flight, and room for a second copy of the archive.
    """
    began = time.monotonic()
    entity = entity_type.name
    log, ledger = ArchiveLog(config, entity), Ledger(config, entity)
    version, note = frozen(log, ledger)
    ledger.sync(log)
    # Exactly the records of this version: what a later append adds must not be replaced.
    places = [
        f"(generation = {generation} AND partition = {partition} AND offset < {offset})"
        for generation, offsets in note.positions.items()
        for partition, offset in offsets.items()
    ]
    condition, path = " OR ".join(places), table_path(config, entity)
    with spark_errors(f"parsing the archive of {entity} again"):
        table = lake_table(spark, config, entity, version=version)
        _refuse_other_types(table, entity_type)
        rows = conformed(parsed_again(table.where(condition), entity_type), table.schema)
        (
            rows.write.format("delta")
            .mode("overwrite")
            .option("replaceWhere", condition)
            .option("mergeSchema", "true")
            .option("compression", "zstd")
            .save(path)
        )
        unread = F.count_if(F.col("recorded_at").isNull())
        after = lake_table(spark, config, entity).where(condition)
        counted = after.agg(F.count("*").alias("all"), unread.alias("unreadable")).collect()[0]
    return Reparsed(entity, counted["all"], counted["unreadable"], time.monotonic() - began)


def _refuse_other_types(table: DataFrame, entity_type: EntityType) -> None:
    """Raise ArchiveError naming the fields whose column has another type."""
    kept = table.schema["current"].dataType
    assert isinstance(kept, StructType), "parsed_schema says so"
    columns = {column.name: column.dataType for column in kept}
    others = [
        f"{field.name} ({columns[field.name].simpleString()}, now {field.dataType.simpleString()})"
        for field in state_schema(entity_type)
        if columns.get(field.name, field.dataType) != field.dataType
    ]
    if others:
        raise ArchiveError(
            f"the archive of {entity_type.name} has columns of another type than the model: "
            f"{', '.join(others)}; the values that they have would become NULL, and nothing was "
            "changed.",
            advice="everstate reads the messages of such an archive, with the present types; so "
            "does everstate.read for a program of yours.",
        )
