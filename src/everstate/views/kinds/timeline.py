"""Timelines: from when to when an attribute of an entity had a value, and who set it.

A timeline has no table of its own: it is read from `history`, so that it agrees with `get --at`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import pyarrow as pa
from psycopg.sql import SQL, Composable, Composed, Identifier

from everstate.changes import EntityType
from everstate.errors import InvalidView
from everstate.views.definition import TimelineDefinition
from everstate.views.grammar import suggestion
from everstate.views.kinds.composed import ComposedPlan
from everstate.views.kinds.kind import BatchSource, Explained, Names
from everstate.views.names import length_fault
from everstate.views.tables import HISTORY_FINGERPRINT, history_of

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
class TimelinePlan(ComposedPlan):
    """The values of some attributes of each entity, one row for each time that one changed."""

    attributes: tuple[tuple[str, pa.DataType], ...] = ()
    """Dotted names, and their types."""
    timeline: TimelineDefinition | None = None
    kind: ClassVar[str] = "timeline"

    @property
    def inputs(self) -> tuple[str, ...]:
        """The name of the history."""
        return (history_of(self.entity),)

    @property
    def definition(self) -> Mapping[str, Any]:
        """Its attributes, and its input."""
        assert self.timeline is not None
        return {**self.timeline.stored, "inputs": list(self.inputs)}

    @property
    def explained(self) -> Explained:
        """What is stored for it, and what that costs."""
        return Explained(
            f"nothing: it is computed from {self.inputs[0]} when it is read",
            "nothing",
            "a key: its versions, by index; all: one pass over the history",
        )

    @property
    def reads(self) -> BatchSource:
        """Every accepted change."""
        return "changes"

    @property
    def key_columns(self) -> int:
        """Key and version."""
        return 2

    @property
    def defined(self) -> tuple[str, ...]:
        """Columns that readers see."""
        return ("key", *self._names, "valid_from", "valid_to", *_OF_CHANGE, "version")

    @property
    def shown_key(self) -> tuple[str, ...]:
        """Key and version of the entity."""
        return ("key", "version")

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.attributes)

    @property
    def _plain_names(self) -> tuple[str, ...]:
        """Names without dots, which Spark would read as nested fields, and that are not taken."""
        return tuple(f"a{place}" for place in range(len(self.attributes)))

    def read(self, names: Names) -> Composed:
        """One row for each period in which no attribute changed."""
        plain = dict(zip(self._names, self._plain_names, strict=True))
        shown = [
            SQL("{} AS {}").format(Identifier(plain.get(name, name)), Identifier(name))
            for name in self.defined
        ]
        return SQL("SELECT {} FROM ({}) AS timeline").format(
            SQL(", ").join(shown), self._query(names)
        )

    def compared(self, names: Names) -> Composed:
        """The same with the key first."""
        shown = SQL(", ").join(map(Identifier, (*_OWN, *self._plain_names)))
        return SQL("SELECT {} FROM ({}) AS timeline").format(shown, self._query(names))

    def _query(self, names: Names) -> Composed:
        """The periods, with :attr:`_plain_names`: an attribute may have any name used here."""
        values = [
            SQL("{} AS {}").format(names.field(name.split("."), kind), Identifier(plain))
            for (name, kind), plain in zip(self.attributes, self._plain_names, strict=True)
        ]
        of_change = [SQL(f"{text} AS {name}") for name, (text, _) in _OF_CHANGE.items()]
        given = SQL("SELECT key, version, as_of, state IS NOT NULL AS there, {} FROM {}").format(
            SQL(", ").join([*of_change, *values]), names.view(history_of(self.entity))
        )
        before: list[Composable] = [SQL("lag(there) OVER w AS was_there")]
        changed: list[Composable] = [SQL("there IS DISTINCT FROM coalesce(was_there, false)")]
        for name in self._plain_names:
            before.append(SQL(f"lag({name}) OVER w AS was_{name}"))
            changed.append(SQL(f"{name} IS DISTINCT FROM was_{name}"))
        steps = SQL(
            "SELECT *, {} FROM ({}) AS given WINDOW w AS (PARTITION BY key ORDER BY version)"
        ).format(SQL(", ").join(before), given)
        # A value is valid until the next value, or until a deletion, which has no row of its own.
        return SQL(
            "SELECT * FROM (SELECT *, as_of AS valid_from, lead(as_of) OVER "
            "(PARTITION BY key ORDER BY version) AS valid_to FROM ({}) AS steps WHERE {}) AS runs "
            "WHERE there"
        ).format(steps, SQL(" OR ").join(changed))

    def batch(self, tables: Mapping[str, str]) -> str:
        """The same by Spark over all accepted changes."""
        (table,) = tables.values()
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

    def as_shown(self, tables: Mapping[str, str]) -> str:
        """The same in the order of readers' columns."""
        plain = dict(zip(self._names, self._plain_names, strict=True))
        names = ", ".join(f"{plain.get(name, name)} AS `{name}`" for name in self.defined)
        return f"SELECT {names} FROM ({self.batch(tables)})"


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
        hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32],
        fields=tuple(sorted({name.split(".")[0] for name in definition.attributes})),
        attributes=attributes,
        timeline=definition,
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
