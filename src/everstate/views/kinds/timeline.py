"""Timelines: from when to when an attribute of an entity had a value, and who set it.

A timeline has no table of its own: it is read from `history`, so that it agrees with `get --at`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import pyarrow as pa

from everstate.changes import EntityType
from everstate.errors import InvalidView
from everstate.views.definition import TimelineDefinition
from everstate.views.grammar import suggestion
from everstate.views.kinds.kind import (
    BatchSource,
    Explained,
    Names,
    ViewPlan,
    identifiers,
    output_text,
    quoted,
)
from everstate.views.names import length_fault
from everstate.views.tables import HISTORY_FINGERPRINT, history_of, meaning_of

_OF_CHANGE: Final = {
    "changed_by": ("provenance ->> 'serviceName'", "provenance.serviceName"),
    "identifier": ("provenance ->> 'identifier'", "provenance.identifier"),
    "actor": ("provenance ->> 'actor'", "provenance.actor"),
    "reason": ("provenance ->> 'reason'", "provenance.reason"),
    "event": ("event ->> 'type'", "GET_JSON_OBJECT(event, '$.type')"),
}
"""Columns of the change that set a value: expressions in PostgreSQL and in Spark."""
_FORMAT: Final = 2
_OWN: Final = ("key", "version", "valid_from", "valid_to", *_OF_CHANGE)


@dataclass(frozen=True)
class TimelinePlan(ViewPlan):
    """The values of some attributes of each entity, one row for each time that one changed."""

    attributes: tuple[tuple[str, pa.DataType], ...] = ()
    """Dotted names, and their types."""
    paths: tuple[tuple[tuple[str, ...], ...], ...] = ()
    """Of each attribute the names of the fields on the way to it, former ones too."""
    kind: ClassVar[str] = "timeline"
    has_times: ClassVar[bool] = True
    source: ClassVar[BatchSource] = "changes"
    key: ClassVar[tuple[str, ...]] = ("key", "version")

    @property
    def inputs(self) -> tuple[str, ...]:
        """The name of the history."""
        return (history_of(self.entity),)

    @property
    def explained(self) -> Explained:
        """What is stored for it, and what that costs."""
        return Explained(
            f"nothing: it is computed from {self.inputs[0]} when it is read",
            "nothing",
            "a key: its versions, by index; all: one pass over the history",
        )

    @property
    def defined(self) -> tuple[str, ...]:
        """Columns that readers see."""
        return ("key", *self._names, "valid_from", "valid_to", *_OF_CHANGE, "version")

    @property
    def shown_key(self) -> tuple[str, ...]:
        """Key and version of the entity."""
        return self.key

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.attributes)

    @property
    def _plain_names(self) -> tuple[str, ...]:
        """Names without dots, which Spark would read as nested fields, and that are not taken."""
        return tuple(f"a{place}" for place in range(len(self.attributes)))

    @property
    def read_of_batch(self) -> tuple[tuple[str, str], ...]:
        """The columns that readers see."""
        plain = dict(zip(self._names, self._plain_names, strict=True))
        return tuple((plain.get(name, name), name) for name in self.defined)

    def read(self, names: Names, *, limited: bool = True) -> str:
        """One row for each period in which no attribute changed."""
        shown = ", ".join(output_text((quoted(of), name)) for of, name in self.read_of_batch)
        return f"SELECT {shown} FROM ({self._query(names)}) AS timeline"

    def compared(self, names: Names) -> str:
        """The same with the key first."""
        columns = identifiers((*_OWN, *self._plain_names))
        return f"SELECT {columns} FROM ({self._query(names)}) AS timeline"

    def _query(self, names: Names) -> str:
        """The periods, with :attr:`_plain_names`: an attribute may have any name used here."""
        columns = [f"{text} AS {name}" for name, (text, _) in _OF_CHANGE.items()]
        before = ["lag(there) OVER w AS was_there"]
        changed = ["there IS DISTINCT FROM coalesce(was_there, false)"]
        places = zip(self.paths, self.attributes, self._plain_names, strict=True)
        for path, (_, kind), plain in places:
            columns.append(output_text((names.field(path, kind), plain)))
            before.append(f"lag({plain}) OVER w AS was_{plain}")
            changed.append(f"{plain} IS DISTINCT FROM was_{plain}")
        given = (
            f"SELECT key, version, as_of, state IS NOT NULL AS there, {', '.join(columns)} "
            f"FROM {names.view(history_of(self.entity))}"
        )
        steps = (
            f"SELECT *, {', '.join(before)} FROM ({given}) AS given "
            "WINDOW w AS (PARTITION BY key ORDER BY version)"
        )
        # A value is valid until the next value, or until a deletion, which has no row of its own.
        return (
            "SELECT * FROM (SELECT *, as_of AS valid_from, lead(as_of) OVER "
            f"(PARTITION BY key ORDER BY version) AS valid_to FROM ({steps}) AS steps "
            f"WHERE {' OR '.join(changed)}) AS runs WHERE there"
        )

    def batch(self, tables: Sequence[str]) -> str:
        """The same by Spark over all accepted changes."""
        (table,) = tables
        both = zip(self._names, self._plain_names, strict=True)
        values = ", ".join(f"current.{_quoted(name)} AS {plain}" for name, plain in both)
        of_change = ", ".join(f"{text} AS {name}" for name, (_, text) in _OF_CHANGE.items())
        over = "OVER (PARTITION BY key ORDER BY version)"
        same = " AND ".join(
            ["there <=> coalesce(lag(there) OVER_KEY, false)"]
            + [f"{name} <=> lag({name}) OVER_KEY" for name in self._plain_names]
        ).replace("OVER_KEY", over)
        own = "key, version, as_of, current IS NOT NULL AS there"
        given = f"SELECT {own}, {of_change}, {values} FROM {table}"
        steps = f"SELECT *, {same} AS same FROM ({given})"
        runs = f"SELECT *, lead(as_of) {over} AS valid_to FROM ({steps}) WHERE NOT same"
        names = ", ".join(["valid_to", *_OF_CHANGE, *self._plain_names])
        return f"SELECT key, version, as_of AS valid_from, {names} FROM ({runs}) WHERE there"


def timeline_plan(definition: TimelineDefinition, entity_type: EntityType) -> TimelinePlan:
    """The plan of a timeline; raises InvalidView."""
    attributes = tuple(
        (name, _kind(definition, entity_type, name)) for name in definition.attributes
    )
    seen: set[str] = set()
    for name in definition.attributes:
        if name.lower() in seen:
            raise InvalidView(
                definition.name,
                f"it names the attribute {name} twice.",
                advice="Name each attribute once.",
            )
        seen.add(name.lower())
    parts = [f"timeline/{_FORMAT}", HISTORY_FINGERPRINT, entity_type.name]
    parts += [f"{name} {kind}" for name, kind in attributes]
    return TimelinePlan(
        definition.name,
        entity_type.name,
        meaning_of(parts),
        definition,
        fields=tuple(sorted({name.split(".")[0] for name in definition.attributes})),
        attributes=attributes,
        paths=tuple(tuple(entity_type.names_to(n.split("."))) for n in definition.attributes),
    )


def _kind(definition: TimelineDefinition, entity_type: EntityType, name: str) -> pa.DataType:
    """Type of an attribute; raises InvalidView for an unknown or a nested one."""
    kind: pa.DataType = pa.struct(list(entity_type.arrow_schema))
    for part in name.split("."):
        known = [field.name for field in kind] if pa.types.is_struct(kind) else []
        if part not in known:
            raise InvalidView(
                definition.name,
                f"{entity_type.name} has no attribute {name!r}.",
                advice=suggestion(part, dict.fromkeys(known))
                or f"Its attributes are {', '.join(known)}.",
            )
        kind = kind.field(part).type
    if pa.types.is_nested(kind):
        raise InvalidView(
            definition.name,
            f"the attribute {name} has several values ({kind}), and a timeline shows single "
            "values.",
            advice=f"Name one of them, as in {name}.x, or read {entity_type.name}_history.",
        )
    if fault := length_fault(name):
        raise InvalidView(
            definition.name,
            f"the name of the attribute {name} {fault}.",
            advice=f"Read this attribute from {history_of(entity_type.name)}.",
        )
    if name.lower() in _OWN:
        raise InvalidView(
            definition.name,
            f"every timeline already has a column {name.lower()}.",
            advice=f"Read this attribute from {history_of(entity_type.name)}, or give the field "
            "another name.",
        )
    return kind


def _quoted(name: str) -> str:
    """A dotted name in Spark's quotes."""
    return ".".join(f"`{part}`" for part in name.split("."))
