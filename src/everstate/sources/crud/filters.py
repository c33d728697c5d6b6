"""Filters of a list: attributes of the model, with their values in JSON form."""

from __future__ import annotations

import types
from collections.abc import Iterable
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin
from uuid import UUID

from pydantic import (
    BeforeValidator,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    WrapValidator,
)
from pydantic.fields import FieldInfo

from everstate.changes import EntityType
from everstate.changes.names import written_name
from everstate.changes.quoting import unquoted
from everstate.changes.written import written_value
from everstate.errors import InvalidQuery
from everstate.sources.stores.store import Scalar

# Not times: their JSON texts differ where the values are equal.
_SCALARS: Final = (str, int, float, bool, Decimal, date, UUID, Enum)
_READ_AS: Final = {
    bool: "boolean",
    int: "whole",
    float: "float8",
    Decimal: "numeric",
    date: "date",
    UUID: "uuid",
}
"""Types whose values pydantic also reads from texts of other values, or rounds."""
_CONVERTING: Final = (BeforeValidator, PlainValidator, WrapValidator)
RESERVED: Final = frozenset({"limit", "cursor"})
"""Names of a list's own parameters; a filter by an attribute with such a name has the prefix."""
_PREFIX: Final = "state."
"""An attribute may be written with it: it is where the attribute is in the answer."""


class Filters:
    """The filters for a list of one entity type: equality on its scalar fields."""

    def __init__(self, entity_type: EntityType) -> None:
        self._entity = entity_type.name
        self._adapters: dict[str, TypeAdapter[Any]] = {}
        self._read_as: dict[str, str] = {}
        for name, info in entity_type.model.model_fields.items():
            shown = written_name(name, info)
            if _is_scalar(info.annotation):
                self._adapters[shown] = _adapter(info)
                read_as = _read_as(info.annotation, info.metadata)
                if read_as is not None:
                    self._read_as[shown] = read_as

    @property
    def names(self) -> tuple[str, ...]:
        """Names of filters, in the order of the model's attributes."""
        return tuple(f"{_PREFIX}{each}" if each in RESERVED else each for each in self._adapters)

    def schema(self, name: str) -> dict[str, Any]:
        """JSON schema of a filter's values."""
        return self._adapters[self._attribute(name)].json_schema()

    def _attribute(self, name: str) -> str:
        return name if name in self._adapters else name.removeprefix(_PREFIX)

    def parse(self, parameters: Iterable[tuple[str, str]]) -> dict[str, Scalar]:
        """Values by attribute; `null` is null where the field may be null, and `"null"` is a text.

        Raises InvalidQuery naming the attribute, and those that can be filters.
        """
        found: dict[str, Scalar] = {}
        for given, value in parameters:
            if given in RESERVED:
                continue
            name = self._attribute(given)
            if name not in self._adapters:
                known = ", ".join(self.names)
                raise InvalidQuery(
                    f"{self._entity} cannot be filtered by {given!r} ({known}).",
                    advice=f"GET /query/v1/{self._entity}?where=… also compares times and "
                    "nested fields.",
                )
            if name in found:
                raise InvalidQuery(f"{name} is given twice.")
            found[name] = self._value(name, value)
        return found

    def _value(self, name: str, value: str) -> Scalar:
        adapter = self._adapters[name]
        if "\x00" in value:
            raise InvalidQuery(f"{name}: NUL characters are refused.")
        given = unquoted(value, takes_null=_nullable(adapter))
        try:
            if given is None:
                return None
            if name in self._read_as:
                written_value(self._read_as[name], given.strip())
            parsed = adapter.validate_strings(given)
            wanted: Scalar = parsed
            if not isinstance(parsed, Decimal):
                wanted = adapter.dump_python(parsed, mode="json")
        except ValidationError as cause:
            first = cause.errors(include_url=False)[0]
            raise InvalidQuery(f"{name} is {value!r}: {first['msg']}.") from cause
        except ValueError as cause:
            raise InvalidQuery(f"{name} is {value!r}.", advice=str(cause)) from cause
        if isinstance(wanted, float | Decimal) and not Decimal(wanted).is_finite():
            raise InvalidQuery(f"{name} is {value!r}; NaN and infinity are refused.")
        return wanted


def _adapter(info: FieldInfo) -> TypeAdapter[Any]:
    """The field's type with its constraints."""
    annotation: Any = info.annotation
    return TypeAdapter(Annotated[annotation, *info.metadata] if info.metadata else annotation)


def _nullable(adapter: TypeAdapter[Any]) -> bool:
    try:
        adapter.validate_python(None)
    except ValidationError:
        return False
    return True


def _read_as(annotation: Any, metadata: Iterable[Any]) -> str | None:
    """How the texts of a field's values are read exactly; ``None``: only its own type reads them.

    A field that converts what is given says itself what a text means.
    """
    if any(isinstance(each, _CONVERTING) for each in metadata):
        return None
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return _read_as(inner, more)
    if (part := _optional(annotation)) is not None:
        return _read_as(part, ())
    if not isinstance(annotation, type):
        return None
    return next((cast for kind, cast in _READ_AS.items() if issubclass(annotation, kind)), None)


def _optional(annotation: Any) -> Any:
    """The type that may be None here; ``None``: there is none, or several."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return None
    parts = [part for part in get_args(annotation) if part is not type(None)]
    return parts[0] if len(parts) == 1 else None


def _is_scalar(annotation: Any) -> bool:
    if get_origin(annotation) is Literal:
        return True
    if get_origin(annotation) is Annotated:
        return _is_scalar(get_args(annotation)[0])
    if (part := _optional(annotation)) is not None:
        return _is_scalar(part)
    if not isinstance(annotation, type) or issubclass(annotation, datetime):
        return False
    return issubclass(annotation, _SCALARS)
