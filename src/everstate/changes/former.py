"""Former names of fields: states that were written before a rename are read as today's. Pure.

``city: Annotated[str, Formerly("city_name")]`` declares the rename. A state in the log, the archive
or a store is never written again; each reader gives the value of `city_name` the name `city`,
before anything else reads it. A name with null has no value: an older release that reads a state of
the newer one finds nothing under its own name, and writes null there. Where two names have
different values, nothing tells which of them is meant: the field is a misfit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, TypeAlias, TypeVar

from pydantic import BaseModel

from everstate.changes.fields import FieldTree, ValuePath, tree_of
from everstate.changes.json_numbers import decode_as_written, encode, encode_sorted

T = TypeVar("T")
CLASH: Final = "it has another value under a former name; write the one that is meant"
OnClash: TypeAlias = Callable[[ValuePath], Any]
"""Gives the value of the field at a path whose names have different values."""


@dataclass(frozen=True, slots=True)
class FormerNames:
    """The former names of fields in a value, at any depth; false: there are none."""

    fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Of an object: today's name in JSON → its former names."""
    inside: Mapping[str, FormerNames] = field(default_factory=dict)
    """Of an object: the fields whose values have such fields."""
    element: FormerNames | None = None
    """Of the elements of a list, or the values of a mapping."""

    def __bool__(self) -> bool:
        return bool(self.fields or self.inside or self.element)

    def names(self, name: str) -> tuple[str, ...]:
        """The names of an object's field, today's first."""
        return (name, *self.fields.get(name, ()))

    def within(self, name: str) -> FormerNames:
        """Those in the value of an object's field."""
        return self.inside.get(name, NONE)

    def today(self, value: Any, on_clash: OnClash | None = None, at: ValuePath = ()) -> Any:
        """Decoded JSON with today's names; names that clash stay, unless ``on_clash`` is given."""
        element = self.element
        if element is not None and isinstance(value, list):
            return [element.today(each, on_clash, (*at, n)) for n, each in enumerate(value)]
        if not isinstance(value, Mapping):
            return value
        if element is not None:
            return {n: element.today(each, on_clash, (*at, n)) for n, each in value.items()}
        made = dict(value)
        for name, former in self.fields.items():
            told = [value[each] for each in self.names(name) if value.get(each) is not None]
            if any(encode_sorted(each) != encode_sorted(told[0]) for each in told[1:]):
                if on_clash is not None:
                    made[name] = on_clash((*at, name))
            elif not made.keys().isdisjoint(former):
                made = {each: part for each, part in made.items() if each not in former}
                made[name] = told[0] if told else None
        for name, inner in self.inside.items():
            if name in made:
                made[name] = inner.today(made[name], on_clash, (*at, name))
        return made

    def of_state(self, state: T, on_clash: OnClash | None = None) -> T:
        """A state, decoded or as JSON text, with today's names.

        ``on_clash``: see :meth:`today`. Raises ValueError for a text that is no JSON. Cost: nothing
        without former names, else that of decoding.
        """
        if not self:
            return state
        if not isinstance(state, (bytes, str)):
            return self.today(state, on_clash)  # type: ignore[no-any-return]
        read = decode_as_written(state)
        made = self.today(read, on_clash)
        if made == read:
            return state
        text = encode(made)
        return text if isinstance(state, bytes) else text.decode()  # type: ignore[return-value]


NONE: Final = FormerNames()


@lru_cache(maxsize=1024)
def former_of(model: type[BaseModel]) -> FormerNames:
    """The former names in a model's states."""
    return _of(tree_of(model))


def _of(tree: FieldTree) -> FormerNames:
    if tree.element is not None:
        return FormerNames(element=_of(tree.element) or None)
    fields = {each.written: each.former for each in tree.fields if each.former}
    inner = ((each.written, _of(each.tree)) for each in tree.fields)
    return FormerNames(fields, {name: each for name, each in inner if each})
