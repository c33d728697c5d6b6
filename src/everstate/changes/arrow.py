"""The Arrow schema of an entity type, derived from its pydantic model.

Spark's schema and the archive's typed columns come from this one schema.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from uuid import UUID

import pyarrow as pa
from pydantic import AwareDatetime, BaseModel, NaiveDatetime
from pydantic.fields import FieldInfo

from everstate.errors import InvalidEntityType

_SCALARS: dict[Any, pa.DataType] = {
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    UUID: pa.string(),
    date: pa.date32(),
    datetime: pa.timestamp("us", tz="UTC"),
    AwareDatetime: pa.timestamp("us", tz="UTC"),
    NaiveDatetime: pa.timestamp("us"),
}


def arrow_schema(model: type[BaseModel], entity: str) -> pa.Schema:
    """Arrow schema of a model's JSON form, one column a field, in the model's order.

    A field that may be missing or None is nullable. Raises InvalidEntityType naming model, field
    and the nearest supported type.
    """
    return pa.schema(_fields(model, entity, ()))


def _fields(model: type[BaseModel], entity: str, parents: tuple[type, ...]) -> list[pa.Field[Any]]:
    if model in parents:
        raise InvalidEntityType(
            f"{entity}: {model.__name__} contains itself; a column type must be finite"
        )
    columns = []
    for name, info in model.model_fields.items():
        where = f"{entity}: {model.__name__}.{name}"
        kind, nullable = _type(info.annotation, info, where, entity, (*parents, model))
        columns.append(pa.field(info.serialization_alias or info.alias or name, kind, nullable))
    for name, computed in model.model_computed_fields.items():
        where = f"{entity}: {model.__name__}.{name}"
        kind, _ = _type(computed.return_type, None, where, entity, (*parents, model))
        columns.append(pa.field(computed.alias or name, kind, nullable=True))
    if not columns:
        raise InvalidEntityType(f"{entity}: {model.__name__} has no fields")
    return columns


def _type(
    annotation: Any,
    info: FieldInfo | None,
    where: str,
    entity: str,
    parents: tuple[type, ...],
) -> tuple[pa.DataType, bool]:
    """Arrow type of an annotation, and whether it may be null."""
    if annotation in _SCALARS:
        return _SCALARS[annotation], False
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(parts[0], FieldInfo.from_annotation(annotation), where, entity, parents)
    if origin in (Union, types.UnionType):
        members = [part for part in parts if part is not type(None)]
        if len(members) != 1:
            raise _unsupported(where, annotation, "one type, or one type | None")
        kind, _ = _type(members[0], info, where, entity, parents)
        return kind, True
    if annotation is Decimal:
        return _decimal(info, where), False
    if origin is Literal:
        return _literal(parts, where), False
    if isinstance(annotation, type):
        if issubclass(annotation, Enum):
            return _literal(tuple(member.value for member in annotation), where), False
        if issubclass(annotation, BaseModel):
            return pa.struct(_fields(annotation, entity, parents)), False
        for plain in (str, int, float):
            if issubclass(annotation, plain):
                return _SCALARS[plain], False
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if parts[0] is not str:
            raise _unsupported(where, annotation, "dict[str, …]: JSON keys are text")
        kind, _ = _type(parts[1], None, where, entity, parents)
        return pa.map_(pa.string(), kind), False
    if isinstance(origin, type) and issubclass(origin, (Sequence, AbstractSet)):
        inner = tuple(part for part in parts if part is not Ellipsis)
        if len(inner) != 1:
            raise _unsupported(where, annotation, "list[…] of one type, or a nested model")
        kind, nullable = _type(inner[0], None, where, entity, parents)
        return pa.list_(pa.field("element", kind, nullable)), False
    raise _unsupported(
        where,
        annotation,
        "bool, int, float, str, Decimal, date, datetime, UUID, Enum, Literal, a model, list, dict",
    )


def _decimal(info: FieldInfo | None, where: str) -> pa.DataType:
    digits = places = None
    for constraint in info.metadata if info else ():
        digits = getattr(constraint, "max_digits", None) or digits
        declared = getattr(constraint, "decimal_places", None)
        places = declared if declared is not None else places
    if digits is None or places is None or digits > 38:
        raise InvalidEntityType(
            f"{where}: a Decimal needs max_digits (at most 38) and decimal_places",
            advice="Write Annotated[Decimal, Field(max_digits=12, decimal_places=2)].",
        )
    return pa.decimal128(digits, places)


def _literal(values: tuple[Any, ...], where: str) -> pa.DataType:
    kinds = {type(value) for value in values}
    if len(kinds) == 1 and (kind := kinds.pop()) in (str, int, bool):
        return _SCALARS[kind]
    raise InvalidEntityType(f"{where}: the values {values!r} are not all text, int or bool")


def _unsupported(where: str, annotation: Any, expected: str) -> InvalidEntityType:
    return InvalidEntityType(
        f"{where}: {annotation!r} has no column type.", advice=f"Use {expected}."
    )
