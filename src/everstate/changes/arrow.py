"""The Arrow schema of an entity type, derived from its pydantic model.

Spark's schema and the archive's typed columns come from this one schema. A model is checked when it
is declared, but the Arrow schema is built at its first use: importing Arrow takes half a second,
which a process that only writes or sends changes does not need to spend.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from ipaddress import IPv4Address, IPv6Address
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin
from uuid import UUID

from pydantic import (
    AnyUrl,
    AwareDatetime,
    BaseModel,
    EmailStr,
    FutureDate,
    FutureDatetime,
    IPvAnyAddress,
    NaiveDatetime,
    RootModel,
)
from pydantic.fields import FieldInfo

from everstate.changes.annotations import meant
from everstate.changes.keys import column_fault
from everstate.changes.names import unread_name, written_name
from everstate.errors import InvalidEntityType

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class _Kind:
    """An Arrow type: the name of the pyarrow function that makes it, and its arguments."""

    function: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class _Column:
    """A field of an Arrow schema, struct or list."""

    name: str
    kind: _Kind
    nullable: bool


_TEXT = _Kind("string")
_UTC = _Kind("timestamp", ("us", "UTC"))
_FREE = (Any, object, dict, list, tuple, set, frozenset, Mapping, Sequence)
"""Annotations that do not name the type of their values, so that no column type follows."""
_TEXTS = (AnyUrl, EmailStr, IPv4Address, IPv6Address, IPvAnyAddress)
_FUTURE = (FutureDate, FutureDatetime)
_BITS = 2**63
_TEXT_FORMS = {"ser_json_temporal": "iso8601"}
"""Settings of pydantic for the JSON of a value that a column may have, with the form it reads."""
_SCALARS: dict[Any, _Kind] = {
    bool: _Kind("bool_"),
    int: _Kind("int64"),
    float: _Kind("float64"),
    str: _TEXT,
    UUID: _TEXT,
    date: _Kind("date32"),
    datetime: _UTC,
    AwareDatetime: _UTC,
    NaiveDatetime: _Kind("timestamp", ("us",)),
}


class Columns:
    """The columns of a model's JSON form, one for each field, in the model's order.

    A field that may be None, or has a default, is nullable. Raises InvalidEntityType naming model,
    field and the nearest supported type.
    """

    def __init__(self, model: type[BaseModel], entity: str) -> None:
        self._found = _columns(model, entity, ())

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(column.name for column in self._found)

    @property
    def required(self) -> tuple[str, ...]:
        """Names of the columns that may not be null."""
        return tuple(column.name for column in self._found if not column.nullable)

    def shape(self) -> dict[str, Any]:
        """The JSON type of each column, for a validator that has neither Python nor Arrow."""
        return {"type": "struct", "fields": {each.name: _shape(each) for each in self._found}}

    def schema(self) -> pa.Schema:
        """The Arrow schema of these columns."""
        import pyarrow

        return pyarrow.schema(_made(self._found, pyarrow))


_SHAPES = {
    "string": "text",
    "int64": "integer",
    "float64": "float",
    "bool_": "boolean",
    "date32": "date",
    "timestamp": "timestamp",
    "decimal128": "decimal",
    "struct": "struct",
    "list_": "list",
    "map_": "map",
}


def _shape(column: _Column) -> dict[str, Any]:
    """JSON type of a column, and of its parts."""
    kind, arguments = _SHAPES[column.kind.function], column.kind.arguments
    shape: dict[str, Any] = {"type": kind, "required": not column.nullable}
    if kind == "decimal":
        shape |= {"digits": arguments[0], "places": arguments[1]}
    elif kind == "timestamp":
        shape["zoned"] = len(arguments) > 1
    elif kind == "struct":
        shape["fields"] = {each.name: _shape(each) for each in arguments[0]}
    elif kind == "list":
        shape["element"] = _shape(_Column("element", arguments[0].kind, True))
    elif kind == "map":
        shape["element"] = _shape(_Column("element", arguments[1], True))
    return shape


def _made(what: Any, pyarrow: ModuleType) -> Any:
    """Make the pyarrow object that ``what`` describes; any other value is returned unchanged."""
    if isinstance(what, _Kind):
        return getattr(pyarrow, what.function)(*(_made(each, pyarrow) for each in what.arguments))
    if isinstance(what, _Column):
        return pyarrow.field(what.name, _made(what.kind, pyarrow), what.nullable)
    if isinstance(what, tuple):
        return [_made(each, pyarrow) for each in what]
    return what


def _columns(model: type[BaseModel], entity: str, parents: tuple[Any, ...]) -> tuple[_Column, ...]:
    if model in parents:
        raise _infinite(model, entity)
    if issubclass(model, RootModel):
        raise InvalidEntityType(
            f"{entity}: {model.__name__} is a RootModel, and a state is an object",
            advice="Use a model with fields; one of them may be a RootModel.",
        )
    _check_texts(model, entity)
    columns = []
    for name, info in model.model_fields.items():
        where = f"{entity}: {model.__name__}.{name}"
        kind, nullable = _type(info.annotation, info, where, entity, (*parents, model))
        nullable |= not info.is_required()  # states from before the field was added lack it
        if unread := unread_name(model, name):
            raise InvalidEntityType(
                f"{where} is written as {unread!r}, and the model does not read this name",
                advice=f"Write Field(alias={unread!r}), or name {unread!r} among the names that are"
                " read: validation_alias=AliasChoices(…).",
            )
        columns.append(_Column(written_name(name, info), kind, nullable))
    for name, computed in model.model_computed_fields.items():
        where = f"{entity}: {model.__name__}.{name}"
        kind, _ = _type(computed.return_type, None, where, entity, (*parents, model))
        columns.append(_Column(computed.alias or name, kind, nullable=True))
    if not columns:
        raise InvalidEntityType(f"{entity}: {model.__name__} has no fields")
    for column in columns:
        if fault := column_fault(column.name, is_inner=bool(parents)):
            raise InvalidEntityType(
                f"{entity}: {model.__name__}: the name {column.name!r} {fault}.",
                advice="Give the field another name, or another alias.",
            )
    alike = Counter(column.name.lower() for column in columns)
    twice = [column.name for column in columns if alike[column.name.lower()] > 1]
    if twice:
        raise InvalidEntityType(
            f"{entity}: the fields {', '.join(twice)} of {model.__name__} have one name in SQL",
            advice="Give one of them another name, or an alias.",
        )
    return tuple(columns)


def _type(
    annotation: Any,
    info: FieldInfo | None,
    where: str,
    entity: str,
    parents: tuple[Any, ...],
) -> tuple[_Kind, bool]:
    """Arrow type of an annotation, and whether it may be null."""
    named, annotation = annotation, meant(annotation)
    if named is not annotation:
        if named in parents:
            raise _infinite(named, entity)
        parents = (*parents, named)
    if annotation in _SCALARS:
        return _SCALARS[annotation], False
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation in _FREE or (origin is not None and not parts):
        raise _unsupported(
            where,
            annotation,
            "dict[str, …] or list[…] with one type for all values, or a model with these fields. "
            "JSON of any form is kept as its text: str",
        )
    if origin is Annotated:
        return _type(parts[0], FieldInfo.from_annotation(annotation), where, entity, parents)
    if origin in (Union, types.UnionType):
        members = [part for part in parts if part is not type(None)]
        if len(members) != 1:
            raise _unsupported(where, annotation, "one type, or one type | None")
        kind, _ = _type(members[0], info, where, entity, parents)
        return kind, True
    if annotation in _FUTURE:
        raise _unsupported(where, annotation, "date or datetime: no date stays in the future")
    if annotation is Decimal:
        return _decimal(info, where), False
    if origin is Literal:
        return _literal(parts, where), False
    if isinstance(annotation, type):
        if issubclass(annotation, Enum):
            return _literal(tuple(member.value for member in annotation), where), False
        if issubclass(annotation, RootModel):
            if annotation in parents:
                raise _infinite(annotation, entity)
            _check_texts(annotation, entity)
            root = annotation.model_fields["root"]
            return _type(root.annotation, root, where, entity, (*parents, annotation))
        if issubclass(annotation, BaseModel):
            return _Kind("struct", (_columns(annotation, entity, parents),)), False
        if issubclass(annotation, _TEXTS):
            return _TEXT, False
        for plain in (str, int, float):
            if issubclass(annotation, plain):
                return _SCALARS[plain], False
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if parts[0] is not str:
            raise _unsupported(where, annotation, "dict[str, …]: JSON keys are text")
        kind, _ = _type(parts[1], None, where, entity, parents)
        return _Kind("map_", (_TEXT, kind)), False
    if isinstance(origin, type) and issubclass(origin, (Sequence, AbstractSet)):
        inner = tuple(part for part in parts if part is not Ellipsis)
        if len(inner) != 1:
            raise _unsupported(where, annotation, "list[…] of one type, or a nested model")
        kind, nullable = _type(inner[0], None, where, entity, parents)
        return _Kind("list_", (_Column("element", kind, nullable),)), False
    raise _unsupported(
        where,
        annotation,
        "bool, int, float, str, Decimal, date, datetime, UUID, Enum, Literal, a URL, EmailStr, an "
        "IP address, a model, list[…] or dict[str, …]",
    )


def _check_texts(model: type[BaseModel], entity: str) -> None:
    """Raise InvalidEntityType for a model that writes values in a form that columns do not read."""
    for setting, form in _TEXT_FORMS.items():
        given = model.model_config.get(setting, form)
        if given != form:
            raise InvalidEntityType(
                f"{entity}: {model.__name__} has {setting}={given!r}; typed columns read {form!r}",
                advice=f"Leave {setting} out of the model's config.",
            )


def _infinite(model: Any, entity: str) -> InvalidEntityType:
    return InvalidEntityType(
        f"{entity}: {model.__name__} contains itself; a column type must be finite"
    )


def _decimal(info: FieldInfo | None, where: str) -> _Kind:
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
    return _Kind("decimal128", (digits, places))


def _literal(values: tuple[Any, ...], where: str) -> _Kind:
    kinds = {type(value) for value in values}
    if any(not -_BITS <= value < _BITS for value in values if isinstance(value, int)):
        raise InvalidEntityType(
            f"{where}: some of the values {values!r} are beyond 64 bits",
            advice="Write the values as text.",
        )
    if len(kinds) == 1 and (kind := kinds.pop()) in (str, int, bool):
        return _SCALARS[kind]
    raise InvalidEntityType(f"{where}: the values {values!r} are not all text, int or bool")


def _unsupported(where: str, annotation: Any, expected: str) -> InvalidEntityType:
    return InvalidEntityType(
        f"{where}: {annotation!r} has no column type.", advice=f"Use {expected}."
    )
