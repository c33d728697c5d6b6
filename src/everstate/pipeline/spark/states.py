"""States of entities in typed columns: what the model says they are, and what fits it.

A state that does not fit the model is no reason to refuse its record: each value that does not fit
is NULL in the typed columns (a misfit, :mod:`everstate.views.misfits`). A value fits only when it
is read exactly (:mod:`everstate.pipeline.spark.exact`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from everstate.changes import EntityType
from everstate.changes.former import FormerNames
from everstate.changes.moments import FIRST, LAST
from everstate.pipeline.spark.exact import every_part, is_exact, numbers_as_texts, texts_schema
from everstate.pipeline.spark.former import has_clash, one_of, today, with_former

CORRUPT: Final = "_everstate_unreadable"

# JSON as the codec reads it: Spark's defaults are more lenient with quotes and numbers.
STRICT: Final = {
    "mode": "PERMISSIVE",
    "allowSingleQuotes": "false",
    "allowNonNumericNumbers": "false",
    "allowUnquotedFieldNames": "false",
    "allowNumericLeadingZeros": "false",
}
JSON_OPTIONS: Final = {**STRICT, "columnNameOfCorruptRecord": CORRUPT}


def struct(*fields: tuple[str, DataType]) -> StructType:
    """Spark's type of an object with these fields, each of which may be null."""
    return StructType([StructField(name, kind) for name, kind in fields])


HEADERS: Final = ArrayType(struct(("key", StringType()), ("value", BinaryType())))
"""Spark's type of a record's headers."""


def state_schema(entity_type: EntityType) -> StructType:
    """Spark's type of an entity's state, from its Arrow schema; every field nullable."""
    schema = from_arrow_schema(entity_type.read_schema, prefer_timestamp_ntz=True)
    assert isinstance(schema, StructType)
    return schema


def stored_schema(entity_type: EntityType) -> DataType:
    """The same for JSON, with the former names of fields."""
    return with_former(state_schema(entity_type), entity_type.former)


def state_read(message: Column, side: str, entity_type: EntityType) -> Column:
    """A state that is a member of a JSON text: values that do not fit are null."""
    read_as = struct((side, stored_schema(entity_type)), (CORRUPT, StringType()))
    state = F.from_json(message, read_as, JSON_OPTIONS)[side]
    return fitted_state(message, side, state, entity_type, F.lit(True))["state"]


def fitted_state(
    message: Column, side: str, state: Column, entity_type: EntityType, is_complete: Column
) -> Column:
    """A state in which values that do not fit are null, and the names of their fields.

    The names are in an array that also has nulls. ``message``: the JSON text of which the state is
    a member, ``side``; ``state`` has the columns of :func:`stored_schema`. ``is_complete``: whether
    a required field that is missing does not fit.
    """
    former = entity_type.former
    kind = pa.struct(list(entity_type.arrow_schema))
    given = {"json": F.get_json_object(message, f"$.{side}")}
    given |= {"state": state, "complete": is_complete}
    if (schema := texts_schema(kind)) is not None:
        read_as = struct((side, with_former(schema, former)))
        read = F.from_json(numbers_as_texts(message), read_as, STRICT)
        given["texts"] = read[side]
    fitted = _fitted_fields(given, kind, state_schema(entity_type), "", former)
    return F.when(state.isNotNull(), fitted)


def _fitted_fields(
    given: Mapping[str, Column],
    kind: pa.DataType,
    types: StructType,
    path: str,
    former: FormerNames,
) -> Column:
    """``given``: an object's JSON, what Spark read, whether it is complete, and its `texts`.

    Those are what :func:`is_exact` looks at; a type without such parts has none.
    """
    # In a lambda, so that the names in the text are found once for all fields.
    known = [name for field in kind for name in former.names(field.name)]
    present = fields_present(given["json"], known)
    parts = [column.alias(name) for name, column in (*given.items(), ("present", present))]

    def fitted(bound: Column) -> Column:
        values, misfits = [], []
        for field, read in zip(kind, types, strict=True):
            value, names = _fitted_field(bound, field, read.dataType, path, former)
            values.append(value.alias(field.name))
            misfits.append(names)
        return F.struct(F.struct(*values).alias("state"), F.concat(*misfits).alias("misfits"))

    return F.get(F.transform(F.array(F.struct(*parts)), fitted), 0)


def _fitted_field(
    bound: Column, field: pa.Field[Any], kind: DataType, path: str, former: FormerNames
) -> tuple[Column, Column]:
    """A field's value, null when it does not fit, and the names of what does not fit in it."""
    where, named = f"{path}{field.name}", former.names(field.name)
    inside = former.within(field.name)
    values, paths = [bound["state"][name] for name in named], [f"$['{name}']" for name in named]
    stored = one_of(values)
    json = one_of([F.get_json_object(bound["json"], path) for path in paths], may_clash=True)
    are_there = [F.array_contains(bound["present"], name) for name in named]
    is_absent = ~reduce(or_, are_there)
    wrong = [there & value.isNull() for there, value in zip(are_there, values, strict=True)]
    if len(named) > 1:
        wrong.append(~is_absent & stored.isNull())
    texts, written = texts_schema(field.type), None
    if texts is not None:
        written = one_of([bound["texts"][name] for name in named], may_clash=True)
    if not field.nullable:
        wrong.append(is_absent & bound["complete"])
    if isinstance(kind, StructType):
        given = {"json": json, "state": stored, "complete": bound["complete"]}
        given |= {} if written is None else {"texts": written}
        parts = _fitted_fields(given, field.type, kind, f"{where}.", inside)
        inner = F.when(stored.isNotNull(), parts)
        name = F.when(_any(wrong), where)
        of_parts = F.coalesce(inner["misfits"], F.array().cast(ArrayType(StringType())))
        return inner["state"], F.concat(F.array(name), of_parts)
    column = today(stored, kind, inside)
    if (held := holds(column, field.type)) is not None:
        wrong.append(~held)
    if written is not None and texts is not None:
        exact = is_exact(today(written, texts, inside), field.type)
        wrong += [] if exact is None else [~exact]
    if isinstance(kind, (ArrayType, MapType)):
        if inside:
            wrong.append(has_clash(stored, kind, inside))
        whole = struct(("a", with_former(kind, inside)), (CORRUPT, StringType()))
        again = F.from_json(F.concat(F.lit('{"a":'), json, F.lit("}")), whole, JSON_OPTIONS)
        wrong.append(again[CORRUPT].isNotNull())
    is_wrong = _any(wrong)
    return F.when(~is_wrong, column), F.array(F.when(is_wrong, where))


def _any(conditions: list[Column]) -> Column:
    """Whether a condition holds; one that is null does not."""
    return reduce(or_, (F.coalesce(each, F.lit(False)) for each in conditions))


def holds(value: Column, kind: pa.DataType) -> Column | None:
    """Whether every engine can hold a value; ``None``: every value of its type fits.

    Spark reads years that PostgreSQL and Python do not have, and numbers too large for a float.
    """
    return every_part(value, kind, _holds)


def _holds(value: Column, kind: pa.DataType) -> Column | None:
    if pa.types.is_floating(kind):
        return F.abs(value) < float("inf")
    if pa.types.is_date(kind):
        return value.between(F.expr(f"date'{FIRST[:10]}'"), F.expr(f"date'{LAST[:10]}'"))
    if pa.types.is_timestamp(kind):
        zoned = "timestamp" if kind.tz else "timestamp_ntz"
        return value.between(F.expr(f"{zoned}'{FIRST}'"), F.expr(f"{zoned}'{LAST}'"))
    return None


def fields_present(json: Column, names: list[str]) -> Column:
    """Names of the known fields that have a value in a JSON object; none when it is no JSON."""
    as_text = struct(*((name, StringType()) for name in names))
    return F.json_object_keys(F.to_json(F.from_json(json, as_text, STRICT)))
