"""Views over other views: they have no position, and most have no table.

Such a view names its inputs, which are ordinary views, and is behind when one of them is. An input
that was not declared is a *part*: its name is made of its fingerprint, so that views that need the
same part share it, and it is dropped when no version needs it any more.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Protocol

import pyarrow as pa
from psycopg.sql import Composable, Composed

from everstate.changes import EntityType
from everstate.views.definition import ViewDefinition
from everstate.views.kinds.kind import BatchSource, Layout, ViewPlan
from everstate.views.tables import Image, KeptTable

INPUTS: Final = "inputs"
"""Key of the names of the inputs in the definition in the registry."""
_HASH: Final = 12


class Names(Protocol):
    """Relations and expressions of a store, for the queries of a view over other views."""

    def view(self, name: str) -> Composable:
        """The relation that readers see under the name of a view."""

    def table(self, name: str) -> Composable:
        """The own table of the version that is read, for a view that has one."""

    def field(self, path: Sequence[str], kind: pa.DataType) -> Composable:
        """A typed field of a state, from the column `state` of `latest` and `history`."""


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

    def table(self, version: int) -> KeptTable:
        """Not available: it has no table that tasks write."""
        raise AssertionError(f"{self.name} is read from other views")

    def layout(self, types: Mapping[str, pa.DataType]) -> Layout:
        """Not available: it has no table that tasks write."""
        raise AssertionError(f"{self.name} is read from other views")

    def columns(self, image: Image) -> str:
        """Not available: no change is planned for it."""
        raise AssertionError(f"{self.name} is read from other views")

    def batch_sql(self, table: str) -> str:
        """Not available: it is not built."""
        raise AssertionError(f"{self.name} is read from other views")

    def kept(self, table: Composable) -> Composed:
        """Not available: see :meth:`compared`."""
        raise AssertionError(f"{self.name} is read from other views")

    def reader(self, table: Composable) -> Composed:
        """Not available: see :meth:`read`."""
        raise AssertionError(f"{self.name} is read from other views")


def part_of(plan: ViewPlan, entity_type: EntityType, hint: str) -> ViewPlan:
    """A plan as a part: an undeclared input, with a name made of its fingerprint."""
    name = f"{entity_type.name[:20]}__{hint[:12]}_{plan.fingerprint[:_HASH]}"
    assert isinstance(plan.declared, ViewDefinition)
    return replace(plan, name=name, declared=replace(plan.declared, name=name, is_part=True))
