"""Given / When / Then for a view in SQL; no servers.

Spark runs the view's definition over the entities of the test, as it does for a proof: the engine,
its settings, the types of the fields and the texts are those of a running project, so a test is
green only where the running view has these rows, and fails where that would stop (decision 84).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from uuid import UUID

from pydantic import BaseModel

from everstate.changes import EntityType
from everstate.config import load
from everstate.errors import InvalidView, MissingExtra
from everstate.views.kinds import ViewPlan

if TYPE_CHECKING:
    from everstate.app import App

ExpectedRow = Mapping[str, Any]
GivenStates = Mapping[tuple[str, str], BaseModel]


class ViewBehaviour:
    """The rows of a view: ``given(entities).when(changed).then(rows)``."""

    def __init__(self, plan: ViewPlan, entity_types: Mapping[str, EntityType]) -> None:
        """``entity_types``: those that the test gives entities of, by name."""
        self.plan, self._entity_types = plan, entity_types

    @classmethod
    def of(cls, app: App, name: str) -> ViewBehaviour:
        """The behaviour of a view that an app has declared over the states of entities.

        Raises UnknownView; InvalidView for one that no single query over states describes: a view
        of changes, with a trigger, policies or a time to live, a timeline, or a view in Python.
        """
        plan = app.view_plan(name)
        if not plan.sql or plan.rules or plan.source != "live":
            raise InvalidView(
                name,
                f"its rows ({plan.kind}) do not follow from the present states alone, so that "
                "ViewBehaviour cannot compute them.",
                advice="Test it in a running project: `everstate views verify`.",
            )
        return cls(plan, app.entities)

    def given(self, *entities: BaseModel) -> GivenEntities:
        """Start with these entities, of one or several types; without any there is none."""
        return GivenEntities(self, {}).when(*entities)

    def rows(self, states: GivenStates) -> list[dict[str, Any]]:
        """Rows of the view over entities by name of their type and key.

        Raises MissingExtra without PySpark, InvalidChange for an entity that no log would take,
        and PipelineError where the running view would stop, with Spark's reason. Cost: 14 to
        23 s on two busy cores for the first call of a process, which starts Spark, then about 1 s.
        """
        try:
            from everstate.pipeline.batch.given import given_rows
        except ModuleNotFoundError as cause:
            raise MissingExtra.of(cause) or cause from cause
        texts: dict[str, list[tuple[str, bytes]]] = defaultdict(list)
        for (name, key), state in states.items():
            texts[name].append((key, self._entity_types[name].encode(state)))
        # Whatever cluster the project has, a test needs one core of this machine.
        config = load(pipeline={"master": "local[1]"})
        table = given_rows(config, self.plan, self._entity_types, texts)
        rows: list[dict[str, Any]] = table.to_pylist(maps_as_pydicts="strict")
        return rows

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
        if self.plan.is_ordered and len(found) == len(expected):
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

    def __init__(self, behaviour: ViewBehaviour, states: GivenStates) -> None:
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


def _equal(one: ExpectedRow, other: ExpectedRow) -> bool:
    return one.keys() == other.keys() and all(_alike(one[name], other[name]) for name in one)


def _alike(one: Any, other: Any) -> bool:
    """Whether a row's value is the expected one, also within lists and objects."""
    one, other = _utc(one), _utc(other)
    if isinstance(one, bool) is not isinstance(other, bool):
        return False  # Python calls True and 1 equal
    if isinstance(one, float | Decimal) and isinstance(other, float | Decimal):
        # Readers get a quotient of aggregates as numeric, where Spark has a double.
        is_float = isinstance(one, float) or isinstance(other, float)
        are_none = math.isnan(one) and math.isnan(other)
        return are_none or (math.isclose(one, other, rel_tol=1e-9) if is_float else one == other)
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
