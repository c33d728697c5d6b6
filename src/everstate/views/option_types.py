"""Refuses options of a declared view whose values have another type than the option."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from everstate.errors import InvalidView


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_texts(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(map(_is_text, value))


def _are_indexes(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(_is_text(i) or _are_texts(i) for i in value)


def _are_columns(value: object) -> bool:
    # Imported here: it takes half a second, and who declares columns has imported it.
    import pyarrow

    if isinstance(value, pyarrow.Schema):
        return True
    if not isinstance(value, (list, tuple)):
        return False
    return all(isinstance(each, pyarrow.Field) for each in value)


def _or_none(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or fits(value)


_OPTIONS: Final[Mapping[str, tuple[Callable[[object], bool], str, str]]] = {
    "sql": (_is_text, "a text", 'sql="SELECT …"'),
    "scale": (_or_none(_is_whole), "a whole number", "scale=2"),
    "indexes": (_are_indexes, "a list of columns", 'indexes=["city"]'),
    "search": (lambda value: _is_text(value) or _are_texts(value), "a list", 'search=["title"]'),
    "language": (_or_none(_is_text), "a text", 'language="german"'),
    "ttl": (_or_none(_is_text), "a duration as a text", 'ttl="24 hours"'),
    "lateness": (_or_none(_is_text), "a duration as a text", 'lateness="1 hour"'),
    "late": (_or_none(_is_text), "a text", 'late="aside"'),
    "store": (_is_text, "the name of a store", 'store="postgresql"'),
    "attributes": (_are_texts, "names of fields", 'app.timeline(name, entity, "status")'),
    "columns": (_are_columns, "Arrow fields", 'columns=[pa.field("n", pa.int64())]'),
    "fields": (_or_none(_are_texts), "a list of fields", 'fields=["status"]'),
    "version": (_is_whole, "a whole number", "version=2"),
}
"""Of each option the test of a value, what it expects, and an example."""


def check_option_types(view: str, given: Mapping[str, object]) -> None:
    """Raise InvalidView for the first option whose value has another type."""
    for name, value in given.items():
        fits, wanted, example = _OPTIONS[name]
        if not fits(value):
            raise InvalidView(
                view, f"{name} is {value!r}; expected {wanted}.", advice=f"Write {example}."
            )
