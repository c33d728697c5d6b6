"""Given / When / Then for a view in SQL; no servers.

The view's own SQL runs over the entities of the test, in DuckDB, which the extra `testing` of the
package installs. So a test shows what a definition means. That a running project keeps exactly
these rows is what `everstate views verify` proves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import Enum
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pyarrow as pa
from pydantic import BaseModel

from everstate.changes import EntityType
from everstate.errors import InvalidView, MissingExtra
from everstate.views.definition import ViewDefinition
from everstate.views.duckdb_sql import in_duckdb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from everstate.app import App

ExpectedRow = Mapping[str, Any]


class ViewBehaviour:
    """The rows of a view: ``given(entities).when(changed).then(rows)``."""

    def __init__(self, sql: str, entity_types: Mapping[str, EntityType], *, ordered: bool) -> None:
        """``sql``: Spark's dialect, over entity types by name; ``ordered``: it has an ORDER BY."""
        self._query = in_duckdb(sql, "spark")
        self._entity_types = entity_types
        self._ordered = ordered

    @classmethod
    def of(cls, app: App, name: str) -> ViewBehaviour:
        """The behaviour of a view that an app has declared over the states of entities.

        Raises UnknownView; InvalidView for one that no single query over states describes: a view
        of changes, with a trigger, policies or a time to live, a timeline, or a view in Python.
        """
        plan = app.view_plan(name)
        declared = plan.declared
        over_states = isinstance(declared, ViewDefinition) and plan.source == "live"
        if not over_states or declared is None or declared.rules or declared.ttl:
            raise InvalidView(
                name,
                f"its rows ({plan.kind}) do not follow from the present states alone, so that "
                "ViewBehaviour cannot compute them.",
                advice="Test it in a running project: `everstate views verify`.",
            )
        # The sides of a join have other names in the plan.
        sql = declared.sql if plan.inputs else plan.batch_as_shown
        return cls(sql, app.entities, ordered=plan.is_ordered)

    def given(self, *entities: BaseModel) -> GivenEntities:
        """Start with these entities, of one or several types; without any there is none."""
        return GivenEntities(self, {}).when(*entities)

    def rows(self, states: Mapping[tuple[str, str], BaseModel]) -> list[dict[str, Any]]:
        """Rows of the view over entities by name of their type and key; times are UTC, naive."""
        with _duckdb_connection() as duck:
            for name, entity_type in self._entity_types.items():
                mine = [state for (of, _), state in states.items() if of == name]
                duck.register(name, _table(entity_type, mine))
            found = duck.execute(self._query)
            names = [column[0] for column in found.description]
            return [dict(zip(names, row, strict=True)) for row in found.fetchall()]

    def named(self, entity: BaseModel) -> tuple[str, str]:
        """Name of the entity's type, and its key; raises AssertionError for a foreign model."""
        for name, entity_type in self._entity_types.items():
            if type(entity) is entity_type.model:
                return name, entity_type.key_of(entity)
        raise AssertionError(f"{type(entity).__name__} is no entity type of the app")

    def differences(
        self, found: Sequence[ExpectedRow], expected: Sequence[ExpectedRow]
    ) -> list[str]:
        """Lines for rows that only one side has; order counts where the view has one."""
        if self._ordered and len(found) == len(expected):
            pairs = zip(found, expected, strict=True)
            different = [pair for pair in pairs if not _equal(*pair)]
            return [f"found {dict(one)!r}, expected {dict(other)!r}" for one, other in different]
        left = list(found)
        lines = []
        for row in expected:
            place = next((at for at, one in enumerate(left) if _equal(one, row)), None)
            if place is None:
                lines.append(f"missing {dict(row)!r}")
            else:
                del left[place]
        return [*lines, *(f"not expected {dict(row)!r}" for row in left)]


class GivenEntities:
    """Entities as they are now, by name of their type and key."""

    def __init__(
        self, behaviour: ViewBehaviour, states: Mapping[tuple[str, str], BaseModel]
    ) -> None:
        self._behaviour, self.states = behaviour, states

    def when(self, *entities: BaseModel) -> GivenEntities:
        """Create these entities, or replace those that have their keys."""
        changed = {self._behaviour.named(entity): entity for entity in entities}
        return GivenEntities(self._behaviour, {**self.states, **changed})

    def when_deleted(self, *entities: BaseModel) -> GivenEntities:
        """Delete the entities that have the keys of these; raises AssertionError for others."""
        gone = {self._behaviour.named(entity) for entity in entities}
        unknown = gone - self.states.keys()
        assert not unknown, f"{sorted(unknown)} do not exist, so they cannot be deleted"
        left = {name: state for name, state in self.states.items() if name not in gone}
        return GivenEntities(self._behaviour, left)

    def then(self, *rows: ExpectedRow) -> GivenEntities:
        """The view has exactly these rows; in this order if its SQL has one.

        Raises AssertionError with the rows that differ.
        """
        found = self._behaviour.rows(self.states)
        different = self._behaviour.differences(found, rows)
        assert not different, "the view differs:\n  " + "\n  ".join(different)
        return self


@contextmanager
def _duckdb_connection() -> Iterator[Any]:
    try:
        import duckdb
    except ModuleNotFoundError as cause:
        raise MissingExtra("duckdb", "testing") from cause
    with duckdb.connect() as connection:
        yield connection


def _equal(one: ExpectedRow, other: ExpectedRow) -> bool:
    return one.keys() == other.keys() and all(_alike(one[name], other[name]) for name in one)


def _alike(one: Any, other: Any) -> bool:
    """Whether a row's value is the expected one, also within lists and objects."""
    one, other = _utc(one), _utc(other)
    if isinstance(one, bool) is not isinstance(other, bool):
        return False  # Python calls True and 1 equal
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_alike(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other)


def _utc(value: Any) -> Any:
    """A time as rows have it, in UTC without a zone; a UUID as its text."""
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.astimezone(UTC).replace(tzinfo=None)
    return str(value) if isinstance(value, UUID) else value


def _table(entity_type: EntityType, states: Sequence[BaseModel]) -> pa.Table:
    """States as rows, with the columns that a view's SQL may name."""
    # DuckDB's zoned times need an extension: these are of UTC.
    schema = pa.schema([(each.name, _without_zone(each.type)) for each in entity_type.arrow_schema])
    rows = []
    for state in states:
        given = state.model_dump(by_alias=True)
        rows.append({each.name: _value(given.get(each.name), each.type) for each in schema})
    table = pa.Table.from_pylist(rows, schema=schema)
    keys = pa.array([entity_type.key_of(state) for state in states], pa.string())
    return table.append_column("__key", keys)


def _without_zone(kind: pa.DataType) -> pa.DataType:
    return pa.timestamp("us") if pa.types.is_timestamp(kind) else kind


def _value(value: Any, kind: pa.DataType) -> Any:
    """A value of a model as Arrow takes it for a type."""
    if value is None:
        return None
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.astimezone(UTC).replace(tzinfo=None)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, UUID):
        return str(value)
    if pa.types.is_struct(kind):
        return {each.name: _value(value.get(each.name), each.type) for each in kind}
    if pa.types.is_map(kind):
        return [(name, _value(each, kind.item_type)) for name, each in value.items()]
    if pa.types.is_list(kind):
        return [_value(each, kind.value_type) for each in value]
    return value
