"""Entity types: a pydantic model registered with a name, a key and a schema version."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticSerializationError

from everstate.changes.accepting import NotAccepted, accept, read_exactly, read_row, read_values
from everstate.changes.arrow import arrow_schema, check_columns, shapes
from everstate.changes.carrying import Ambiguous, carried, place_of
from everstate.changes.depth import TOO_DEEP, is_too_deep
from everstate.changes.equality import has_equal_values
from everstate.changes.fields import FieldType, ModelField, ValuePath, has_rule, tree_of
from everstate.changes.former import CLASH, FormerNames, OnClash, former_of
from everstate.changes.keys import NAME, OwnKey, key_text
from everstate.changes.moments import OUT_OF_RANGE, holds_offset
from everstate.changes.read_back import ReadBack
from everstate.changes.values import (
    UNSTORABLE,
    all_with_minutes,
    has_kept_times,
    in_order,
    may_hold_unstorable,
    storable,
)
from everstate.errors import InvalidChange, InvalidEntityType

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")
_NUMBERS: Final[tuple[FieldType, ...]] = ("integer", "float", "decimal")
_NUMBERS_MAX = 8
EntityOrigin = Literal["given", "made", "stored"]
"""Where an entity comes from: a writer, a state that was read a moment ago, or a store."""
NO_KEYS = frozenset({"float", "struct", "list", "map"})
"""JSON types of fields that cannot name an entity."""
_Test: TypeAlias = Callable[[Any], bool]
# An escaped NUL that is not itself an escaped backslash followed by "u0000" (C19).
_BACKSLASH, _NUL = 0x5C, b"\\u0000"
_ESCAPED_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")


@dataclass(frozen=True)
class EntityType:
    """A pydantic model with a name, a key and a schema version.

    ``key`` is the name of the field or property whose value, as text, identifies an entity.
    ``removed`` are fields that the model had once, as `note` or `lines.note`: a write drops them
    from the state that it replaces, where it keeps every other field that the model does not have.
    Raises InvalidEntityType when the model has a field that no typed column can hold.
    """

    name: str
    model: type[BaseModel]
    key: str
    schema_version: int = 1
    removed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
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
        check_columns(self.model, self.name)
        try:
            place_of(self.model, self.removed)
        except ValueError as cause:
            raise InvalidEntityType(
                f"{self.name}: `removed` names {str(cause)!r}, which is no former field of a model",
                advice="Name fields that the model had and no longer has, as `note` or `lines.note`"
                " for one of a nested model.",
            ) from cause
        if (own := self.own_key) is not None and own.type in NO_KEYS:
            raise InvalidEntityType(
                f"{self.name}: the key {self.key!r} is a {own.type}, which has no one text",
                advice="Use a field that is text, a whole number, a Decimal, a time or a UUID.",
            )

    @property
    def key_column(self) -> str:
        """Name of the key in a state's JSON; a property may have no column."""
        fields = tree_of(self.model).fields
        return next((each.written for each in fields if each.name == self.key), self.key)

    @property
    def own_key(self) -> OwnKey | None:
        """How a state's key is read from its JSON; ``None``: states do not have it."""
        found = self.shape["fields"].get(self.key_column)
        return None if found is None else OwnKey(self.key_column, found["type"])

    @property
    def columns(self) -> Sequence[ModelField]:
        """The fields and computed fields of the model, which are the columns of a state."""
        return tree_of(self.model).columns

    @cached_property
    def arrow_schema(self) -> pa.Schema:
        """The typed columns of a state."""
        return arrow_schema(tree_of(self.model))

    @cached_property
    def read_schema(self) -> pa.Schema:
        """The same for readers: every part may be null, as messages may lack any field."""
        return arrow_schema(tree_of(self.model), is_read=True)

    @property
    def field_names(self) -> tuple[str, ...]:
        """Names of the columns, in the order of the model."""
        return tuple(each.written for each in self.columns)

    @property
    def shape(self) -> dict[str, Any]:
        """The JSON type of a state, for a validator that has neither Python nor Arrow."""
        return {"type": "struct", "fields": shapes(self.columns)}

    @property
    def required_fields(self) -> tuple[str, ...]:
        """Columns that a stored state must have and must not be null."""
        return tuple(each.written for each in self.columns if each.is_required)

    @cached_property
    def _number_fields(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.columns if each.tree.holds(*_NUMBERS))

    @cached_property
    def _may_hold_times(self) -> bool:
        return tree_of(self.model).holds("timestamp")

    @cached_property
    def _is_quickly_checked(self) -> bool:
        """Whether numbers are in few plain fields: checking these is cheaper than the text."""
        numbers = [each for each in self.columns if each.name in self._number_fields]
        are_plain = all(each.info and each.tree.type in _NUMBERS for each in numbers)
        return len(numbers) <= _NUMBERS_MAX and are_plain

    @cached_property
    def _may_hold_sets(self) -> bool:
        parts = tree_of(self.model).walk(computed=True)
        return any(each.is_set or each.keeps_unknown for each in parts)

    @cached_property
    def _read_back(self) -> ReadBack:
        return ReadBack(self.model)

    @cached_property
    def _to_json(self) -> Callable[..., bytes]:
        # What a warning would say is an error of ReadBack, or harmless.
        return partial(self.model.__pydantic_serializer__.to_json, by_alias=True, warnings=False)

    def key_of(self, entity: BaseModel | Mapping[str, Any]) -> str:
        """Key of an entity as text; raises InvalidChange when it is missing or empty."""
        is_model = entity.__class__ is self.model  # asked first: a check for Mapping is slow
        if is_model or not isinstance(entity, Mapping):
            value = getattr(entity, self.key)
        else:
            value = entity.get(self.key)
        if value is None or value == "":
            raise InvalidChange(self.name, None, self.key, "the key is missing or empty")
        return value if value.__class__ is str else key_text(value)

    def validate(self, state: Mapping[str, Any] | BaseModel) -> BaseModel:
        """Make the model from a state of the log; raises InvalidChange naming field and reason.

        Former names are read as today's; a field whose names have different values is refused.
        Fields that the model does not have are dropped: an older model may have had them.
        """
        return state if isinstance(state, self.model) else self._made(read_values, state)

    def validate_exactly(self, state: Mapping[str, Any]) -> BaseModel:
        """As :meth:`validate`, but a value that the model's reader would change is refused too."""
        return self._made(read_row, state)

    def accept(self, state: Mapping[str, Any] | BaseModel) -> BaseModel:
        """Make the model from what a writer gives; raises InvalidChange naming field and reason.

        See :mod:`everstate.changes.accepting`.
        """
        if isinstance(state, self.model):
            return state
        return self._made(accept if isinstance(state, Mapping) else read_values, state)

    def validate_json(self, state: bytes | str) -> BaseModel:
        """Make the model from a stored state; raises InvalidChange naming field and reason."""
        try:
            return self._made(read_exactly, state)
        except ValueError as cause:
            raise InvalidChange(self.name, None, "state", str(cause)) from cause

    def _made(self, make: Callable[[type[BaseModel], Any], BaseModel], state: Any) -> BaseModel:
        try:
            return make(self.model, self.today(state, self._refuse))
        except (ValidationError, NotAccepted) as cause:
            if isinstance(cause, ValidationError):
                refused = NotAccepted(self.model, cause.errors(include_url=False))
            else:
                refused = cause
            key = state.get(self.key) if isinstance(state, Mapping) else None
            named = None if key is None else str(key)
            raise InvalidChange(self.name, named, *refused.problems("state")[0]) from cause

    def _refuse(self, at: ValuePath) -> None:
        error: ErrorDetails = {"type": "value_error", "loc": at, "msg": CLASH, "input": None}
        raise NotAccepted(self.model, [error])

    @cached_property
    def former(self) -> FormerNames:
        """The former names of its fields."""
        return former_of(self.model)

    def today(self, state: T, on_clash: OnClash | None = None) -> T:
        """A state, decoded or as JSON text, with today's names of its fields.

        See :meth:`FormerNames.of_state`.
        """
        return self.former.of_state(state, on_clash)

    def names_to(self, path: Sequence[str]) -> list[tuple[str, ...]]:
        """For each field on the way to one its names, today's first; lists on the way have none."""
        found, at = list[tuple[str, ...]](), self.former
        for part in path:
            at = at.element or at
            found.append(at.names(part))
            at = at.within(part)
        return found

    def restated(self, text: bytes) -> bytes:
        """A stored state as the model writes it, if it has former names that the model reads."""
        try:
            today = self.today(text)
            return text if today is text else self.encode(self.validate_json(today), "stored")
        except (InvalidChange, ValueError):
            return text

    def is_equal(self, one: str | None, other: str | None) -> bool:
        """Whether the JSON of two states has equal values; see :mod:`everstate.changes.equality`.

        ``None``: the entity does not exist.
        """
        if one == other or one is None or other is None or not self.has_many_texts:
            return one == other
        return has_equal_values(tree_of(self.model), *map(self.today, (one, other)))

    def carry(self, key: str, before: str | bytes, state: bytes) -> bytes:
        """The JSON of a state with the fields of the state before that the model does not have.

        Every writer over a stored state calls it; see :mod:`everstate.changes.carrying`. Raises
        InvalidChange when a list's new elements do not tell which of them has such fields.
        """
        try:
            return carried(self.model, self.removed, self.today(before), state)
        except Ambiguous as cause:
            raise InvalidChange(self.name, key, cause.field, str(cause)) from cause

    @cached_property
    def has_many_texts(self) -> bool:
        """Whether equal states may have different JSON: by decimals, times or former names."""
        return bool(self.former) or has_rule(self.model, "decimal", "timestamp")

    def encode(self, entity: BaseModel, origin: EntityOrigin = "given") -> bytes:
        """JSON of an entity's state, UTF-8; an equal entity has the same in every process.

        Raises InvalidChange for NaN and infinities (JSON writers turn them to null silently), for
        integers beyond 64 bits, which no column holds, for times outside the years 1 to 9999 in
        UTC, for NUL characters, which PostgreSQL's text cannot hold, for values that are nested
        too deeply, and where the model would not read the JSON as this entity
        (:mod:`everstate.changes.read_back`). A time whose UTC offset has seconds is written in UTC.

        ``origin``: an entity that was ``given`` may have been changed after it was made. One that
        the model has just ``made`` of a state is read back only if the model has code of its own,
        and one that was ``stored`` is not. Cost: one pass in Rust, and about 5 µs to read it back;
        numbers and times are checked only where the text may hold a bad one.
        """
        encoded = self._encoded(entity)
        if origin == "given" or (origin == "made" and self._read_back.has_own_code):
            if (fault := self._read_back.fault(entity, encoded)) is not None:
                raise self._refusal(entity, *fault)
        return encoded

    def _refusal(self, entity: BaseModel, field: str, reason: str) -> InvalidChange:
        return InvalidChange(self.name, str(getattr(entity, self.key, None)), field, reason)

    def _encoded(self, entity: BaseModel) -> bytes:
        try:
            encoded = self._to_json(entity)
        except PydanticSerializationError as cause:
            raise self._refusal(entity, "state", str(cause)) from cause
        if self._is_quickly_checked or may_hold_unstorable(encoded):
            self._check(entity, self._number_fields, storable, UNSTORABLE)
        if is_too_deep(encoded):
            raise self._refusal(entity, "state", TOO_DEEP)
        if self._may_hold_times and holds_offset(encoded):
            try:
                exact = all_with_minutes(entity)
            except (TypeError, ValueError) as cause:
                raise self._refusal(entity, "state", str(cause)) from cause
            if exact is not entity:
                return self._encoded(exact)
        if self._may_hold_sets:
            encoded = in_order(entity, encoded)
        if self._may_hold_times and (b"0001-01-01T" in encoded or b"9999-12-31T" in encoded):
            names = [each.name for each in self.columns]
            self._check(entity, names, has_kept_times, OUT_OF_RANGE)
        if holds_nul(encoded):
            raise self._refusal(entity, "state", "NUL characters are refused")
        return encoded

    def _check(self, entity: BaseModel, names: Iterable[str], is_fine: _Test, reason: str) -> None:
        """Raise InvalidChange for a value of these fields, or of unknown ones, that is not fine."""
        unknown = entity.__pydantic_extra__
        for name in (*names, *unknown) if unknown else names:
            value = getattr(entity, name, None)
            if value is not None and not is_fine(value):
                raise self._refusal(entity, name, reason)


def holds_nul(encoded: bytes) -> bool:
    """Whether JSON text has an escaped NUL character (the only way JSON can hold one)."""
    # One byte is found ten times faster than six; few texts hold a backslash at all.
    if _BACKSLASH not in encoded or _NUL not in encoded:
        return False
    return _ESCAPED_NUL.search(encoded) is not None
