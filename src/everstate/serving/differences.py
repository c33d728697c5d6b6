"""What changed between two states of an entity, field by field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

MemberPath = tuple[str, ...]


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

    names: MemberPath
    """Names of the members that lead to the field; each of them may have dots itself."""
    before: Any
    after: Any

    @property
    def path(self) -> str:
        """The names with dots between them, as people write the field."""
        return ".".join(self.names)


def differences(
    before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> tuple[Difference, ...]:
    """Fields that differ, in the order of ``after`` and then those only in ``before``.

    Objects are compared field by field, lists as one value; 1, 1.0 and true differ, as in a JSON
    Patch. ``None`` is the empty state of an entity that does not exist. Cost: one pass over both.
    """
    return tuple(_differences(before or {}, after or {}, ()))


def _differences(
    before: Mapping[str, Any], after: Mapping[str, Any], parent: MemberPath
) -> Iterator[Difference]:
    for name in (*after, *(name for name in before if name not in after)):
        old, new = before.get(name, ABSENT), after.get(name, ABSENT)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differences(old, new, (*parent, name))
        elif not are_same(old, new):
            yield Difference((*parent, name), old, new)


def are_same(old: Any, new: Any) -> bool:
    """Whether two values are the same JSON; to Python 1, 1.0 and True are equal."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return old.keys() == new.keys() and all(are_same(old[name], new[name]) for name in old)
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(are_same, old, new))
    return type(old) is type(new) and bool(old == new)


def leads_through(names: MemberPath, path: str) -> bool:
    """Whether a field is the one that people write so, or within it."""
    return any(".".join(names[:length]) == path for length in range(1, len(names) + 1))


def leaves(value: Any, at: MemberPath = ()) -> dict[MemberPath, Any]:
    """Each field of a state that is no object, by the names that lead to it.

    An empty object is one, too. ``None``: the entity does not exist, and has none. ``at``: the
    names that lead to the value, where it is not the whole state.
    """
    if not isinstance(value, Mapping) or not value:
        return {at: value} if at else {}
    found: dict[MemberPath, Any] = {}
    for name, member in value.items():
        found |= leaves(member, (*at, name))
    return found
