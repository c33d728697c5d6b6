"""Entity types: a pydantic model registered with a name, a key and a schema version."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from everstate.changes.arrow import Columns
from everstate.errors import InvalidChange, InvalidEntityType

if TYPE_CHECKING:
    import pyarrow as pa

NAME = re.compile(r"^[a-z][a-z0-9_]{0,39}$")

_NUMBERS_MAX = 8
# An escaped NUL that is not itself an escaped backslash followed by "u0000" (C19).
_BACKSLASH = 0x5C
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_AS_ZEROS = bytes.maketrans(b"0123456789", b"0000000000")
_INT64_DIGITS = b"0" * len(str(_INT64_MAX))
_ESCAPED_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")


@dataclass(frozen=True)
class EntityType:
    """A pydantic model with a name, a key and a schema version.

    ``key`` is the name of the field or property whose value, as text, identifies an entity.
    Raises InvalidEntityType when the model has a field that no typed column can hold.
    """

    name: str
    model: type[BaseModel]
    key: str
    schema_version: int = 1
    _columns: Columns = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not NAME.match(self.name):
            raise InvalidEntityType(
                f"entity type name {self.name!r} must match {NAME.pattern}",
                advice="Use lower case words joined by underscores.",
            )
        known = {*self.model.model_fields, *self.model.model_computed_fields}
        if self.key not in known and not hasattr(self.model, self.key):
            raise InvalidEntityType(
                f"{self.name}: key {self.key!r} is no field or property of {self.model.__name__}"
            )
        if self.schema_version < 1:
            raise InvalidEntityType(f"{self.name}: schema_version starts at 1")
        object.__setattr__(self, "_columns", Columns(self.model, self.name))

    @cached_property
    def arrow_schema(self) -> pa.Schema:
        """The typed columns of a state."""
        return self._columns.schema()

    @property
    def field_names(self) -> tuple[str, ...]:
        """Names of the columns, in the order of the model."""
        return self._columns.names

    @property
    def required_fields(self) -> tuple[str, ...]:
        """Columns that a stored state must have and must not be null."""
        return self._columns.required

    @cached_property
    def _number_fields(self) -> tuple[str, ...]:
        return tuple(
            name
            for name, info in self.model.model_fields.items()
            if _holds_numbers(info.annotation, set())
        )

    @cached_property
    def _is_quickly_checked(self) -> bool:
        """Whether the numbers are few and plain: then looking at them is cheaper than at text."""
        plain = {int, float, Decimal, type(None)}
        numbers = [self.model.model_fields[name].annotation for name in self._number_fields]
        return len(numbers) <= _NUMBERS_MAX and all(
            {*(get_args(annotation) or (annotation,))} <= plain for annotation in numbers
        )

    @cached_property
    def _validator(self) -> Callable[[Any], BaseModel]:
        # What model_validate calls, after looking at options that are not used here.
        validate: Callable[[Any], BaseModel] = self.model.__pydantic_validator__.validate_python
        return validate

    @cached_property
    def _to_json(self) -> Callable[..., bytes]:
        to_json = self.model.__pydantic_serializer__.to_json
        if any(info.serialization_alias or info.alias for info in self.model.model_fields.values()):
            return partial(to_json, by_alias=True)
        return to_json

    def key_of(self, entity: BaseModel | Mapping[str, Any]) -> str:
        """Key of an entity as text; raises InvalidChange when it is missing or empty."""
        is_model = entity.__class__ is self.model  # asked first: a check for Mapping is slow
        if is_model or not isinstance(entity, Mapping):
            value = getattr(entity, self.key)
        else:
            value = entity.get(self.key)
        if value is None or value == "":
            raise InvalidChange(self.name, None, self.key, "the key is missing or empty")
        return str(value)

    def validate(self, state: Mapping[str, Any] | BaseModel) -> BaseModel:
        """Make the model from a state; raises InvalidChange naming field and reason."""
        if isinstance(state, self.model):
            return state
        try:
            return self._validator(state)
        except ValidationError as cause:
            raise self._invalid(cause, state) from cause

    def validate_json(self, state: bytes | str) -> BaseModel:
        """Make the model from JSON; raises InvalidChange naming field and reason."""
        try:
            return self.model.model_validate_json(state)
        except ValidationError as cause:
            raise self._invalid(cause, {}) from cause

    def _invalid(self, cause: ValidationError, state: object) -> InvalidChange:
        first = cause.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "state"
        key = state.get(self.key) if isinstance(state, Mapping) else None
        return InvalidChange(self.name, None if key is None else str(key), where, first["msg"])

    def encode(self, entity: BaseModel) -> bytes:
        """JSON of an entity's state, UTF-8.

        Raises InvalidChange for NaN and infinities (JSON writers turn them to null silently), for
        integers beyond 64 bits, which no column holds, and for NUL characters, which PostgreSQL's
        text cannot hold. Cost: one pass in Rust; numbers are looked at where the text may hold
        such a one.
        """
        try:
            encoded = self._to_json(entity)
        except PydanticSerializationError as cause:
            raise InvalidChange(
                self.name, str(getattr(entity, self.key, None)), "state", str(cause)
            ) from cause
        if self._number_fields and (self._is_quickly_checked or _may_hold_unstorable(encoded)):
            self._check_numbers(entity)
        # One byte is found ten times faster than six; few states hold a backslash at all.
        if _BACKSLASH in encoded and holds_nul(encoded):
            raise InvalidChange(
                self.name, str(getattr(entity, self.key)), "state", "NUL characters are refused"
            )
        return encoded

    def _check_numbers(self, entity: BaseModel) -> None:
        fields = entity.__dict__
        for name in self._number_fields:
            value = fields.get(name)
            if value is not None and not _storable(value):
                raise InvalidChange(
                    self.name,
                    str(getattr(entity, self.key)),
                    name,
                    "NaN, infinity and integers beyond 64 bits are refused",
                )


def holds_nul(encoded: bytes) -> bool:
    """Whether JSON text has an escaped NUL character (the only way JSON can hold one)."""
    return _ESCAPED_NUL.search(encoded) is not None


def _holds_numbers(annotation: Any, seen: set[type]) -> bool:
    """Whether a value of this annotation may hold a number at any depth."""
    if annotation in (int, float, Decimal):
        return True
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if annotation in seen:
            return False
        seen.add(annotation)
        return any(_holds_numbers(i.annotation, seen) for i in annotation.model_fields.values())
    return any(_holds_numbers(part, seen) for part in get_args(annotation))


def _may_hold_unstorable(encoded: bytes) -> bool:
    """Whether JSON text may come from a number that :func:`_storable` refuses.

    A float that is not finite is ``null`` by default; a decimal, or a float of a model that is
    configured so, is a word. A tenth of the cost of walking through the values.
    """
    return (
        b"null" in encoded
        or b"NaN" in encoded
        or b"Infinity" in encoded
        or _INT64_DIGITS in encoded.translate(_AS_ZEROS)
    )


def _storable(value: Any) -> bool:
    """Whether a typed column can hold every number of a value."""
    kind = value.__class__
    if kind is int:
        return bool(_INT64_MIN <= value <= _INT64_MAX)
    if kind is str:
        return True
    if kind is Decimal:
        return bool(value.is_finite())
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, BaseModel):
        return all(_storable(part) for part in value.__dict__.values())
    if isinstance(value, Mapping):
        return all(_storable(part) for part in value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(_storable(part) for part in value)
    return True
