"""A view group as a task needs it: which tables to write, picklable and small."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from psycopg import sql

from everstate.changes import EntityType

if TYPE_CHECKING:
    # Tasks unpickle a group plan, and have no use for the SQL parser.
    from everstate.views.plan import ViewPlan

LATEST_COLUMNS: Final = (
    "key",
    "version",
    "change_id",
    "kind",
    "as_of",
    "occurred_at",
    "recorded_at",
    "generation",
    "partition",
    "offset",
    "provenance",
    "state",
)
HISTORY_COLUMNS: Final = (
    "key",
    "version",
    "change_id",
    "kind",
    "as_of",
    "occurred_at",
    "recorded_at",
    "schema_version",
    "generation",
    "partition",
    "offset",
    "provenance",
    "transaction",
    "event",
    "state",
)
GATE_COLUMNS: Final = ("key", "version", "change_id", "as_of")

_TYPES: Final = {
    "key": 'text COLLATE "C" NOT NULL',
    "version": "bigint NOT NULL",
    "change_id": "uuid NOT NULL",
    "kind": "text NOT NULL",
    "as_of": "timestamptz NOT NULL",
    "occurred_at": "timestamptz NOT NULL",
    "recorded_at": "timestamptz NOT NULL",
    "schema_version": "int NOT NULL",
    "generation": "int NOT NULL",
    "partition": "int NOT NULL",
    "offset": "bigint NOT NULL",
    "provenance": "jsonb NOT NULL",
    "transaction": "jsonb",
    "event": "jsonb",
    "state": "jsonb",
}


@dataclass(frozen=True, slots=True)
class PlannedView:
    """A view of an entity type: its plan and the version of its table (`__v<N>`)."""

    plan: ViewPlan
    version: int = 1


@dataclass(frozen=True, slots=True)
class RowTable:
    """Table of a row view: `key`, `version` and ``columns``."""

    view: str
    table: str
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LinearTable:
    """Table of a linear view: ``groups``, `shard`, and sums by kind."""

    view: str
    table: str
    groups: tuple[str, ...]
    sums: tuple[tuple[str, Literal["count", "sum"]], ...]


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Views that share one position row, one version gate and one transaction (C13).

    ``gate_table`` is `latest` itself when ``keeps_latest``, else the group's own copy.
    ``epoch`` is compared with the position row's, so that a plan from before a quarantine changes
    nothing.
    """

    view_group: str
    entity: str
    generation: int
    topic: str
    schema_name: str
    keeps_latest: bool
    gate_table: str
    history_table: str | None
    ids_table: str | None
    """Where ids of older versions are looked up: the entity type's history, if it is kept."""
    rows: tuple[RowTable, ...]
    linears: tuple[LinearTable, ...]
    epoch: int = 0
    held_max: int = 10_000


def main_group(entity: str) -> str:
    """Name of the view group that keeps `latest`."""
    return entity


def own_group(entity: str, view: str) -> str:
    """Name of the view group of a view that is kept alone."""
    return f"{entity}/{view}"


def gate_copy(view: str) -> str:
    """Table of the gate of a view that is kept alone."""
    return f"{view}_gate"


def physical(name: str, version: int = 1) -> str:
    """Name of the immutable table behind a reader's name (C28)."""
    return f"{name}__v{version}"


def planned_column(view: str, image: Literal["current", "original"]) -> str:
    """Column of planned changes with what an image is to a view.

    Named by the view, whose name means one definition for ever (`control.register_view`): changes
    that wait keep their columns while views come and go around them.
    """
    return f"{view}__{image}"


def group_plan(
    entity_type: EntityType,
    views: Sequence[PlannedView],
    *,
    topic: str,
    schema_name: str,
    generation: int = 1,
    alone: str | None = None,
    history: bool = True,
    epoch: int = 0,
    held_max: int = 10_000,
) -> GroupPlan:
    """Plan of the main group, or of the view ``alone``, from the views that it keeps.

    ``history`` tells whether the history is kept: here, or alone as `<entity>_history`.
    """
    entity = entity_type.name
    history_table = physical(f"{entity}_history") if history else None
    keeps_history = alone in (None, f"{entity}_history")
    rows: list[RowTable] = []
    linears: list[LinearTable] = []
    for view in sorted(views, key=lambda view: view.plan.name):
        plan, table = view.plan, physical(view.plan.name, view.version)
        if plan.kind == "linear":
            groups = tuple(column.name for column in plan.group)
            sums = tuple((a.name, a.kind) for a in plan.accumulators)
            linears.append(LinearTable(plan.name, table, groups, sums))
        else:
            columns = tuple(column.name for column in plan.row)
            rows.append(RowTable(plan.name, table, columns))
    return GroupPlan(
        view_group=main_group(entity) if alone is None else own_group(entity, alone),
        entity=entity,
        generation=generation,
        topic=topic,
        schema_name=schema_name,
        keeps_latest=alone is None,
        gate_table=physical(f"{entity}_latest") if alone is None else gate_copy(alone),
        history_table=history_table if keeps_history else None,
        ids_table=history_table,
        rows=tuple(rows),
        linears=tuple(linears),
        epoch=epoch,
        held_max=held_max,
    )


def columns_ddl(names: tuple[str, ...]) -> sql.Composed:
    """Column definitions of the store's own columns."""
    parts = [sql.SQL("{} {}").format(sql.Identifier(n), sql.SQL(_TYPES[n])) for n in names]
    return sql.SQL(", ").join(parts)
