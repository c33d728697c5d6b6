"""Reader: any entity now, at a time or at a version; lists and histories."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from psycopg import sql

from everstate.changes import EntityType
from everstate.config import Config
from everstate.errors import InvalidQuery, NotFound, UnknownEntity, UnknownView
from everstate.serving.answers import Entity, Explanation, Place, Standing, Version, ViewRow
from everstate.serving.connection import ReadConnection, Row
from everstate.serving.differences import differences
from everstate.views.project import Project, kept_always

if TYPE_CHECKING:
    from everstate.serving.predicates import Order, Predicate

_COLUMNS = sql.SQL(
    "key, version, kind, state, as_of, occurred_at, recorded_at, change_id, provenance, "
    'generation, partition, "offset"'
)


class Reader:
    """Answers from the views; one connection, opened with the first question and kept.

    Each thread needs its own. Every method raises UnknownEntity for an entity type that the app
    does not have, NotFound while the views are not made, and Unavailable when the database does
    not answer. A context manager.
    """

    def __init__(self, config: Config, project: Project) -> None:
        self.config, self.project = config, project
        self.connection = ReadConnection(config.views_dsn)
        self._schema = config.views.schema_name

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give up the connection."""
        self.connection.close()

    def get(
        self,
        entity: str,
        key: str,
        *,
        at: datetime | None = None,
        recorded_at: datetime | None = None,
        version: int | None = None,
    ) -> Entity:
        """One entity: now, ``at`` a world time, as ``recorded_at`` a time, or at a version.

        Raises NotFound, saying what is known, when it did not exist then. Cost: one row by index,
        in one round trip.
        """
        kind = self._entity_type(entity)
        given = sum(choice is not None for choice in (at, recorded_at, version))
        if given > 1:
            raise InvalidQuery("give one of at, recorded_at and version.")
        if given:
            self._needs_history(entity)
        if at is not None:
            row = self.connection.row(_at(self._schema, entity), (key, _aware(at)))
        elif recorded_at is not None:
            row = self.connection.row(
                _recorded_at(self._schema, entity), (key, _aware(recorded_at))
            )
        elif version is not None:
            row = self.connection.row(_version(self._schema, entity), (key, version))
        else:
            row = self.connection.row(_now(self._schema, entity), (key,))
        if row is None or row[3] is None:
            raise self._not_found(entity, key, row, at or recorded_at, version)
        return _entity(kind, row)

    def list(
        self,
        entity: str,
        *,
        at: datetime | None = None,
        where: Sequence[str | Predicate] = (),
        order: Sequence[str | Order] = (),
        limit: int | None = 100,
    ) -> Sequence[Entity]:
        """Entities that exist now, or existed ``at`` a world time, and meet all conditions.

        Conditions and orders as in :mod:`everstate.serving.predicates`; by key when no order is
        given. Raises InvalidQuery for a field the model does not have, or a value not of its
        type. Cost: now, one pass over the entities; at a time, one over their versions.
        """
        # Imported here: Arrow's types take a fifth of a second, which `get` does not need.
        from everstate.serving.predicates import parse_order, parse_predicate

        kind = self._entity_type(entity)
        if at is not None:
            self._needs_history(entity)
        predicates = [parse_predicate(w, kind) if isinstance(w, str) else w for w in where]
        orders = [parse_order(o, kind) if isinstance(o, str) else o for o in order]
        query, parameters = _list(self._schema, entity, at, predicates, orders)
        rows = self.connection.rows(query, [*parameters, limit])
        return [_entity(kind, row) for row in rows]

    def history(self, entity: str, key: str, *, limit: int | None = None) -> Sequence[Version]:
        """Versions of one entity, oldest first, each with its differences to the one before.

        ``limit`` keeps the newest so many. Raises NotFound when the key was never seen. Cost: one
        index range.
        """
        kind = self._entity_type(entity)
        self._needs_history(entity)
        wanted = None if limit is None else limit + 1
        rows = self.connection.rows(_history(self._schema, entity), (key, wanted))
        if not rows:
            raise self._not_found(entity, key, None, None, None)
        rows.reverse()
        first = 1 if wanted is not None and len(rows) == wanted else 0
        return [
            _version_of(kind, row, rows[index - 1] if index else None)
            for index, row in enumerate(rows)
            if index >= first
        ]

    def version(self, entity: str, key: str, version: int | None = None) -> Version:
        """One version of an entity (``None``: the newest), a deleting one included.

        Raises NotFound, saying which versions there are.
        """
        kind = self._entity_type(entity)
        self._needs_history(entity)
        rows = self.connection.rows(_two_versions(self._schema, entity), (key, version, version))
        if not rows or (version is not None and rows[0][1] != version):
            raise self._not_found(entity, key, None, None, version)
        return _version_of(kind, rows[0], rows[1] if len(rows) > 1 else None)

    def explain(self, entity: str, key: str, version: int | None = None) -> Explanation:
        """Where one version (``None``: the newest) comes from and where it went.

        Raises NotFound, saying which versions there are. Cost: two statements, and a look into
        the lake table's log.
        """
        # Imported here: the lake's reader takes a second that a look-up should not pay.
        from everstate.serving import explanation

        found = self.version(entity, key, version)
        return explanation.explain(self.config, self.connection, found)

    def views(self) -> Sequence[ViewRow]:
        """One row a view: rows, position, lag, when it was proved. Cost: a count of each view."""
        # Imported here: a look-up needs no client of the log.
        from everstate.serving import overview

        return overview.views(self.config, self.connection, self.project)

    def standing(self, view: str) -> Standing | None:
        """How far a view is: its status, and what the log has that it has not."""
        # Imported here: a look-up needs no client of the log.
        from everstate.serving import overview

        return overview.standing(self.config, self.connection, self.project, view)

    def newest_version(self, entity: str, key: str) -> int | None:
        """The version that the views have of an entity, also when it was deleted."""
        self._entity_type(entity)
        row = self.connection.row(_now(self._schema, entity), (key,))
        return None if row is None else int(row[1])

    def rows(self, view: str, *, limit: int | None = 100) -> tuple[tuple[str, ...], Sequence[Row]]:
        """Column names and rows of a view, by its first columns; raises UnknownView."""
        known = (
            *self.project.views,
            *(n for e in self.project.entities for n in self._implicit(e)),
        )
        if view not in known:
            raise UnknownView(view, known)
        name = sql.Identifier(self._schema, view)
        columns, _ = self.connection.table(sql.SQL("SELECT * FROM {} LIMIT 0").format(name), ())
        order = sql.SQL("1, 2" if len(columns) > 1 else "1")
        query = sql.SQL("SELECT * FROM {} ORDER BY {} LIMIT %s").format(name, order)
        return self.connection.table(query, (limit,))

    def _entity_type(self, name: str) -> EntityType:
        known = self.project.entities
        if name not in known:
            raise UnknownEntity(name, tuple(known))
        return known[name]

    def _needs_history(self, entity: str) -> None:
        if not self.project.keeps_history(entity):
            raise InvalidQuery(
                f"no history is kept of {entity}: it was registered with history=False.",
                advice="Only its newest version is in the views; the archive has all of them.",
            )

    def _implicit(self, entity: str) -> tuple[str, ...]:
        """Views that an entity type has without a declaration."""
        return entity, *(f"{entity}_{kept}" for kept in kept_always(self.project, entity))

    def _not_found(
        self,
        entity: str,
        key: str,
        row: Row | None,
        moment: datetime | None,
        version: int | None,
    ) -> NotFound:
        """What is known of an entity that has no state there."""
        name = f"{entity} {key!r}"
        if row is not None:
            by = row[8].get("serviceName")
            return NotFound(
                f"{name} was deleted by {by} at version {row[1]}, {row[5].isoformat()}.",
                advice=f"Read it before that: --version {row[1] - 1}." if row[1] > 1 else None,
            )
        kept = self.project.keeps_history(entity)
        ends = self.connection.row(_ends(self._schema, entity), (key,)) if kept else None
        if ends is None or ends[0] is None:
            near = self.connection.rows(_near(self._schema, entity), (key, key))
            keys = " or ".join(repr(found) for (found,) in near)
            return NotFound(
                f"{name} was never seen.", advice=f"Near it are {keys}." if keys else None
            )
        first, last, since = ends
        if version is not None:
            return NotFound(f"{name} has no version {version}; it has {first} to {last}.")
        when = f" at {moment.isoformat()}" if moment is not None else ""
        return NotFound(f"{name} did not exist{when}; it was first seen {since.isoformat()}.")


def _aware(moment: datetime) -> datetime:
    if moment.tzinfo is None:
        raise InvalidQuery(f"time {moment.isoformat()} has no UTC offset.")
    return moment


def _in_order(kind: EntityType, state: dict[str, Any]) -> dict[str, Any]:
    """A state with its fields in the model's order, which jsonb does not keep."""
    ordered = {name: state[name] for name in kind.field_names if name in state}
    return ordered if len(ordered) == len(state) else {**ordered, **state}


def _entity(entity_type: EntityType, row: Row) -> Entity:
    key, version, kind, state, as_of, occurred, recorded, change, provenance, g, p, o = row
    return Entity(
        entity=entity_type.name,
        key=key,
        version=version,
        kind=kind,
        state=_in_order(entity_type, state),
        as_of=as_of,
        occurred_at=occurred,
        recorded_at=recorded,
        change_id=change,
        provenance=provenance,
        place=Place(g, p, o),
    )


def _version_of(entity_type: EntityType, row: Row, before: Row | None) -> Version:
    key, version, kind, state, as_of, occurred, recorded, change, provenance, g, p, o = row[:12]
    current = None if state is None else _in_order(entity_type, state)
    return Version(
        entity=entity_type.name,
        key=key,
        version=version,
        kind=kind,
        state=current,
        as_of=as_of,
        occurred_at=occurred,
        recorded_at=recorded,
        change_id=change,
        provenance=provenance,
        event=row[12],
        transaction=row[13],
        place=Place(g, p, o),
        differences=differences(before[3] if before else None, current),
    )


def _table(schema: str, entity: str, view: str) -> sql.Composable:
    # The readers' view, never a physical table: a rebuild points it to another one (C28).
    return sql.Identifier(schema, f"{entity}_{view}")


def _statement(text: str, schema: str, entity: str, view: str) -> bytes:
    query = sql.SQL(text).format(_COLUMNS, _table(schema, entity, view))
    return query.as_bytes()


def _list(
    schema: str,
    entity: str,
    at: datetime | None,
    predicates: Sequence[Predicate],
    orders: Sequence[Order],
) -> tuple[sql.Composed, list[Any]]:
    """The statement of a list and its parameters, the limit left open at the end."""
    conditions: list[sql.Composable] = [sql.SQL("state IS NOT NULL")]
    ordering: list[sql.Composable] = []
    parameters: list[Any] = []
    table = _table(schema, entity, "latest" if at is None else "history")
    if at is not None:
        # A version holds at a time when it is that old and the next one is not: as_of never
        # falls from version to version, and versions are dense.
        held = sql.SQL(
            "as_of <= %s AND NOT EXISTS (SELECT 1 FROM {} AS later WHERE later.key = this.key "
            "AND later.version = this.version + 1 AND later.as_of <= %s)"
        )
        conditions.append(held.format(table))
        parameters += [_aware(at), at]
    for predicate in predicates:
        text, values = predicate.compose()
        conditions.append(text)
        parameters += values
    for order in orders:
        text, values = order.compose()
        ordering.append(text)
        parameters += values
    query = sql.SQL("SELECT {} FROM {} AS this WHERE {} ORDER BY {} LIMIT %s").format(
        _COLUMNS,
        table,
        sql.SQL(" AND ").join(conditions),
        sql.SQL(", ").join([*ordering, sql.SQL("key")]),
    )
    return query, parameters


@lru_cache
def _now(schema: str, entity: str) -> bytes:
    return _statement("SELECT {} FROM {} WHERE key = %s", schema, entity, "latest")


@lru_cache
def _at(schema: str, entity: str) -> bytes:
    text = (
        "SELECT {} FROM {} WHERE key = %s AND as_of <= %s "
        "ORDER BY key DESC, as_of DESC, version DESC LIMIT 1"
    )
    return _statement(text, schema, entity, "history")


@lru_cache
def _recorded_at(schema: str, entity: str) -> bytes:
    text = "SELECT {} FROM {} WHERE key = %s AND recorded_at <= %s ORDER BY version DESC LIMIT 1"
    return _statement(text, schema, entity, "history")


@lru_cache
def _version(schema: str, entity: str) -> bytes:
    text = "SELECT {} FROM {} WHERE key = %s AND version = %s"
    return _statement(text, schema, entity, "history")


@lru_cache
def _history(schema: str, entity: str) -> bytes:
    text = "SELECT {}, event, transaction FROM {} WHERE key = %s ORDER BY version DESC LIMIT %s"
    return _statement(text, schema, entity, "history")


@lru_cache
def _two_versions(schema: str, entity: str) -> bytes:
    text = (
        "SELECT {}, event, transaction FROM {} WHERE key = %s "
        "AND (%s::bigint IS NULL OR version <= %s) ORDER BY version DESC LIMIT 2"
    )
    return _statement(text, schema, entity, "history")


@lru_cache
def _ends(schema: str, entity: str) -> bytes:
    text = "SELECT min(version), max(version), min(as_of) FROM {1} WHERE key = %s"
    return _statement(text, schema, entity, "history")


@lru_cache
def _near(schema: str, entity: str) -> bytes:
    text = (
        "(SELECT key FROM {1} WHERE key < %s ORDER BY key DESC LIMIT 1) UNION ALL "
        "(SELECT key FROM {1} WHERE key > %s ORDER BY key LIMIT 1)"
    )
    return _statement(text, schema, entity, "latest")
