"""What a kept view is to a store: its table and columns; small, and pickled to tasks.

A view is (name, version). Its table carries the version from the first day, so that a new version
is built beside the one that readers see (C28).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

if TYPE_CHECKING:
    # Tasks unpickle tables, and have no use for the SQL parser.
    from everstate.views.plan import ViewPlan

LATEST_COLUMNS: Final = (
    *("key", "version", "change_id", "kind", "as_of", "occurred_at", "recorded_at"),
    *("generation", "partition", "offset", "provenance", "state"),
)
HISTORY_COLUMNS: Final = (
    *("key", "version", "change_id", "kind", "as_of", "occurred_at", "recorded_at"),
    *("schema_version", "generation", "partition", "offset"),
    *("provenance", "transaction", "event", "state"),
)
HISTORY_FINGERPRINT: Final = "history/2"

Image: TypeAlias = Literal["original", "current"]


def physical(name: str, version: int = 1) -> str:
    """Name of the table behind a version of a view (C28)."""
    return f"{name}__v{version}"


def latest_of(entity: str) -> str:
    """Name of the view that is the core of an entity type."""
    return f"{entity}_latest"


def history_of(entity: str) -> str:
    """Name of the view that keeps every version of an entity type's entities."""
    return f"{entity}_history"


@dataclass(frozen=True, slots=True)
class RowTable:
    """One row a key: ``columns`` of the newest version that the view's WHERE holds for."""

    view: str
    version: int
    fingerprint: str
    columns: tuple[str, ...]
    kind: Literal["row"] = "row"
    images: tuple[Image, ...] = ("current",)

    @property
    def name(self) -> str:
        """The table behind the view."""
        return physical(self.view, self.version)


@dataclass(frozen=True, slots=True)
class SumTable:
    """Sums per group: ``groups``, a shard per partition, and ``sums`` by their kind."""

    view: str
    version: int
    fingerprint: str
    groups: tuple[str, ...]
    sums: tuple[tuple[str, Literal["count", "sum"]], ...]
    kind: Literal["linear"] = "linear"
    images: tuple[Image, ...] = ("original", "current")

    @property
    def name(self) -> str:
        """The table behind the view."""
        return physical(self.view, self.version)


@dataclass(frozen=True, slots=True)
class HistoryTable:
    """Every change, appended."""

    view: str
    version: int
    fingerprint: str = HISTORY_FINGERPRINT
    kind: Literal["history"] = "history"
    images: tuple[Image, ...] = ()

    @property
    def name(self) -> str:
        """The table behind the view."""
        return physical(self.view, self.version)


KeptTable: TypeAlias = RowTable | SumTable | HistoryTable


def planned_columns(table: KeptTable) -> tuple[str, ...]:
    """Columns of planned changes that hold what each image is to a view."""
    return tuple(planned_column(table, image) for image in table.images)


def planned_column(table: KeptTable, image: Image) -> str:
    """Column of planned changes with what an image is to a view.

    Named by the version's table, which means one plan for ever: a change that waits is applied
    only to those views that it was planned for (V2).
    """
    return f"{table.name}__{image}"


def kept_table(plan: ViewPlan, version: int) -> KeptTable:
    """The table of a version of a declared view."""
    if plan.kind == "linear":
        groups = tuple(column.name for column in plan.group)
        sums = tuple((a.name, a.kind) for a in plan.accumulators)
        return SumTable(plan.name, version, plan.fingerprint, groups, sums)
    columns = tuple(column.name for column in plan.row)
    return RowTable(plan.name, version, plan.fingerprint, columns)


@dataclass(frozen=True, slots=True)
class Core:
    """The core of an entity type: `latest`, which judges every record, and the views that ride.

    A rider is written in the core's own transaction when its position is where the range begins.
    """

    entity: str
    topic: str
    riders: tuple[KeptTable, ...] = ()
    ids: HistoryTable | None = None
    """Where ids of older versions are looked up, if a history is kept."""
    generation: int = 1
    version: int = 1
    held_max: int = 10_000

    @property
    def view(self) -> str:
        """Name of the core's view."""
        return latest_of(self.entity)

    @property
    def table(self) -> str:
        """The table of `latest`, which is the version gate."""
        return physical(self.view, self.version)


CORE_FINGERPRINT: Final = "core/2"

Vector: TypeAlias = Mapping[int, int]
"""Partition → next offset, exclusive, within one generation."""


def covers(ahead: Vector, behind: Vector) -> bool:
    """Whether a vector is at or past another in every partition."""
    return all(ahead.get(partition, 0) >= offset for partition, offset in behind.items())


def lacking(tables: Sequence[KeptTable], names: Sequence[str]) -> list[KeptTable]:
    """Tables that a planned change with columns of these names was not planned for."""
    present = set(names)
    return [table for table in tables if not present.issuperset(planned_columns(table))]


Row: TypeAlias = tuple[Any, ...]
