"""Which changes of a model its stored messages allow. Pure, so that it can be shown beforehand.

Old messages are never rewritten: a field that they lack has no value there, and a value that a new
type cannot hold would make them unreadable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from everstate.changes.entity import EntityType

ModelChange: TypeAlias = Literal[
    "added", "renamed", "removed", "dropped", "widened", "optional", "required", "retyped", "key"
]
_REFUSED: Final = frozenset({"required", "retyped", "key"})
_INTEGER_DIGITS: Final = 19


@dataclass(frozen=True, slots=True)
class FieldChange:
    """One difference between two models of an entity type.

    ``what``: a field was `added`, which states from before lack; `renamed`, so that they have it
    under the name in ``before``; `removed`, now or at an earlier start; `dropped`, because the
    entity type's ``removed`` names it now; `widened` to a type that takes every old value; it may
    be missing now (`optional`); it may not (`required`); it has a type that old values may not fit
    (`retyped`); another field is the `key`.
    """

    entity: str
    field: str
    what: ModelChange
    before: str | None = None
    """The field's old type in words, its former name, or the field that was the key."""
    after: str | None = None

    @property
    def is_refused(self) -> bool:
        """Whether a running project must reject this difference."""
        return self.what in _REFUSED

    @property
    def meaning(self) -> str:
        """What happens to old messages, or what to do instead."""
        told = {"field": self.field, "before": self.before, "after": self.after}
        return _MEANINGS[self.what].format(**told)


_MEANINGS: Final[Mapping[ModelChange, str]] = {
    "added": "states from before have no value there",
    "renamed": "{before} in states from before is read as {field}; views that use it are built "
    "again, beside those that readers see",
    "removed": "its values stay in messages, and in states until `removed` names it",
    "dropped": "its values stay in messages, and in a state until the next write of it",
    "widened": "views that use it are built again",
    "optional": "nothing to do",
    "required": "states from before do not have it: give it a default, or None",
    "retyped": "old values may not fit {after}: keep {field}, add a field of the new type, and "
    "fill it from the old one where it is missing",
    "key": "keys would not be those of before: declare another entity type",
}


def model_note(entity_type: EntityType, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The description of a model that is stored, to compare a later model with it.

    ``before``: that of the model before. Fields that it had stay in the description as `former`
    until ``removed`` names them, because states still have them.
    """
    fields = entity_type.shape["fields"]
    had = {} if before is None else _had(before)
    named = {*fields, *entity_type.removed, *_now(fields)}
    former = {name: shape for name, shape in had.items() if name not in named}
    return {"key": entity_type.key, "fields": fields, **({"former": former} if former else {})}


def field_changes(before: Mapping[str, Any], entity_type: EntityType) -> list[FieldChange]:
    """Differences between a stored model description and the present model, by field."""
    name, new = entity_type.name, entity_type.shape["fields"]
    old = {f: one for f, one in _had(before).items() if f in before["fields"] or f not in new}
    now, found = _now(new), []
    if entity_type.key not in (before["key"], now.get(before["key"])):
        found.append(FieldChange(name, entity_type.key, "key", before["key"], entity_type.key))
    for field in sorted(old.keys() | new.keys()):
        one, other = old.get(field), new.get(now.get(field, field))
        types = (one and _words(one), other and _words(other))
        if one is None and any(was in old for was in other.get("former", ())):
            continue  # it is compared under that name
        if field in now:
            field, was = now[field], field
            if was in before["fields"].get(field, {}).get("former", ()):
                continue  # it was renamed before
            found.append(FieldChange(name, field, "renamed", was, types[1]))
        if one is None:
            what: ModelChange | None = "required" if other["required"] else "added"
        elif other is None:
            what = "dropped" if field in entity_type.removed else "removed"
        else:
            what = _between(one, other)
        if what is not None:
            found.append(FieldChange(name, field, what, *types))
    return found


def _now(fields: Mapping[str, Any]) -> dict[str, str]:
    """Former name of a field → its name."""
    return {was: name for name, shape in fields.items() for was in shape.get("former", ())}


def _had(note: Mapping[str, Any]) -> dict[str, Any]:
    """Each field that states may have by a stored description, under every name."""
    fields = note["fields"]
    renamed = {was: fields[name] for was, name in _now(fields).items()}
    return {**note.get("former", {}), **renamed, **fields}


def _between(one: Mapping[str, Any], other: Mapping[str, Any]) -> ModelChange | None:
    """How a field differs between two models that both have it."""
    if other["required"] and not one["required"]:
        return "required"
    if _type(one) != _type(other):
        return "widened" if _takes(other, one) else "retyped"
    return "optional" if one["required"] and not other["required"] else None


def _type(shape: Any) -> Any:
    """A shape without its top-level `required` flag, and without former names."""
    return {name: part for name, part in shape.items() if name not in ("required", "former")}


def _takes(new: Mapping[str, Any], old: Mapping[str, Any]) -> bool:
    """Whether a type accepts every value of another one when messages are read."""
    kind, was = new["type"], old["type"]
    if kind == "text":
        return True  # a value that is not text is read as its JSON text
    if kind == "decimal" and was in ("decimal", "integer"):
        whole = old["digits"] - old["places"] if was == "decimal" else _INTEGER_DIGITS
        return bool(
            new["digits"] - new["places"] >= whole and new["places"] >= old.get("places", 0)
        )
    if kind == "float":
        return bool(was in ("integer", "float"))
    if kind != was:
        return False
    if kind == "struct":
        return all(
            (was or not part["required"]) and all(_same_or_wider(each, part) for each in was)
            for name, part in new["fields"].items()
            for names in [(name, *part.get("former", ()))]
            for was in [[old["fields"][each] for each in names if each in old["fields"]]]
        )
    if kind in ("list", "map"):
        return _same_or_wider(old["element"], new["element"])
    return bool(_type(new) == _type(old))


def _same_or_wider(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    is_required = bool(new["required"]) and not old["required"]
    return not is_required and _takes(new, old)


def _words(shape: Mapping[str, Any]) -> str:
    """A type in words for people."""
    kind = shape["type"]
    if kind == "decimal":
        return f"decimal({shape['digits']}, {shape['places']})"
    return str(kind)
