"""Filters of a list: attributes of the model, with their values in JSON form."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

from pydantic import TypeAdapter, ValidationError

from everstate.changes import EntityType
from everstate.changes.fields import FieldTree, tree_of
from everstate.changes.quoting import unquoted
from everstate.changes.written import written_value
from everstate.errors import InvalidQuery
from everstate.sources.stores.store import Scalar

# Not times: their JSON texts differ where the values are equal.
_SCALARS: Final = ("text", "integer", "float", "boolean", "decimal", "date")
_READ_AS: Final = {
    bool: "boolean",
    int: "whole",
    float: "float8",
    Decimal: "numeric",
    date: "date",
    UUID: "uuid",
}
"""Types whose values pydantic also reads from texts of other values, or rounds."""
RESERVED: Final = frozenset({"limit", "cursor"})
"""Names of a list's own parameters; a filter by an attribute with such a name has the prefix."""
_PREFIX: Final = "state."
"""An attribute may be written with it: it is where the attribute is in the answer."""


class Filters:
    """The filters for a list of one entity type: equality on its scalar fields."""

    def __init__(self, entity_type: EntityType) -> None:
        self._entity = entity_type.name
        self._fields = {
            each.written: each
            for each in tree_of(entity_type.model).fields
            if each.tree.type in _SCALARS
        }
        self._adapters = {name: TypeAdapter(each.declared) for name, each in self._fields.items()}

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
        field = self._fields[name]
        given = unquoted(value, takes_null=field.takes_null)
        try:
            if given is None:
                return None
            if (cast := _read_as(field.tree)) is not None:
                written_value(cast, given.strip())
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


def _read_as(tree: FieldTree) -> str | None:
    """How the texts of a field's values are read exactly; ``None``: only its own type reads them.

    A field that converts what is given says itself what a text means.
    """
    kind = tree.annotation
    if tree.has_own_rules or not isinstance(kind, type):
        return None
    return next((cast for plain, cast in _READ_AS.items() if issubclass(kind, plain)), None)
