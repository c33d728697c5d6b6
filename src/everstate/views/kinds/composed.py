"""Views over other views: they have no position, and most have no table.

Such a view names its inputs, which are ordinary views, and is behind when one of them is. An input
that was not declared is a *part*: its name is made of its fingerprint, so that views that need the
same part share it, and it is dropped when no version needs it any more.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from psycopg.sql import Composed

from everstate.changes import EntityType
from everstate.views.definition import ViewDefinition
from everstate.views.kinds.kind import BatchSource, Names, ViewPlan

INPUTS: Final = "inputs"
"""Key of the names of the inputs in the definition in the registry."""
_HASH: Final = 12


@dataclass(frozen=True)
class ComposedPlan(ViewPlan):
    """A view over other views."""

    source: ClassVar[BatchSource] = "live"

    @property
    @abstractmethod
    def inputs(self) -> tuple[str, ...]:
        """Names of the views that it reads."""

    @property
    def definition(self) -> Mapping[str, Any]:
        """Its definition in the registry, with its inputs."""
        return {**super().definition, INPUTS: list(self.inputs)}

    @abstractmethod
    def read(self, names: Names) -> Composed:
        """PostgreSQL's query of the rows that readers see."""

    def unlimited_read(self, names: Names) -> Composed:
        """The same without LIMIT, for the comparison with the author's SQL."""
        return self.read(names)

    @abstractmethod
    def compared(self, names: Names) -> Composed:
        """PostgreSQL's query that is compared with the batch, key columns first."""

    @abstractmethod
    def batch(self, tables: Mapping[str, str]) -> str:
        """Spark SQL of the same; ``tables``: a table for each input, by the input's name.

        The tables have live entities or accepted changes, see :attr:`reads`.
        """

    def as_read(self, tables: Mapping[str, str]) -> str | None:
        """The author's SQL over the same tables, without ORDER BY and LIMIT; ``None``: no SQL."""
        return None

    @abstractmethod
    def as_shown(self, tables: Mapping[str, str]) -> str:
        """Spark SQL of the rows that readers see, over the same tables."""

    @property
    def reads(self) -> BatchSource:
        """The source that :meth:`batch` reads for each input."""
        return "live"

    def _absent(self, *_: Any, **__: Any) -> Any:
        """Not available: no change is planned for it, and it has no table that tasks write."""
        raise AssertionError(f"{self.name} is read from other views")

    table = layout = columns = batch_sql = kept = reader = _absent


def part_of(plan: ViewPlan, entity_type: EntityType, hint: str) -> ViewPlan:
    """A plan as a part: an undeclared input, with a name made of its fingerprint."""
    name = f"{entity_type.name[:20]}__{hint[:12]}_{plan.fingerprint[:_HASH]}"
    assert isinstance(plan.declared, ViewDefinition)
    return replace(plan, name=name, declared=replace(plan.declared, name=name, is_part=True))
