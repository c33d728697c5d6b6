"""One entity on a page: its state at a version or a time, what changed, and who changed it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from everstate.changes.row_json import row_json
from everstate.console.pages import DOTS, VALUE_MAX, entity_url, with_query
from everstate.errors import MissingExtra, NotFound
from everstate.http.answers import whole_number
from everstate.serving import ABSENT, Explanation, Reader, Version, parse_moment
from everstate.serving.differences import Difference, MemberPath, are_same, leaves
from everstate.serving.listing import ListedKey, keys_from
from everstate.serving.words import happening_text
from everstate.serving.writers import last_writer

KEYS_MAX: Final = 50
FIELDS_MAX: Final = 200
"""Fields of a state that a page shows; all of them are in its JSON."""
NEAR_MAX: Final = 12
"""Versions that are listed around the chosen one."""
_NAME_IN_URL_MAX: Final = 60


@dataclass(frozen=True, slots=True)
class StateField:
    """One field of a state: its value before this version, and after."""

    path: str
    before: Any
    after: Any
    is_changed: bool

    @property
    def sign(self) -> str:
        """What the version did with the field, in one word; empty: nothing."""
        if not self.is_changed:
            return ""
        if self.before is ABSENT:
            return "added"
        return "removed" if self.after is ABSENT else "changed"


@dataclass(frozen=True, slots=True)
class EntityPage:
    """What a page of an entity shows."""

    entity: str
    key: str
    shown: Version
    newest: int
    fields: tuple[StateField, ...]
    fields_left_out: int
    near: tuple[Version, ...]
    """Versions around the one that is shown, newest first."""
    missing: NotFound | None = None
    """Why the entity has no state at the time that was asked for; ``None``: it has one."""

    @property
    def what(self) -> str:
        """What happened in the version that is shown."""
        return happening_text(self.shown)

    @property
    def value_max(self) -> int:
        """Characters that a value may have, so that the page stays small."""
        return max(20, min(VALUE_MAX, 12_000 // max(1, len(self.fields))))

    @property
    def name_max(self) -> int:
        """Characters that a field's name may have, so that the page stays small."""
        return max(20, min(200, 10_000 // max(1, len(self.fields))))

    def explain_url(self, number: int) -> str:
        """Address of who last wrote a field, by its name, or by its number if that is longer."""
        path = self.fields[number].path
        is_short = len(quote(path)) <= _NAME_IN_URL_MAX
        by = {"field": path} if is_short else {"nth": number}
        return self.url(explain=1, version=self.shown.version, **by)

    def url(self, **query: Any) -> str:
        """Address of the entity's page, as a link on it has it: short, however long the key is."""
        is_dots = self.key in DOTS
        return entity_url(self.entity, self.key, **query) if is_dots else with_query("?", **query)


def entity_page(reader: Reader, entity: str, key: str, given: Mapping[str, str]) -> EntityPage:
    """An entity now, at a `version`, or `at` a time in the world.

    Raises NotFound when it was never seen, and InvalidQuery. Cost: a few index ranges.
    """
    check_key(entity, key)
    number, missing = version_of(given), None
    newest = reader.version(entity, key)
    try:
        if number is None and (text := given.get("at", "").strip()):
            number = reader.get(entity, key, at=parse_moment(text)).version
        shown = newest if number is None else reader.version(entity, key, number)
    except NotFound as error:
        shown, missing = newest, error
    middle = shown.version + NEAR_MAX // 2
    near = reader.history(entity, key, limit=NEAR_MAX, before=middle)
    fields = state_fields(shown)
    return EntityPage(
        entity=entity,
        key=key,
        shown=shown,
        newest=newest.version,
        fields=fields[:FIELDS_MAX],
        fields_left_out=max(0, len(fields) - FIELDS_MAX),
        near=tuple(reversed(near)),
        missing=missing,
    )


def state_fields(version: Version) -> tuple[StateField, ...]:
    """The fields of a version side by side with those before it, in the model's order."""
    after = leaves(version.state)
    before = _before(after, version.differences)
    paths = [*after, *(path for path in before if path not in after)]
    found = ((path, before.get(path, ABSENT), after.get(path, ABSENT)) for path in paths)
    return tuple(
        StateField(".".join(path), old, new, not are_same(old, new)) for path, old, new in found
    )


def _before(
    after: Mapping[MemberPath, Any], differences: Sequence[Difference]
) -> dict[MemberPath, Any]:
    """The fields of the previous version, from those of this one and the differences."""
    found = dict(after)
    for each in differences:
        for path in [path for path in found if _is_part(path, each.names)]:
            del found[path]
        if each.before is not ABSENT:
            found |= leaves(each.before, each.names)
    return found


def _is_part(path: MemberPath, other: MemberPath) -> bool:
    """Whether one of two fields is the other one, or within it."""
    return path[: len(other)] == other[: len(path)]


def keys_page(reader: Reader, entity: str, start: str) -> tuple[list[ListedKey], str | None]:
    """A page of keys from a text on, and the first key of the next page; raises UnknownEntity."""
    found = keys_from(reader, entity, start.replace("\x00", ""), limit=KEYS_MAX + 1)
    return found[:KEYS_MAX], found[KEYS_MAX].key if len(found) > KEYS_MAX else None


def is_there(reader: Reader, entity: str, key: str) -> bool:
    """Whether a key was ever seen; raises UnknownEntity."""
    return "\x00" not in key and reader.newest_version(entity, key) is not None


def explained(
    reader: Reader, entity: str, key: str, given: Mapping[str, str]
) -> tuple[Explanation, str | None]:
    """Where a `version` comes from, or the version that last wrote a `field`; and that field.

    ``nth``: the field by its number in that version. Raises NotFound, also for a field that the
    version does not have, and errors of the archive. Cost: the whole history for a field; reading
    the lake table's log.
    """
    check_key(entity, key)
    number = version_of(given)
    field = given.get("field")
    if "nth" in given:
        field = _nth_field(reader.version(entity, key, number), given)
    if field is not None:
        before = None if number is None else number + 1
        number = last_writer(reader.newest_first(entity, key, before=before), field).version
    try:
        return reader.explain(entity, key, number), field
    except ModuleNotFoundError as error:
        raise MissingExtra.of(error) or error from error


def _nth_field(version: Version, given: Mapping[str, str]) -> str:
    """The name of a field of a version by its number; raises NotFound and InvalidQuery."""
    fields, wanted = state_fields(version), whole_number(given, "nth", "a whole number")
    if wanted >= len(fields):
        raise NotFound(f"version {version.version} has no field number {wanted}.")
    return fields[wanted].path


def state_json(reader: Reader, entity: str, key: str, given: Mapping[str, str]) -> bytes:
    """The whole state of a version as JSON; null for one that deleted the entity."""
    check_key(entity, key)
    state = reader.version(entity, key, version_of(given)).state
    return row_json(state, indented=True)


def check_key(entity: str, key: str) -> None:
    """Raise NotFound for a key that no store can have."""
    if "\x00" in key:
        raise NotFound(f"there can be no {entity} {key!r}: no key has a NUL character.")


def version_of(given: Mapping[str, str]) -> int | None:
    """The number of the version that a request names; raises InvalidQuery."""
    if not given.get("version"):
        return None
    return whole_number(given, "version", "a whole number from 1 on", least=1)
