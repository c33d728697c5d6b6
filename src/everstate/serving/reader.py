"""Reader: reads entities now, at a time or at a version; lists and histories."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from datetime import datetime
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from everstate.changes import EntityType
from everstate.closing import Closing
from everstate.config import Config
from everstate.errors import (
    ContradictoryQuery,
    Deleted,
    InvalidQuery,
    NotFound,
    ThrottledChangesWait,
    UnknownEntity,
    UnknownView,
)
from everstate.postgres import identifier
from everstate.serving import statements
from everstate.serving.answers import (
    ColdRead,
    Entity,
    Explanation,
    FoundRow,
    Place,
    Version,
    ViewRow,
)
from everstate.serving.connection import WAIT_S, ReadConnection
from everstate.serving.differences import differences
from everstate.serving.masking import (
    Masks,
    entities_read_by,
    masked_entity,
    masked_version,
    no_masks,
)
from everstate.views.project import Project, known_views
from everstate.views.tables import HOME, Row

if TYPE_CHECKING:
    from everstate.serving.cold import ColdHistory
    from everstate.views.control import ViewVersion

_PAGE: Final = 100
_FACTS: Final = (
    *("key", "version", "kind", "state", "as_of", "occurred_at", "recorded_at"),
    *("change_id", "provenance"),
)
"""What the first columns of the statements are; the place in the log is behind them."""


class Reader(Closing):
    """Answers from the views; its connections are opened by statements, and kept.

    Threads may share it. Every method raises UnknownEntity for an entity type that the
    app does not have, NotFound while the views do not exist, and Unavailable when the database does
    not answer. A context manager.
    """

    def __init__(self, config: Config, project: Project) -> None:
        self.config, self.project = config, project
        self.masks: Masks = no_masks
        """What is hidden in the answers: that of the caller for whom the reader reads."""
        self.connection = ReadConnection(lambda: config.views_dsn)
        self.schema = config.views.schema_name

    def close(self) -> None:
        """Close the connections."""
        self.connection.close()

    def seen_by(self, masks: Masks) -> Reader:
        """The reader, over the same connections, for a caller who does not see everything."""
        seen = copy(self)
        seen.masks = masks
        return seen

    def get(
        self,
        entity: str,
        key: str,
        *,
        at: datetime | None = None,
        recorded_at: datetime | None = None,
        version: int | None = None,
        wait_for: str | None = None,
        wait_s: float = WAIT_S,
    ) -> Entity:
        """One entity: now, ``at`` a world time, as ``recorded_at`` a time, or at a version.

        ``wait_for``, here and elsewhere: a token; the answer includes everything that it covers, or
        NotCaughtUp is raised after ``wait_s``. Raises NotFound, with what is known, when the entity
        did not exist then. Cost: one row by index, in one round trip; a look-up in the lake when
        the history does not have the version.
        """
        kind = self.entity_type(entity)
        given = sum(choice is not None for choice in (at, recorded_at, version))
        if given > 1:
            raise ContradictoryQuery("give one of at, recorded_at and version.")
        is_cold = given and not self.project.keeps_history(entity)
        self._wait(f"{entity}_{'history' if given and not is_cold else 'latest'}", wait_for, wait_s)
        moment = at or recorded_at
        if is_cold:
            return self._cold_entity(kind, key, at, recorded_at, version)
        query = statements.now
        values: tuple[Any, ...] = (key,)
        if at is not None:
            query, values = statements.at, (key, statements.aware(at))
        elif recorded_at is not None:
            query, values = statements.recorded_at, (key, statements.aware(recorded_at))
        elif version is not None:
            query, values = statements.version, (key, version)
        row = self.connection.row(query(self.schema, entity), values)
        if row is None and given and self._is_cut_off(entity, key):
            return self._cold_entity(kind, key, at, recorded_at, version)
        if row is None or row[3] is None:
            raise self._not_found(entity, key, row, moment, version)
        return masked_entity(entity_of(kind, row), self.masks(entity))

    def list(
        self,
        entity: str,
        *,
        at: datetime | None = None,
        where: Sequence[str] = (),
        order: Sequence[str] = (),
        after: str | None = None,
        limit: int | None = 100,
        wait_for: str | None = None,
        wait_s: float = WAIT_S,
    ) -> Sequence[Entity]:
        """Entities that exist now, or existed ``at`` a world time, and meet all conditions.

        Conditions and orders as in :mod:`everstate.serving.predicates`; ordered by key when no
        order is given. ``after``: only keys after this one. Raises InvalidQuery for a field that
        the model does not have, or a value not of its type. Cost: one pass over the entities; with
        ``at``, one over their versions.
        """
        # Imported here: Arrow's types take a fifth of a second, which `get` does not need.
        from everstate.serving.predicates import condition, field_of, order_term

        kind = self.entity_type(entity)
        if at is not None and not self.project.keeps_history(entity):
            raise InvalidQuery(
                f"no history is kept of {entity}: it was registered with history=False.",
                advice=f"`everstate views query {entity} --at …` asks the archive for all of them; "
                "`get` and `history` do for one.",
            )
        find = partial(field_of, kind)
        predicates = [condition(text, find) for text in where]
        orders = [order_term(text, find) for text in order]
        for term in [*(each.term for each in predicates), *orders]:
            self.masks(entity).refuse(term.name.split("."), "a condition on")
        self._wait(f"{entity}_{'latest' if at is None else 'history'}", wait_for, wait_s)
        query, parameters = statements.listing(self.schema, entity, at, predicates, orders, after)
        rows = self.connection.rows(query, [*parameters, limit])
        mask = self.masks(entity)
        return [masked_entity(entity_of(kind, row), mask) for row in rows]

    def history(
        self,
        entity: str,
        key: str,
        *,
        limit: int | None = None,
        before: int | None = None,
        after: int | None = None,
        wait_for: str | None = None,
        wait_s: float = WAIT_S,
    ) -> Sequence[Version]:
        """Versions of one entity, oldest first, each with its differences to the previous one.

        ``limit``: only so many of the newest. ``before`` a version: only older ones. ``after`` a
        version: only newer ones, and then ``limit`` keeps the oldest of them. Empty when the entity
        has no version there. Raises NotFound when the key was never seen. Cost: one index range; a
        look-up in the lake when the history is incomplete.
        """
        kind = self.entity_type(entity)
        is_hot = self.project.keeps_history(entity)
        self._wait(f"{entity}_{'history' if is_hot else 'latest'}", wait_for, wait_s)
        # One version more than is wanted: the differences of the first one are to that.
        wanted = None if limit is None else limit + 1
        begin = 1 if after is None else max(1, after)
        rows: Sequence[Row] = ()
        cold = None
        if is_hot:
            rows = self._versions(entity, key, wanted, before, after)
        is_page = wanted is not None and after is None and len(rows) == wanted
        is_cut = rows[0][1] > begin if rows else (before or 1) > 1
        if not is_hot or (is_cut and not is_page):
            cold = self._cold(entity, key)
            rows = [] if cold is None else [row for row in cold.rows if row[1] >= begin]
            rows = rows if before is None else [row for row in rows if row[1] < before]
            rows = rows[:wanted] if after is not None else rows[-(wanted or len(rows)) :]
        is_none_there = bool(before or after) and self._was_seen(entity, key, cold)
        if not rows and not is_none_there:
            raise self._not_found(entity, key, None, None, None)
        read = None if cold is None else cold.read
        is_one_more = wanted is not None and after is None and len(rows) == wanted
        first = int(is_one_more or (after is not None and bool(rows) and rows[0][1] <= after))
        # Before the first version is none: after 0, the page is full without the one more.
        end = None if limit is None else first + limit
        mask = self.masks(entity)
        return [
            masked_version(version_of(kind, row, rows[index - 1] if index else None, read), mask)
            for index, row in enumerate(rows[:end])
            if index >= first
        ]

    def newest_first(
        self, entity: str, key: str, *, before: int | None = None
    ) -> Iterator[Version]:
        """Versions of one entity, newest first, read in pages: who stops early reads no more.

        Otherwise as :meth:`history`, which raises its errors with the first version. Cost: one page
        in memory, and a statement each; what the views do not have is one look-up in the lake.
        """
        limit = _PAGE if self.project.keeps_history(entity) else None
        page = self.history(entity, key, limit=limit, before=before)
        while page:
            yield from reversed(page)
            oldest = page[0]
            if limit is None or oldest.version == 1 or len(page) < limit:
                return
            # The lake is asked for all that is left at once: each look-up reads its files.
            limit = None if oldest.cold else limit
            page = self.history(entity, key, limit=limit, before=oldest.version)

    def _versions(
        self, entity: str, key: str, wanted: int | None, before: int | None, after: int | None
    ) -> Sequence[Row]:
        """Kept versions, oldest first; after a version, with that one itself."""
        if after is not None:
            query = statements.history_from(self.schema, entity)
            return self.connection.rows(query, (key, after, before, before, wanted))
        query = statements.history(self.schema, entity)
        return self.connection.rows(query, (key, before, before, wanted))[::-1]

    def _was_seen(self, entity: str, key: str, cold: ColdHistory | None) -> bool:
        if cold is not None or not self.project.keeps_history(entity):
            return cold is not None
        ends = self.connection.row(statements.ends(self.schema, entity), (key,))
        return ends is not None and ends[0] is not None

    def version(self, entity: str, key: str, version: int | None = None) -> Version:
        """One version of an entity (``None``: the newest), also one that deleted it.

        Raises NotFound with the existing versions.
        """
        kind = self.entity_type(entity)
        rows: list[Row] = []
        if self.project.keeps_history(entity):
            parameters = (key, version, version)
            rows = self.connection.rows(statements.two_versions(self.schema, entity), parameters)
        cold = None
        if not rows or (rows[0][1] == rows[-1][1] > 1):
            cold = self._cold(entity, key)
            rows = [] if cold is None else cold.rows[:version][:-3:-1]
        if not rows or (version is not None and rows[0][1] != version):
            known = [] if cold is None else cold.rows
            raise self._not_found(entity, key, None, None, version, _ends(known))
        read = None if cold is None else cold.read
        shown = version_of(kind, rows[0], rows[1] if len(rows) > 1 else None, read)
        return masked_version(shown, self.masks(entity))

    def explain(self, entity: str, key: str, version: int | None = None) -> Explanation:
        """The origin of one version (``None``: the newest), and where it was archived and applied.

        Raises NotFound with the existing versions. Cost: two statements, and reading the lake
        table's log.
        """
        # Imported here: importing the lake's reader takes a second, which a look-up does not need.
        from everstate.serving import explanation

        found = self.version(entity, key, version)
        return explanation.explain(self.config, self.connection, found)

    def views(self) -> Sequence[ViewRow]:
        """One row per version of a view: rows, position, lag, proof. Cost: a count of each view."""
        # Imported here: a look-up needs no client of the log.
        from everstate.serving import overview

        return overview.views(self.config, self.connection, self.project.views)

    def token(self, view: str) -> str:
        """The token of a view's present position; raises UnknownView, ThrottledChangesWait."""
        # Imported here: rarely needed.
        from everstate.serving.snapshots import at_one_position

        if view not in (known := known_views(self.project)):
            raise UnknownView(view, known)
        found = at_one_position(self.config, self.project, view, lambda _, seen: seen.token)
        if found is None:
            raise ThrottledChangesWait(view)
        return found

    def newest_version(self, entity: str, key: str) -> int | None:
        """The newest version of an entity in the views, also of a deleted one; ``None``: none."""
        self.entity_type(entity)
        row = self.connection.row(statements.now(self.schema, entity), (key,))
        return None if row is None else int(row[1])

    def rows(
        self,
        view: str,
        *,
        limit: int | None = 100,
        offset: int = 0,
        first: str | None = None,
        wait_for: str | None = None,
        wait_s: float = WAIT_S,
    ) -> tuple[tuple[str, ...], Sequence[Row]]:
        """Column names and rows of a view; raises UnknownView.

        Rows are in the order of the view's definition, or else ordered by their columns, from the
        first one on; those in another store than PostgreSQL have the order of that store, after
        their key and before their version. ``offset`` of them are left out. ``first``: only rows
        whose first column, often the key, has the value that this text writes; raises InvalidQuery
        for a text that writes no value of the column's type, and ViewFailed when another store does
        not answer.
        """
        known = known_views(self.project)
        refused = self.project.refused_views.get(view)
        if view not in known and refused is None:
            raise UnknownView(view, known)
        self._check_seen(view)
        self._wait(view, wait_for, wait_s)
        relation = identifier(self.schema, view)
        try:
            columns, _ = self.connection.table(f"SELECT * FROM {relation} LIMIT 0".encode())
        except NotFound:
            versions = self.connection.standings(self.schema).versions(view)
            row = next((each for each in versions if each.published and each.store != HOME), None)
            if row is not None:
                return self._rows_elsewhere(row, limit, offset, first)
            if refused is None:
                raise
            raise refused from None  # an earlier version would be shown, but there is none
        plan = self.project.views.get(view)
        # By all columns, so that pages neither skip a row nor have it twice.
        places = (str(number) for number in range(1, len(columns) + 1))
        order = f" ORDER BY {', '.join(places)}"
        if plan is not None and plan.is_ordered:
            order = ""
        # PostgreSQL reads the text as a value of the column's type.
        only = "" if first is None else f" WHERE {identifier(columns[0])} = %s"
        query = f"SELECT * FROM {relation}{only}{order} LIMIT %s OFFSET %s".encode()
        return self.connection.table(query, (*([] if first is None else [first]), limit, offset))

    def _rows_elsewhere(
        self, row: ViewVersion, limit: int | None, offset: int, first: str | None
    ) -> tuple[tuple[str, ...], Sequence[Row]]:
        """Rows in another store, up to the last that is wanted."""
        # Imported here: it loads the drivers of stores.
        from everstate.views.stores.showing import stored_rows

        columns, rows = stored_rows(self.config, row, self.project.entities)
        wanted = (each for each in rows if first in (None, each[0]))
        return columns, list(islice(wanted, offset, None if limit is None else offset + limit))

    def search(
        self, view: str, words: str, *, where: Sequence[str] = (), limit: int = 20
    ) -> Sequence[FoundRow]:
        """Rows of a view declared with ``search``, or kept in OpenSearch, that have words in texts.

        The best rows come first.

        ``words`` as in a web search: all words must occur, in any form of the view's language;
        ``"two words"`` next to each other, ``-without``, ``or``. ``where``: conditions on columns
        of the view, `column=value`. Raises UnknownView, and InvalidQuery for a view that is not
        searchable. Cost: the rows that match, by index.
        """
        # Imported here: a look-up needs no views.
        from everstate.serving.view_rows import RowsQuery, read_page
        from everstate.views.kinds.search import searchable

        plan = self.project.views.get(view)
        if plan is None:
            if view in self.project.refused_views:
                raise self.project.refused_views[view]
            raise UnknownView(view, tuple(self.project.views))
        self._check_seen(view)
        names = plan.defined if plan.store != HOME else searchable(plan).defined
        asked = RowsQuery(where=where, limit=limit, words=words)
        found = []
        for row in read_page(self.config, self.project, view, asked).rows:
            key, version, rank, headline = row[-4:]
            values = dict(zip(names, row, strict=False))
            found.append(FoundRow(key, version, rank, headline, values))
        return found

    def _check_seen(self, view: str) -> None:
        """Raise NotPermitted when a view may show what is hidden: its columns have any names."""
        for entity in entities_read_by(self.project, view):
            self.masks(entity).refuse_all(f"the rows of view {view}")

    def entity_type(self, name: str) -> EntityType:
        """The entity type of that name; raises UnknownEntity."""
        known = self.project.entities
        if name not in known:
            raise UnknownEntity(name, tuple(known))
        return known[name]

    def _is_cut_off(self, entity: str, key: str) -> bool:
        """Whether the history of a key lacks its first versions."""
        ends = self.connection.row(statements.ends(self.schema, entity), (key,))
        return ends is not None and ends[0] is not None and ends[0] > 1

    def _cold(self, entity: str, key: str) -> ColdHistory | None:
        # Imported here: a look-up in the views needs neither the lake's reader nor the log's.
        from everstate.serving.cold import cold_history

        return cold_history(self.config, self.connection, entity, key)

    def _cold_entity(
        self,
        kind: EntityType,
        key: str,
        at: datetime | None,
        recorded_at: datetime | None,
        version: int | None,
    ) -> Entity:
        """A past state of an entity, from the lake."""
        found = self._cold(kind.name, key)
        rows = [] if found is None else found.rows
        if at is not None:
            rows = [row for row in rows if row[4] <= statements.aware(at)]
        elif recorded_at is not None:
            rows = [row for row in rows if row[6] <= statements.aware(recorded_at)]
        else:
            rows = [row for row in rows if row[1] == version]
        if found is None or not rows or rows[-1][3] is None:
            last = rows[-1] if rows else None
            known = [] if found is None else found.rows
            raise self._not_found(kind.name, key, last, at or recorded_at, version, _ends(known))
        past = entity_of(kind, rows[-1][:12], found.read)
        return masked_entity(past, self.masks(kind.name))

    def _wait(self, view: str, token: str | None, wait_s: float) -> None:
        if token is not None:
            # Imported here: rarely needed.
            from everstate.serving.waiting import wait_until

            wait_until(self.config, self.project, view, token, wait_s)

    def _not_found(
        self,
        entity: str,
        key: str,
        row: Row | None,
        moment: datetime | None,
        version: int | None,
        ends: Row | None = None,
    ) -> NotFound:
        """The error for an entity without a state there, with what is known of it."""
        name = f"{entity} {key!r}"
        if row is not None:
            by = row[8].get("serviceName")
            return Deleted(
                f"{name} was deleted by {by} at version {row[1]}, {row[5].isoformat()}.",
                row[1],
                advice=f"Read it before that: --version {row[1] - 1}." if row[1] > 1 else None,
            )
        if ends is None and self.project.keeps_history(entity):
            ends = self.connection.row(statements.ends(self.schema, entity), (key,))
        if ends is None or ends[0] is None:
            near = self.connection.rows(statements.near(self.schema, entity), (key, key))
            keys = " or ".join(repr(found) for (found,) in near)
            return NotFound(
                f"the views have no {name}.", advice=f"Near it are {keys}." if keys else None
            )
        first, last, since = ends
        if version is not None:
            return NotFound(f"{name} has no version {version}; it has {first} to {last}.")
        when = f" at {moment.isoformat()}" if moment is not None else ""
        return NotFound(f"{name} did not exist{when}; it was first seen {since.isoformat()}.")


def _ends(rows: Sequence[Row]) -> Row | None:
    """First version, last version and first as-of time of the known versions of a key."""
    return (rows[0][1], rows[-1][1], rows[0][4]) if rows else None


def _in_order(kind: EntityType, state: dict[str, Any]) -> dict[str, Any]:
    """A state with today's names of its fields, in the model's order, which jsonb does not keep."""
    state = kind.today(state)
    ordered = {name: state[name] for name in kind.field_names if name in state}
    return ordered if len(ordered) == len(state) else {**ordered, **state}


def entity_of(entity_type: EntityType, row: Row, cold: ColdRead | None = None) -> Entity:
    """The entity of a row of the statements."""
    return Entity(**_facts(entity_type, row), cold=cold)


def version_of(
    entity_type: EntityType, row: Row, before: Row | None, cold: ColdRead | None = None
) -> Version:
    """The version of a row of the statements; ``before``: the row of the previous version."""
    facts = _facts(entity_type, row)
    original = _in_order(entity_type, before[3]) if before and before[3] else None
    return Version(
        **facts,
        event=row[12],
        transaction=row[13],
        differences=differences(original, facts["state"]),
        cold=cold,
    )


def _facts(entity_type: EntityType, row: Row) -> dict[str, Any]:
    """What the columns of every statement say."""
    facts = dict(zip(_FACTS, row, strict=False))
    if facts["state"] is not None:
        facts["state"] = _in_order(entity_type, facts["state"])
    return {"entity": entity_type.name, **facts, "place": Place(*row[9:12])}
