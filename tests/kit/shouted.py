"""A kind of view that only tests know, with its own way to declare it: a field in capitals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from everstate.views.kinds import ViewPlan
from everstate.views.kinds.images import IMAGE, fingerprint
from everstate.views.kinds.row import Column, RowPlan
from everstate.views.plan import EntityTypes, WayToDeclare
from everstate.views.stores.registry import kept_in
from everstate.views.tables import HOME


@dataclass(frozen=True)
class Shouted:
    """The declaration: a text field of every live entity, in capitals."""

    name: str
    entity: str
    text: str
    store: str = HOME

    @property
    def stored(self) -> dict[str, Any]:
        return {"shouted": self.text, "store": self.store}


@dataclass(frozen=True)
class ShoutedPlan(RowPlan):
    """Rows like those of a SELECT, and not from SQL."""

    kind: ClassVar[str] = "shouted"


def shouted_plan(declared: Shouted, entity_types: EntityTypes) -> ViewPlan:
    """The plan of a declaration."""
    column = Column("c0", declared.text, f"upper(`{IMAGE}`.`{declared.text}`)")
    meaning = fingerprint(entity_types[declared.entity], ["shouted", column.spark_sql])
    given = (declared.name, declared.entity, meaning, declared, (declared.text,))
    plan = ShoutedPlan(*given, row=(column,))
    return plan if declared.store == HOME else kept_in(declared.store, plan)


SHOUTED = WayToDeclare(
    Shouted,
    shouted_plan,
    lambda row: Shouted(row.name, row.entity, row.definition["shouted"], row.store),
)
"""For a line in `WAYS`."""
