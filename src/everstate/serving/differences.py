"""What changed between two states of an entity, field by field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final


class Absent:
    """Type of the value for a missing field, which is not the same as JSON null."""

    def __repr__(self) -> str:
        return "absent"


ABSENT: Final = Absent()


@dataclass(frozen=True, slots=True)
class Difference:
    """One field that differs; ``path`` joins nested fields by dots.

    ``before`` or ``after`` is :data:`ABSENT` when that state does not have the field.
    """

    path: str
    before: Any
    after: Any


def differences(
    before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> tuple[Difference, ...]:
    """Fields that differ, in the order of ``after`` and then those only in ``before``.

    Objects are compared field by field, lists as one value. ``None`` is the empty state of an
    entity that does not exist. Cost: one pass over both.
    """
    return tuple(_differences(before or {}, after or {}, ""))


def _differences(
    before: Mapping[str, Any], after: Mapping[str, Any], parent: str
) -> Iterator[Difference]:
    for name in (*after, *(name for name in before if name not in after)):
        old, new = before.get(name, ABSENT), after.get(name, ABSENT)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differences(old, new, f"{parent}{name}.")
        elif old != new or type(old) is not type(new):
            yield Difference(f"{parent}{name}", old, new)


def leaves(state: Mapping[str, Any] | None, parent: str = "") -> dict[str, Any]:
    """Each field of a state that is no object, by its path; nested fields by dots.

    An empty object is one, too. ``None``: the entity does not exist, and has none.
    """
    found: dict[str, Any] = {}
    for name, value in (state or {}).items():
        path = f"{parent}{name}"
        if isinstance(value, Mapping) and value:
            found |= leaves(value, f"{path}.")
        else:
            found[path] = value
    return found
