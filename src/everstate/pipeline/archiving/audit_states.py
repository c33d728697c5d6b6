"""Digests of the states in archived messages: equal for states with equal values, by law 3.

They are made from the messages, not from the typed columns beside them: those are of the model at
the time of archiving, so after a change of the model two equal states have different columns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec
import pyarrow as pa
from pydantic_core import to_jsonable_python
from pyspark.sql import DataFrame
from pyspark.sql.types import ArrayType, DataType, LongType, MapType, StructField, StructType

from everstate.changes import EntityType
from everstate.changes.equality import decimal_text, one_text
from everstate.changes.fields import FieldTree, FieldType, tree_of
from everstate.changes.former import NONE, FormerNames
from everstate.changes.json_numbers import JsonNumber, decode, encode_sorted
from everstate.pipeline.spark.states import state_schema

BEFORE, AFTER = "before", "after"
_RAW: Final = "raw_value"
_NULL: Final = msgspec.Raw(b"null")
_EXACT_MAX: Final = 2**53
_RULES: Final[Mapping[str, FieldType]] = {
    "decimal": "decimal",
    "double": "float",
    "timestamp": "timestamp",
    "timestamp_ntz": "timestamp",
}
"""Spark's types with values of several texts."""


class _States(msgspec.Struct, rename="camel", gc=False):
    """The states of a message, as JSON."""

    current_entity_state: msgspec.Raw = _NULL
    original_entity_state: msgspec.Raw = _NULL


_states: Final = msgspec.json.Decoder(_States).decode


@dataclass(frozen=True, slots=True)
class StateDigests:
    """What is equal in two states: the values of a model's fields, or all that they have.

    A field that is null is equal to one that is missing. Numbers are compared by value, and what
    the place says to be a decimal or a time is too, in any of its texts.
    """

    place: FieldTree
    defaults: Mapping[str, Any]
    """What a state without the field has there."""
    only_known: bool
    """Whether members that the place does not have are left out: an older model had them."""
    former: FormerNames = NONE
    """The names that members had before."""

    def by_values(self, text: bytes) -> int:
        """A 64-bit hash of a state's values. Cost: it is decoded, some 20 µs."""
        try:
            tree = decode(text)
            if isinstance(tree, dict):
                tree = self._meant({**self.defaults, **self.former.today(tree)}, self.place)
            meant = encode_sorted(tree)
        except ValueError:
            meant = text  # not read by everyone: then the texts have to be equal
        return by_text(meant)

    def _meant(self, value: Any, place: FieldTree | None) -> Any:
        """A value in the one form of all equal values."""
        if value is None or value is True or value is False:
            return value
        if place is not None and place.rule is not None:
            value = one_text(place, value, ())
        if isinstance(value, str):
            return value
        if isinstance(value, dict):
            return self._members(value, place)
        if isinstance(value, list):
            element = None if place is None else place.element
            return [self._meant(each, element) for each in value]
        return _number(value)

    def _members(self, value: dict[str, Any], place: FieldTree | None) -> dict[str, Any]:
        if place is None or not place.members:
            element = None if place is None else place.element
            return {name: self._meant(part, element) for name, part in value.items()}
        known = place.members
        return {
            name: self._meant(part, known.get(name))
            for name, part in value.items()
            if part is not None and (name in known or not self.only_known)
        }


Digest: TypeAlias = Callable[[bytes], int]
"""A hash of a state's JSON."""


def by_text(text: bytes) -> int:
    """A 64-bit hash of the text itself: it differs for many states with equal values."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), signed=True)


def digested(raw_value: bytes, digest: Digest) -> tuple[int | None, ...]:
    """Hashes of the original and of the current state of a message; ``None`` for no state."""
    try:
        states = _states(raw_value)
    except msgspec.DecodeError:
        return None, None  # it was changed after it was archived: its successor does not chain
    return tuple(
        None if (text := bytes(state)) == b"null" else digest(text)
        for state in (states.original_entity_state, states.current_entity_state)
    )


def _number(value: Any) -> Any:
    if isinstance(value, float) and not value.is_integer():
        return value
    if -_EXACT_MAX < value < _EXACT_MAX and not isinstance(value, JsonNumber):
        return int(value)
    return JsonNumber(decimal_text(JsonNumber(repr(value) if isinstance(value, float) else value)))


def state_digests(entity_type: EntityType | None, stored: DataType) -> StateDigests:
    """How states are compared: by the model's fields, or without a model by all members.

    ``stored``: Spark's type of the archive's states.
    """
    if entity_type is None:
        return StateDigests(_place(stored), {}, False)
    tree, place = tree_of(entity_type.model), _place(state_schema(entity_type))
    for each in tree.computed:
        place.members.pop(each.written, None)  # what it is made of is compared
    known = (place, dict(_defaults(tree)), not tree.keeps_unknown)
    return StateDigests(*known, entity_type.former)


def _defaults(tree: FieldTree) -> Iterator[tuple[str, Any]]:
    for each in tree.fields:
        info = each.info
        if (
            info is None
            or info.is_required()
            or info.default_factory not in (None, list, dict, set)
        ):
            continue
        default = info.get_default(call_default_factory=True, validated_data={})
        if default is not None:
            yield each.written, to_jsonable_python(default, fallback=str)


def _place(kind: DataType) -> FieldTree:
    if isinstance(kind, StructType):
        return FieldTree(members={part.name: _place(part.dataType) for part in kind})
    if isinstance(kind, (ArrayType, MapType)):
        inside = kind.elementType if isinstance(kind, ArrayType) else kind.valueType
        return FieldTree(element=_place(inside))
    return FieldTree(rule=_RULES.get(kind.typeName()))


def with_digests(messages: DataFrame, digest: Digest) -> DataFrame:
    """The columns of readable messages, with digests of their states instead of ``raw_value``."""
    kept = [name for name in messages.columns if name != _RAW]
    hashes = [StructField(BEFORE, LongType()), StructField(AFTER, LongType())]
    schema = StructType([*(messages.schema[name] for name in kept), *hashes])

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            found = [digested(value, digest) for value in batch.column(_RAW).to_pylist()]
            columns = [
                *(batch.column(name) for name in kept),
                pa.array([before for before, _ in found], pa.int64()),
                pa.array([after for _, after in found], pa.int64()),
            ]
            yield pa.RecordBatch.from_arrays(columns, names=[*kept, BEFORE, AFTER])

    return messages.mapInArrow(run, schema)
