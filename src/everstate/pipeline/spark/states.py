"""States of entities in typed columns: what the model says they are, and what fits it.

A state that does not fit the model is no reason to refuse its record: each value that does not fit
is NULL in the typed columns (a misfit, :mod:`everstate.views.misfits`).
"""

from __future__ import annotations

from functools import reduce
from operator import and_, or_
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    DataType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from everstate.changes import EntityType
from everstate.changes.moments import FIRST, LAST

CORRUPT: Final = "_everstate_unreadable"

# A time without a date, which Spark reads as one of the day on which it reads it.
TIME_ONLY: Final = r"\s*[+-]?(?:T\d|\d{1,2}:)"

# JSON as the codec reads it: Spark's defaults are more lenient with quotes and numbers.
STRICT: Final = {
    "mode": "PERMISSIVE",
    "allowSingleQuotes": "false",
    "allowNonNumericNumbers": "false",
    "allowUnquotedFieldNames": "false",
    "allowNumericLeadingZeros": "false",
}
JSON_OPTIONS: Final = {**STRICT, "columnNameOfCorruptRecord": CORRUPT}


def state_schema(entity_type: EntityType) -> StructType:
    """Spark's type of an entity's state, from its Arrow schema; every field nullable."""
    schema = _nullable(from_arrow_schema(entity_type.arrow_schema, prefer_timestamp_ntz=True))
    assert isinstance(schema, StructType)
    return schema


def _nullable(kind: DataType) -> DataType:
    """The type with every part nullable: JSON may lack any field, and all tables must agree."""
    if isinstance(kind, StructType):
        return StructType([StructField(f.name, _nullable(f.dataType)) for f in kind])
    if isinstance(kind, ArrayType):
        return ArrayType(_nullable(kind.elementType))
    if isinstance(kind, MapType):
        return MapType(kind.keyType, _nullable(kind.valueType))
    return kind


def state_read(text: Column, entity_type: EntityType) -> Column:
    """A state read from its JSON text as in a message: values that do not fit are null."""
    schema = state_schema(entity_type)
    read = F.from_json(
        text, StructType([*schema, StructField(CORRUPT, StringType())]), JSON_OPTIONS
    )
    state = F.struct(*(read[name].alias(name) for name in schema.names))
    return fitted_state(text, state, entity_type, F.lit(True))["state"]


def fitted_state(
    json: Column, state: Column, entity_type: EntityType, is_complete: Column
) -> Column:
    """A state in which values that do not fit are null, and the names of their fields.

    The names are in an array that also has nulls. ``json``: the state's text. ``is_complete``:
    whether a required field that is missing does not fit.
    """
    fields, types = tuple(entity_type.arrow_schema), state_schema(entity_type)
    return F.when(state.isNotNull(), _fitted_fields(json, state, fields, types, is_complete, ""))


def _fitted_fields(
    json: Column,
    state: Column,
    fields: tuple[pa.Field[Any], ...],
    types: StructType,
    is_complete: Column,
    path: str,
) -> Column:
    # In a lambda, so that the names in the text are found once for all fields.
    present = fields_present(json, [field.name for field in fields])
    parts = [json.alias("json"), state.alias("state"), present.alias("present")]
    parts.append(is_complete.alias("complete"))

    def fitted(bound: Column) -> Column:
        values, misfits = [], []
        for field, kind in zip(fields, types, strict=True):
            value, names = _fitted_field(bound, field, kind.dataType, path)
            values.append(value.alias(field.name))
            misfits.append(names)
        return F.struct(F.struct(*values).alias("state"), F.concat(*misfits).alias("misfits"))

    return F.get(F.transform(F.array(F.struct(*parts)), fitted), 0)


def _fitted_field(
    bound: Column, field: pa.Field[Any], kind: DataType, path: str
) -> tuple[Column, Column]:
    """A field's value, null when it does not fit, and the names of what does not fit in it."""
    where, column = f"{path}{field.name}", bound["state"][field.name]
    json = F.get_json_object(bound["json"], f"$['{field.name}']")
    is_absent = ~F.array_contains(bound["present"], field.name)
    wrong = [~is_absent & column.isNull()]
    if not field.nullable:
        wrong.append(is_absent & bound["complete"])
    if isinstance(kind, StructType):
        inner = _fitted_fields(
            json, column, tuple(field.type), kind, bound["complete"], f"{where}."
        )
        inner = F.when(column.isNotNull(), inner)
        name = F.when(_any(wrong), where)
        of_parts = F.coalesce(inner["misfits"], F.array().cast(ArrayType(StringType())))
        return inner["state"], F.concat(F.array(name), of_parts)
    if (held := holds(column, field.type)) is not None:
        wrong.append(~held)
    if isinstance(kind, (ArrayType, MapType)):
        whole = StructType([StructField("a", kind), StructField(CORRUPT, StringType())])
        again = F.from_json(F.concat(F.lit('{"a":'), json, F.lit("}")), whole, JSON_OPTIONS)
        wrong.append(again[CORRUPT].isNotNull())
    if has_times(field.type):
        plain = pa.types.is_timestamp(field.type)
        wrong.append(json.rlike(f"^{TIME_ONLY}" if plain else f'"{TIME_ONLY}'))
    is_wrong = _any(wrong)
    return F.when(~is_wrong, column), F.array(F.when(is_wrong, where))


def _any(conditions: list[Column]) -> Column:
    """Whether a condition holds; one that is null does not."""
    return reduce(or_, (F.coalesce(each, F.lit(False)) for each in conditions))


def holds(value: Column, kind: pa.DataType) -> Column | None:
    """Whether every engine can hold a value; ``None``: every value of its type fits.

    Spark reads years that PostgreSQL and Python do not have, and numbers too large for a float.
    """
    if pa.types.is_floating(kind):
        return F.abs(value) < float("inf")
    if pa.types.is_date(kind):
        return value.between(F.expr(f"date'{FIRST[:10]}'"), F.expr(f"date'{LAST[:10]}'"))
    if pa.types.is_timestamp(kind):
        zoned = "timestamp" if kind.tz else "timestamp_ntz"
        return value.between(F.expr(f"{zoned}'{FIRST}'"), F.expr(f"{zoned}'{LAST}'"))
    if pa.types.is_list(kind):
        return _all_hold(value, kind.value_type)
    if pa.types.is_map(kind):
        return _all_hold(F.map_values(value), kind.item_type)
    if pa.types.is_struct(kind):
        fields = [(value[field.name], field.type) for field in kind]
        held = [c.isNull() | h for c, t in fields if (h := holds(c, t)) is not None]
        return reduce(and_, held) if held else None
    return None


def _all_hold(values: Column, kind: pa.DataType) -> Column | None:
    # A lambda must return a condition, so whether the type needs one is tested beforehand.
    if holds(F.lit(None), kind) is None:
        return None

    def one(value: Column) -> Column:
        held = holds(value, kind)
        assert held is not None
        return value.isNull() | held

    return F.forall(values, one)


def has_times(kind: pa.DataType) -> bool:
    """Whether a type has times in it."""
    if pa.types.is_struct(kind):
        return any(has_times(field.type) for field in kind)
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        return has_times(kind.value_type if pa.types.is_list(kind) else kind.item_type)
    return bool(pa.types.is_timestamp(kind))


def fields_present(json: Column, names: list[str]) -> Column:
    """Names of the known fields that have a value in a JSON object; none when it is no JSON."""
    as_text = StructType([StructField(name, StringType()) for name in names])
    return F.json_object_keys(F.to_json(F.from_json(json, as_text, STRICT)))
