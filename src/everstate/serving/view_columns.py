"""Columns of a view: their types, which of them are the key, and how they are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from everstate.errors import InvalidQuery, UnknownView
from everstate.postgres import Connection, PreparedStatements, identifier
from everstate.serving.predicates import Term, hint_of
from everstate.views.control import ViewVersion
from everstate.views.kinds import HistoryPlan, LatestPlan, ViewPlan
from everstate.views.project import Project, known_views

_CASTS: Final[Mapping[str, str]] = {
    **{name: name for name in ("bigint", "numeric", "boolean", "date", "uuid", "text")},
    **dict.fromkeys(("smallint", "integer"), "bigint"),
    **dict.fromkeys(("real", "double precision"), "float8"),
    "timestamp without time zone": "timestamp",
    "timestamp with time zone": "timestamptz",
    "character varying": "text",
}
"""PostgreSQL type of a column → the type that it is compared as."""
_UNSEEN: Final = frozenset({"tsvector"})
"""Types of columns that only searches use."""
_NEVER_NULL: Final = frozenset({"_key", "_version", "key", "version"})
_QUERY: Final = (
    b"SELECT view.relname, one.attname, format_type(one.atttypid, NULL) FROM pg_attribute AS one "
    b"JOIN pg_class AS view ON view.oid = one.attrelid "
    b"JOIN pg_namespace AS home ON home.oid = view.relnamespace "
    b"WHERE home.nspname = %s AND view.relkind = 'v' AND one.attnum > 0 AND NOT one.attisdropped "
    b"AND (%s::text IS NULL OR view.relname = %s) ORDER BY one.attrelid, one.attnum"
)


@dataclass(frozen=True, slots=True)
class ViewColumn:
    """A column that readers see."""

    name: str
    type: str
    """PostgreSQL's name of its type."""

    @property
    def cast(self) -> str | None:
        """The type that it is compared as; ``None``: it holds an object or a list."""
        return _CASTS.get(self.type)

    @property
    def term(self) -> Term:
        """The column in conditions and orders; it must be of a type that is compared."""
        assert self.cast is not None
        read_as = "whole" if self.cast == "bigint" else self.cast
        is_nullable = self.name not in _NEVER_NULL
        return Term(self.name, identifier(self.name), self.cast, self.type, read_as, is_nullable)


def columns_of(
    connection: Connection | PreparedStatements, schema: str, view: str | None
) -> dict[str, list[ViewColumn]]:
    """Columns that readers see, by view: of one view, or of all. Cost: one statement."""
    found: dict[str, list[ViewColumn]] = {}
    for name, column, kind in connection.execute(_QUERY, (schema, view, view)):
        columns = found.setdefault(name, [])
        if kind not in _UNSEEN:
            columns.append(ViewColumn(column, kind))
    return found


def plan_of(project: Project, view: str, version: ViewVersion | None) -> ViewPlan | None:
    """The plan of a view's version; ``None``: it is of another declaration than the present one."""
    for entity in project.entities:
        if view == f"{entity}_latest":
            return LatestPlan.of(entity)
        if view == f"{entity}_history":
            return HistoryPlan.of(entity)
    plan = project.views.get(view)
    if plan is None or version is None or plan.fingerprint != version.fingerprint:
        return None
    return plan


def key_of(
    project: Project, view: str, version: ViewVersion | None, columns: Sequence[ViewColumn]
) -> tuple[ViewColumn, ...] | None:
    """Columns that no two rows of a version have alike; ``None``: there are none to compare by."""
    plan = plan_of(project, view, version)
    names = plan.shown_key if plan is not None else None
    if view in project.entities:
        names = ("_key",)
    if names is None:
        return None
    by_name = {column.name: column for column in columns}
    found = tuple(by_name[name] for name in names if name in by_name)
    is_whole = len(found) == len(names) and all(column.cast for column in found)
    return found if is_whole else None


def check_known(project: Project, view: str) -> None:
    """Raise UnknownView when an app declares no such view; a refused one may have rows."""
    known = known_views(project)
    if view not in known and view not in project.refused_views:
        raise UnknownView(view, known)


def column_of(view: str, columns: Sequence[ViewColumn], name: str) -> Term:
    """A column by its name; raises InvalidQuery with the nearest known ones."""
    known = [column.name for column in columns]
    if name not in known:
        raise InvalidQuery(f"{view} has no column {name!r}.", advice=hint_of(name, known))
    column = columns[known.index(name)]
    if column.cast is None:
        raise InvalidQuery(f"{view}: {name} is {column.type}, which is not compared.")
    return column.term
