"""Whether the typed columns of an archive say what the messages beside them say.

Views are built, and analysts read, from the typed columns; the proof of the bytes says nothing of
them. The columns of a record are those of the model and of the release that archived it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from everstate.changes import EntityType
from everstate.pipeline.spark.archived import parsed_again, typed_rows
from everstate.pipeline.spark.states import state_schema

_STATES: Final = ("current", "original")
_COLUMNS: Final = (
    *("key", "recorded_at", "version", "id", "kind", "occurred_at", "misfits", "provenance"),
    *("transaction", "event", "schema_version", "reason"),
)
_TYPED: Final = "typed"


@dataclass(frozen=True, slots=True)
class WrongColumns:
    """Records whose typed columns differ from their message, in the same columns."""

    columns: tuple[str, ...]
    count: int
    generation: int
    partition: int
    offset: int
    """The place of the first one."""


def compared(archive: DataFrame, entity_type: EntityType) -> tuple[int, list[WrongColumns]]:
    """How many records have typed columns of this model, and which of them are wrong.

    The records of another model, and those that could not be read, are not compared: everstate
    reads their messages instead. Cost: the messages are parsed once; comparing is a third of that.
    """
    rows = typed_rows(archive, entity_type)
    if rows is None:
        return 0, []
    named = [*_COLUMNS, *_STATES]
    rows = rows.withColumn(_TYPED, F.struct(*named))
    parsed = parsed_again(rows, entity_type, kept=(_TYPED,))
    # Whole columns first: only where one differs are its fields compared, to name them.
    same = reduce(and_, (~_differs(*_both(name), parsed.schema[name].dataType) for name in named))
    names = F.array_compact(F.array(*_differences(entity_type, parsed.schema)))
    differ = F.when(~same, names).otherwise(F.array())
    place = F.struct("generation", "partition", "offset")
    groups = (
        parsed.select(differ.alias("differ"), place.alias("place"))
        .groupBy("differ")
        .agg(F.count("*").alias("n"), F.min("place").alias("first"))
        .collect()
    )
    wrong = [
        WrongColumns(tuple(group.differ), group.n, *group["first"])
        for group in sorted(groups, key=lambda group: -group.n)
        if group.differ
    ]
    return sum(group.n for group in groups), wrong


def _differences(entity_type: EntityType, schema: StructType) -> Iterator[Column]:
    """For each column, and each field of a state: its name where both values differ."""
    for name in _COLUMNS:
        yield F.when(_differs(*_both(name), schema[name].dataType), name)
    for name in _STATES:
        kept, read = _both(name)
        yield F.when(kept.isNull() != read.isNull(), name)
        both = kept.isNotNull() & read.isNotNull()
        for field in state_schema(entity_type):
            differs = _differs(kept[field.name], read[field.name], field.dataType)
            yield F.when(both & differs, f"{name}.{field.name}")


def _both(name: str) -> tuple[Column, Column]:
    """A column as it is kept, and as the message says it."""
    return F.col(f"{_TYPED}.{name}"), F.col(name)


def _differs(left: Column, right: Column, kind: DataType) -> Column:
    return ~_comparable(left, kind).eqNullSafe(_comparable(right, kind))


def _comparable(value: Column, kind: DataType) -> Column:
    """A value in a type that Spark can compare, which it cannot do with maps."""
    if isinstance(kind, MapType):
        entries = F.transform(
            F.map_entries(value),
            lambda entry: F.struct(
                entry["key"], _comparable(entry["value"], kind.valueType).alias("value")
            ),
        )
        return F.array_sort(entries)
    if isinstance(kind, ArrayType):
        return F.transform(value, lambda each: _comparable(each, kind.elementType))
    if isinstance(kind, StructType):
        fields = (_comparable(value[each.name], each.dataType).alias(each.name) for each in kind)
        return F.when(value.isNotNull(), F.struct(*fields))
    return value
