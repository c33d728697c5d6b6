"""Pages of the rows of a view, and single rows, each with the version and position they are of.

A page is read in one snapshot of the database with the view's position. A page after another one is
of a later position: it goes on after the last row by the values of that row, so rows that came or
went before it move nothing.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from functools import partial
from typing import Any, Final

from everstate.changes.written import written_value
from everstate.config import Config
from everstate.errors import (
    ContradictoryQuery,
    InvalidQuery,
    NotFound,
    Unavailable,
    ValueRefused,
    ViewFailed,
)
from everstate.postgres import Connection, identifier, literal
from everstate.serving.places import check_here
from everstate.serving.predicates import Term, condition, order_term
from everstate.serving.snapshots import Standpoint, at_one_position
from everstate.serving.statements import aware
from everstate.serving.view_columns import (
    ViewColumn,
    check_known,
    column_of,
    columns_of,
    key_of,
    plan_of,
)
from everstate.views.kinds.search import WORDS, SearchPlan, searchable
from everstate.views.project import Project
from everstate.views.stores.store import HEADLINE, RANK
from everstate.views.tables import HOME, Row

_PLACE: Final = "_everstate_place"
_TEXT: Final = "_everstate_text"
_ROW: Final = "_everstate_row"
_ALL: Final = "true"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsQuery:
    """Which rows of a view are wanted."""

    where: Sequence[str] = ()
    order: Sequence[str] = ()
    """Columns; none: the order of the definition, or else of the key."""
    after: str | None = None
    """The cursor of an earlier page with the same order."""
    limit: int = 100
    words: str | None = None
    """Words to search: the best rows come first, without order and cursor."""
    at: datetime | None = None
    """Of a timeline: the rows that were valid at this time."""


@dataclass(frozen=True, slots=True)
class ViewPage:
    """Rows of one version of a view at one position."""

    standpoint: Standpoint
    columns: Sequence[ViewColumn]
    rows: Sequence[Row]
    after: str | None = None
    """Continue after the last row with it; ``None``: there are no more rows."""
    more: tuple[str, ...] = ()
    """Names of values after those of the columns."""

    def records(self) -> list[dict[str, Any]]:
        """The rows as mappings of column to value."""
        names = [*(column.name for column in self.columns), *self.more]
        return [dict(zip(names, row, strict=True)) for row in self.rows]


def read_page(
    config: Config,
    project: Project,
    view: str,
    asked: RowsQuery,
    *,
    wait_for: str | None = None,
) -> ViewPage:
    """A page of the rows of a view.

    ``wait_for``: a token that the rows must cover. Raises UnknownView, NotFound while no version is
    published, InvalidQuery for an unknown column, a value not of its type and an unknown cursor,
    ContradictoryQuery, NotCaughtUp, Unavailable. Cost: by an index where the view has one in this
    order; else a pass over the view and a sort.
    """

    def read(shown: _Shown) -> ViewPage:
        return shown.page(asked) if asked.words is None else shown.found(asked, asked.words)

    page = _read(config, project, view, read, wait_for)
    is_here = page.standpoint.version.store == HOME
    return page if is_here else _found_elsewhere(config, project, page.standpoint, asked, wait_for)


def _found_elsewhere(
    config: Config, project: Project, here: Standpoint, asked: RowsQuery, wait_for: str | None
) -> ViewPage:
    """The rows in another store that have some words; no transaction is open meanwhile."""
    # Imported here: it loads the drivers of stores.
    from everstate.views.stores.showing import found_rows

    row, fresh = here.version, wait_for is not None
    if asked.where:
        raise ContradictoryQuery(f"a search in the store {row.store} takes no where.")
    try:
        names, rows = found_rows(
            config, row, project.entities, asked.words or "", asked.limit, fresh=fresh
        )
    except ViewFailed as cause:
        raise Unavailable(cause.message) from cause
    # The store finds its last writes later: then no token says which changes the rows have.
    here = here if fresh else replace(here, has_deferred=True)
    return ViewPage(here, (), rows, more=names)


def read_row(
    config: Config,
    project: Project,
    view: str,
    key: Sequence[str],
    *,
    wait_for: str | None = None,
) -> ViewPage:
    """The row of a view that has a key, as a page of one row.

    ``key``: a text for each column of the view's key. Raises NotFound when there is none, or the
    rows have no key; otherwise as :func:`read_page`. Cost: one row by index for most kinds of
    views.
    """
    try:
        return _read(config, project, view, lambda shown: shown.one(key), wait_for)
    except InvalidQuery as cause:
        raise _no_row(view, key) from cause


def _read(
    config: Config,
    project: Project,
    view: str,
    read: Callable[[_Shown], ViewPage],
    wait_for: str | None,
) -> ViewPage:
    check_known(project, view)
    shown = partial(_Shown, config.views.schema_name, project, view)
    try:
        return at_one_position(
            config, project, view, lambda *given: read(shown(*given)), wait_for=wait_for
        )
    except ValueRefused as cause:
        reason = f"a value cannot be compared with its column: {cause.message}."
        raise InvalidQuery(reason) from cause


class _Shown:
    """One version of a view, in a transaction."""

    def __init__(
        self,
        schema: str,
        project: Project,
        view: str,
        connection: Connection,
        standpoint: Standpoint,
    ) -> None:
        self._project, self._schema, self._view = project, schema, view
        self._version, self._connection = standpoint.version, connection
        self._standpoint = standpoint
        self._columns = columns_of(connection, schema, view).get(view, [])
        self._plan = plan_of(project, view, self._version)
        self._key = key_of(project, view, self._version, self._columns)
        self._find = partial(column_of, view, self._columns)

    def page(self, asked: RowsQuery) -> ViewPage:
        """A page in an order."""
        check_here(self._version)
        names, terms, relation = self._ordered(asked.order)
        conditions, values = self._conditions(asked)
        if asked.after is not None:
            last = _parsed(asked.after, self._version.version, names, terms)
            text, more = _behind(terms, last)
            conditions, values = [*conditions, text], [*values, *more]
        columns = ", ".join([*self._names, *(each.compared for each in terms)])
        query = (
            f"SELECT {columns} FROM {relation} WHERE {' AND '.join([_ALL, *conditions])} "
            f"ORDER BY {', '.join(each.order for each in terms) or '1'} LIMIT %s"
        )
        rows = self._rows(query.encode(), [*values, asked.limit + 1])
        after = None
        if len(rows) > asked.limit:
            last_row = rows[asked.limit - 1]
            after = _cursor(self._version.version, names, last_row[len(self._columns) :])
        shown = [row[: len(self._columns)] for row in rows[: asked.limit]]
        return ViewPage(self._standpoint, self._columns, shown, after)

    def found(self, asked: RowsQuery, words: str) -> ViewPage:
        """The rows that have some words, best first."""
        if asked.order or asked.after is not None or asked.at is not None:
            raise ContradictoryQuery("a search has its own order: give q, or order, after and at.")
        if self._version.store != HOME:
            return ViewPage(self._standpoint, (), ())  # its rows are read without this transaction
        declared = self._project.views.get(self._view)
        if declared is None:
            raise ContradictoryQuery(f"{self._view} cannot be searched.")
        plan = searchable(declared)
        if self._plan is None:
            raise ContradictoryQuery(
                f"the version of {self._view} that readers see is not of the present declaration.",
                advice="Search it when the new version is published.",
            )
        conditions, values = self._conditions(asked)
        query = search_query(self._schema, plan, conditions)
        rows = self._rows(query, [words, *values, asked.limit])
        return ViewPage(self._standpoint, self._columns, rows, more=(RANK, HEADLINE))

    def one(self, key: Sequence[str]) -> ViewPage:
        """The row with a key."""
        check_here(self._version)
        if self._key is None:
            raise NotFound(
                f"the rows of {self._view} have no key.", advice="Read them by `where` conditions."
            )
        if len(key) != len(self._key):
            names = "/".join(column.name for column in self._key)
            told = f"the key of a row of {self._view} is {names}."
            raise NotFound(told if names else f"{self._view} has one row, which has no key.")
        conditions, values = [_ALL], []
        for column, written in zip(self._key, key, strict=True):
            try:
                value = written_value(column.cast or "", written)
            except (ValueError, InvalidQuery) as cause:
                raise _no_row(self._view, key) from cause
            text, more = column.term.same(value)
            conditions.append(text)
            values += more
        query = (
            f"SELECT {', '.join(self._names)} FROM {self._relation} "
            f"WHERE {' AND '.join(conditions)} LIMIT 1"
        )
        rows = self._rows(query.encode(), values)
        if not rows:
            raise _no_row(self._view, key)
        return ViewPage(self._standpoint, self._columns, rows)

    @property
    def _names(self) -> list[str]:
        return [identifier(column.name) for column in self._columns]

    @property
    def _relation(self) -> str:
        return identifier(self._schema, self._view)

    def _rows(self, query: bytes, values: Sequence[Any]) -> list[Row]:
        return self._connection.execute(query, values, prepare=False, binary=True).fetchall()

    def _ordered(self, order: Sequence[str]) -> tuple[list[str], list[Term], str]:
        """Names and terms of an order in which no two rows are alike, and what they are over."""
        terms, names = [order_term(text, self._find) for text in order], list(order)
        if not order and self._plan is not None and self._plan.is_ordered:
            # PostgreSQL numbers the rows in the order of the view's own ORDER BY.
            numbered = (
                f"(SELECT shown.*, row_number() OVER () AS {_PLACE} "
                f"FROM {self._relation} AS shown) AS numbered"
            )
            place = Term(_PLACE, _PLACE, "bigint", is_nullable=False)
            return [_PLACE], [place], numbered
        if self._key is not None:
            given = {name.removeprefix("-") for name in names}
            for column in self._key:
                if column.name not in given:
                    names.append(column.name)
                    terms.append(column.term)
            return names, terms, self._relation
        # Rows without a key: their whole text, and a number among those that are alike in all.
        text = (
            f"(SELECT {_ROW}.*, {_ROW}::text AS {_TEXT}, "
            f"row_number() OVER (PARTITION BY {_ROW}::text) AS {_PLACE} "
            f"FROM {self._relation} AS {_ROW}) AS numbered"
        )
        terms.append(Term(_TEXT, _TEXT, "text", is_nullable=False))
        terms.append(Term(_PLACE, _PLACE, "bigint", is_nullable=False))
        return [*names, _TEXT, _PLACE], terms, text

    def _conditions(self, asked: RowsQuery) -> tuple[list[str], list[Any]]:
        """Conditions on rows, and their parameters."""
        parts: list[str] = []
        values: list[Any] = []
        for text in asked.where:
            part, more = condition(text, self._find).compose()
            parts.append(part)
            values += more
        if asked.at is not None:
            if self._plan is None or not self._plan.has_times:
                raise ContradictoryQuery(
                    f"{self._view} has only its present rows: give no at.",
                    advice=f"`everstate views query {self._view} --at …` computes them from the "
                    "archive; GET /query/v1/<entity>?at=… has the entities of a time.",
                )
            parts.append("valid_from <= %s AND (valid_to IS NULL OR valid_to > %s)")
            values += [aware(asked.at)] * 2
        return parts, values


def _no_row(view: str, key: Sequence[str]) -> NotFound:
    return NotFound(f"{view} has no row {'/'.join(key)!r}.")


def _behind(terms: Sequence[Term], last: Sequence[Any]) -> tuple[str, list[Any]]:
    """Condition of the rows that come after one in an order."""
    ways: list[str] = []
    values: list[Any] = []
    for place, (last_term, last_value) in enumerate(zip(terms, last, strict=True)):
        parts: list[str] = []
        for text, more in (
            *(each.same(value) for each, value in zip(terms[:place], last[:place], strict=True)),
            last_term.after(last_value),
        ):
            parts.append(text)
            values += more
        ways.append(f"({' AND '.join(parts)})")
    return f"({' OR '.join(ways) or 'false'})", values


def _cursor(version: int, names: Sequence[str], values: Sequence[Any]) -> str:
    """The values of a row by which an order continues, as an opaque text."""
    content = json.dumps([version, list(names), [_written(value) for value in values]])
    return base64.urlsafe_b64encode(content.encode()).rstrip(b"=").decode()


def _parsed(after: str, version: int, names: Sequence[str], terms: Sequence[Term]) -> list[Any]:
    """The values of a cursor; raises ContradictoryQuery for one of another version or order."""
    try:
        content = base64.b64decode(after + "=" * (-len(after) % 4), b"-_", validate=True)
        of_version, of_names, written = json.loads(content)
        if not isinstance(of_version, int):
            raise TypeError("a version is a number")
    except (ValueError, TypeError, RecursionError) as cause:
        raise _no_cursor() from cause
    if of_version != version:
        raise ContradictoryQuery(
            f"after is of version {of_version} of the view, and readers see version {version}.",
            advice="Begin again without after.",
        )
    if of_names != list(names):
        raise ContradictoryQuery("after is of a page in another order.")
    try:
        pairs = zip(terms, written, strict=True)
        return [None if text is None else _place(each.cast, text) for each, text in pairs]
    except (ValueError, TypeError, InvalidQuery) as cause:
        raise _no_cursor() from cause


def _no_cursor() -> ContradictoryQuery:
    return ContradictoryQuery("after is not of an earlier page.")


def _place(cast: str, text: Any) -> Any:
    if not isinstance(text, str):
        raise TypeError("a cursor has texts")
    return written_value(cast, text)


def _written(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    return value.isoformat() if isinstance(value, date) else str(value)


_HEADLINE: Final = "StartSel=**, StopSel=**, MaxFragments=2, MinWords=5, MaxWords=15"
_TOGETHER: Final = " … "


def search_query(schema: str, plan: SearchPlan, conditions: Sequence[str]) -> bytes:
    """The statement of a search; its parameters: words, those of the conditions, and the limit."""
    language, has = f"{literal(plan.language)}::regconfig", identifier(WORDS)
    names = ", ".join(map(identifier, plan.defined))
    texts = [c.output for c in plan.row if c.name in plan.searched and c.output is not None]
    searched = ", ".join(map(identifier, texts))
    return (
        f"WITH asked AS (SELECT websearch_to_tsquery({language}, %s) AS _asked), "
        f"best AS (SELECT {names}, _key, _version, ts_rank_cd({has}, asked._asked) AS _rank "
        f"FROM {identifier(schema, plan.name)}, asked "
        f"WHERE {' AND '.join([f'{has} @@ asked._asked', *conditions])} "
        "ORDER BY _rank DESC, _key LIMIT %s) "
        f"SELECT best.*, ts_headline({language}, concat_ws('{_TOGETHER}', {searched}), "
        f"asked._asked, '{_HEADLINE}') FROM best, asked ORDER BY _rank DESC, _key"
    ).encode()
