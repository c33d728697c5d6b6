"""Whether a state is read as it was given: what its JSON says is compared with the entity. Pure.

A model of pydantic can hold what it would refuse to read: a field that was assigned, or given to
`model_copy(update=…)`, is not validated. It can also write what it does not hold: with a serializer
of its own, without an excluded field, or without what a subclass adds. In the log each of these
would be another value, or one that no typed column can hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from decimal import Decimal
from enum import Enum
from functools import partial
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from everstate.changes.accepting import read_exactly
from everstate.changes.arrow import arrow_type
from everstate.changes.equality import instant_text
from everstate.changes.fields import ModelField, objects_of, tree_of
from everstate.changes.json_numbers import decode
from everstate.changes.names import by_name

_MISSING: Final = object()
_TEXT_MAX: Final = 60


class ReadBack:
    """How the JSON of one model is compared with the values that were given."""

    def __init__(self, model: type[BaseModel], *, has_columns: bool = True) -> None:
        """``has_columns``: it is a state, and typed columns must hold what is written.

        Else it is a command's JSON, which has no columns, and the names of the fields unless the
        model says otherwise.
        """
        self._model, self._has_columns = model, has_columns
        self._has_aliases = has_columns or bool(model.model_config.get("serialize_by_alias"))
        found = set(_own_code(model.__pydantic_core_schema__))
        computing = {each for each, tree in objects_of(model).items() if tree.computed}
        self._computed = tree_of(model).computed
        self._writes_otherwise = "writes" in found or bool(computing - {model})
        self.has_own_code = bool(found or computing)
        """Whether the model validates, converts, computes, writes or leaves out a value itself."""
        self._read = partial(
            model.__pydantic_validator__.validate_json, strict=True, by_name=by_name(model)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # Tasks of Spark are sent without pydantic's readers.
        return partial(ReadBack, has_columns=self._has_columns), (self._model,)

    def fault(self, entity: BaseModel, encoded: bytes) -> tuple[str, str] | None:
        """The first field that is not read as it was given, and why; ``None``: all are.

        Cost: about that of reading the state; ten times that for a model with a serializer.
        """
        if self._writes_otherwise or not self._is_equal(entity, encoded):
            return self._exact_fault(entity, encoded)
        if not self._computed or not self._has_columns:
            return None
        return _column_fault(decode(encoded), self._computed)

    def _is_equal(self, entity: BaseModel, encoded: bytes) -> bool:
        """Whether the JSON has the types of the fields and is read as an equal entity.

        It may also be false where nothing is wrong.
        """
        try:
            again = self._read(encoded)
        except ValidationError:
            return False
        return bool(again.__dict__ == entity.__dict__) and entity.__class__ is self._model

    def _exact_fault(self, entity: BaseModel, encoded: bytes) -> tuple[str, str] | None:
        """As :meth:`fault`, field by field.

        A value that is given as JSON has it, such as the text of a time, is as good as the time.
        """
        model, kind = self._model, entity.__class__
        if added := sorted(kind.model_fields.keys() - model.model_fields.keys()):
            return added[0], f"{model.__name__} has no such field; {kind.__name__} adds it"
        try:
            again = read_exactly(model, encoded)
        except ValidationError as cause:
            first = cause.errors(include_url=False, include_context=False, include_input=False)[0]
            return ".".join(map(str, first["loc"])) or "state", first["msg"]
        to_json = model.__pydantic_serializer__.to_json
        written = decode(encoded)
        anew = decode(to_json(again, by_alias=self._has_aliases, warnings=False))
        for field in tree_of(model).fields:
            name = field.name
            given, read = entity.__dict__.get(name, _MISSING), again.__dict__.get(name, _MISSING)
            column = field.written if self._has_aliases else name
            text, after = written.get(column, _MISSING), anew.get(column, _MISSING)
            if not _is_same(given, read) and not (_is_same(given, text) and _is_same(text, after)):
                reason = f"{_shown(given)} is written as {_shown(text)} and read as {_shown(read)}"
                return name, reason
        return _column_fault(written, tree_of(model).columns) if self._has_columns else None


def _column_fault(
    written: Mapping[str, Any], fields: Iterable[ModelField]
) -> tuple[str, str] | None:
    """The first of these fields whose column cannot hold its value, and why."""
    from everstate.changes.typed import fits

    for each in fields:
        value, kind = written.get(each.written), arrow_type(each.tree)
        if value is not None and not fits(kind, value):
            return each.written, f"it is written as {_shown(value)}, and its column is {kind}"
    return None


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values are the same in JSON; models must be of one class."""
    if isinstance(one, BaseModel):
        if one.__class__ is not other.__class__:
            return False
        return all(
            _is_same(one.__dict__.get(name, _MISSING), other.__dict__.get(name, _MISSING))
            for name in one.__class__.model_fields
        )
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, datetime) and isinstance(other, datetime):
        # Python takes an hour that a clock shows twice for unequal to itself in another zone.
        return instant_text(one) == instant_text(other)
    if isinstance(one, Enum) or isinstance(other, Enum):
        return bool(getattr(one, "value", one) == getattr(other, "value", other))
    if isinstance(one, float) and isinstance(other, Decimal):
        return Decimal(repr(one)) == other
    return bool(one == other)


def _shown(value: Any) -> str:
    """A short text of a value for an error."""
    if value is _MISSING:
        return "nothing"
    text = repr(value)
    return text if len(text) <= _TEXT_MAX else f"{text[:_TEXT_MAX]}…"


def _own_code(schema: Any) -> Iterator[str]:
    """`reads` and `writes`, for each function of a core schema that is not pydantic's own."""
    if isinstance(schema, Mapping):
        writes = schema.get("serialization", {})
        is_left_out = any(map(schema.get, ("serialization_exclude", "serialization_exclude_if")))
        if schema.get("type") == "json" or writes.get("type") == "any" or is_left_out:
            yield "writes"
        if _is_own(writes):
            yield "writes"
        if _is_own(schema):
            yield "reads"
        schema = [part for name, part in schema.items() if name != "serialization"]
    if isinstance(schema, (list, tuple)):
        for part in schema:
            yield from _own_code(part)


def _is_own(schema: Mapping[str, Any]) -> bool:
    """Whether a core schema calls a function that is not of pydantic."""
    function = schema.get("function")
    if isinstance(function, Mapping):
        function = function["function"]
    module = str(getattr(function, "__module__", ""))
    return function is not None and not module.startswith(("pydantic", "operator"))
