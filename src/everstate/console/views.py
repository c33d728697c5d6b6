"""Views on pages: their definitions, positions and proofs, and the rows of one of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from everstate.console.pages import VALUE_MAX
from everstate.errors import InvalidView, NotFound, ViewFailed
from everstate.http.answers import whole_number
from everstate.http.callers import EVERY, Caller
from everstate.serving import Reader
from everstate.serving.answers import ViewRow
from everstate.serving.masking import entities_read_by
from everstate.serving.overview import views
from everstate.serving.words import cell
from everstate.views.project import Project, entities_of, known_views

ROWS: Final = 50
_ROW_MAX: Final = 1_000
"""Characters of all values of a row, so that a page of them stays small."""
_PAGES_MAX: Final = 20_000


@dataclass(frozen=True, slots=True)
class ShownView:
    """One version of a view, and its definition."""

    row: ViewRow
    sql: str | None
    """Its SQL; ``None``: it was not declared in SQL."""
    more: str
    """The rest of its definition as JSON; empty: there is none."""


@dataclass(frozen=True, slots=True)
class ViewsPage:
    """All versions of all views, and the views that the app declares and that are refused."""

    views: tuple[ShownView, ...]
    refused: Mapping[str, InvalidView]

    def of(self, name: str) -> tuple[ShownView, ...]:
        """The versions of one view."""
        return tuple(each for each in self.views if each.row.name == name)


def views_page(reader: Reader) -> ViewsPage:
    """The state of all views, without a count of their rows; raises Unavailable."""
    control = reader.connection.standings(reader.schema)
    definitions = {(row.name, row.version): row.definition for row in control.versions()}
    found = []
    for row in views(reader.config, reader.connection, is_counted=False):
        noted = dict(definitions.get((row.name, row.version), {}))
        text = noted.pop("sql", None)
        more = json.dumps(noted, ensure_ascii=False, default=str) if noted else ""
        found.append(ShownView(row, text, more))
    return ViewsPage(tuple(found), dict(reader.project.refused_views))


def shown_to(page: ViewsPage, project: Project, caller: Caller) -> ViewsPage:
    """The views of entity types that a caller may read."""
    views = tuple(
        each
        for each in page.views
        if all(caller.may(entity, "read") for entity in entities_read_by(project, each.row.name))
    )
    return ViewsPage(views, page.refused if caller.may(EVERY, "read") else {})


@dataclass(frozen=True, slots=True)
class RowsPage:
    """A page of a view's rows."""

    name: str
    versions: tuple[ShownView, ...] | None
    """``None``: not known, because a server takes long to answer."""
    entity: str | None
    """The entity type whose keys its first column has; ``None``: it has none."""
    columns: tuple[str, ...]
    rows: Sequence[Sequence[object]]
    number: int
    has_more: bool
    first: str
    missing: str | None = None
    """Why there are no rows to show; ``None``: there are, or the view is empty."""

    @property
    def value_max(self) -> int:
        """Characters that a value may have."""
        return max(20, min(VALUE_MAX, _ROW_MAX // max(1, len(self.columns))))


def rows_page(
    reader: Reader, name: str, versions: tuple[ShownView, ...] | None, given: Mapping[str, str]
) -> RowsPage:
    """A page of the rows of a view, all or those with a `first` column; it asks no log.

    Raises UnknownView and InvalidQuery. Cost: the rows up to the end of the page.
    """
    expected = f"1 to {_PAGES_MAX:,}"
    number = whole_number({"page": "1", **given}, "page", expected, least=1, most=_PAGES_MAX)
    first = given.get("first", "")
    empty = partial(RowsPage, name, versions, None, (), (), 1, False, "")
    if name in reader.project.derivations:
        return empty(f"it is a derived topic; `everstate views show {name}` prints its records.")
    only = first.replace("\x00", "") or None
    offset = (number - 1) * ROWS
    try:
        columns, rows = reader.rows(name, limit=ROWS + 1, offset=offset, first=only)
    except NotFound:
        if not versions:
            raise
        return empty("no version of the view is published yet; readers see it when it is built.")
    except ViewFailed as failed:
        return empty(failed.message)
    shown = [["–" if each is None else cell(each) for each in row] for row in rows[:ROWS]]
    has_more = len(rows) > ROWS
    entity = _entity(reader, name, columns)
    return RowsPage(name, versions, entity, columns, shown, number, has_more, first)


def _entity(reader: Reader, name: str, columns: Sequence[str]) -> str | None:
    """The one entity type of a view whose first column is its key."""
    project = reader.project
    if columns[:1] != ("key",) or name not in known_views(project):
        return None
    found = entities_of(project, name)
    return found[0] if len(found) == 1 else None
