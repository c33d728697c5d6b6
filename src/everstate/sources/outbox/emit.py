"""Changes of other people's services: emitted in the transaction that writes their own tables.

One way for all: the SQL function `everstate_store.emit`. What is here checks a change by its model
first, so that a refusal does not cost the caller his transaction, and translates what the function
says.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, Literal, Protocol, TypeAlias
from uuid import UUID

import msgspec
import psycopg
from psycopg.rows import tuple_row

from everstate.changes import DomainEvent, EntityType, Kind, Provenance
from everstate.changes.codec import WireProvenance
from everstate.changes.keys import check_key
from everstate.errors import (
    ChainBroken,
    ChangeTooLarge,
    EverstateError,
    FactNotKept,
    InvalidChange,
    NotAllowed,
    NotRegistered,
)
from everstate.sources.outbox.rows import (
    Entity,
    event_text,
    moment_text,
    provenance_text,
)
from everstate.sources.outbox.store import Written

Chain: TypeAlias = Literal["strict", "mend"]
Arguments: TypeAlias = dict[str, Any]

EMIT: Final = (
    "SELECT version, kind, id FROM everstate_store.emit(%(entity)s, %(key)s, %(before)s::json,"
    " %(after)s::json, %(provenance)s::json, %(event)s::json, %(occurred_at)s,"
    " chain => %(chain)s)"
)
EMIT_EVENT: Final = (
    "SELECT everstate_store.emit_event(%(entity)s, %(key)s, %(after)s::json,"
    " %(provenance)s::json, %(event)s::json, %(occurred_at)s)"
)
_STATEMENTS_END: Final = frozenset({"3F000", "42883", "42P01"})
"""No schema, no function, no table: nothing is installed here."""

_encode = msgspec.json.Encoder().encode


class Cursor(Protocol):
    """A cursor of any driver that takes ``%(name)s``, such as Django's and psycopg2's."""

    def execute(self, query: Any, params: Any = ..., /) -> Any:
        """Run one statement."""

    def fetchone(self) -> Any:
        """Its next row."""


Target: TypeAlias = psycopg.Connection[Any] | Cursor


def emit(
    connection: Target,
    entity_type: EntityType,
    key: str | None = None,
    *,
    before: Entity | None,
    after: Entity | None,
    provenance: Provenance,
    event: DomainEvent | None = None,
    occurred_at: datetime | None = None,
    chain: Chain = "strict",
) -> Written:
    """Emit one change in the transaction that is open on ``connection``; the caller commits.

    ``before`` and ``after`` are the whole entity as it was and as it is: models of the entity
    type, or mappings; ``None``: it did not exist, it is deleted. ``key`` ``None``: the model's.
    The version is dense, and kept under a lock on the key until the commit; a rollback leaves
    nothing. Equal states without an event are no change.

    ``before`` must be what was emitted last: ``strict`` raises ChainBroken otherwise, ``mend``
    first emits the change that somebody made without emitting it (also of an entity that was
    there before the outbox).

    Raises, before the database is asked, InvalidChange and MissingProvenance; and by the
    database, which then has aborted the caller's transaction, ChangeTooLarge, ChainBroken,
    NotRegistered, and NotAllowed when the login role may not name this service. Errors of the
    driver are the caller's. Cost: one round trip, about 0.4 ms.
    """
    values = emit_arguments(entity_type, key, before, after, provenance, event, occurred_at, chain)
    return as_written(_row(connection, EMIT, values), values)


async def emit_async(
    connection: psycopg.AsyncConnection[Any],
    entity_type: EntityType,
    key: str | None = None,
    *,
    before: Entity | None,
    after: Entity | None,
    provenance: Provenance,
    event: DomainEvent | None = None,
    occurred_at: datetime | None = None,
    chain: Chain = "strict",
) -> Written:
    """As :func:`emit`, on an asynchronous connection of psycopg."""
    values = emit_arguments(entity_type, key, before, after, provenance, event, occurred_at, chain)
    try:
        cursor = await connection.execute(EMIT, values)
        row = await cursor.fetchone()
    except psycopg.Error as error:
        raise translated(error, values) from error
    return as_written(row, values)


def emit_event(
    connection: Target,
    entity_type: EntityType,
    fact: Entity,
    *,
    provenance: Provenance,
    event: DomainEvent | None = None,
    occurred_at: datetime | None = None,
) -> UUID:
    """Emit a behavioural fact, which is written to no table; the caller commits.

    It stands in the WAL only, there exactly when the caller commits, and needs a relay that reads
    by replication. Its key is its own id: the same key again is the same change. Returns the
    change's id. Raises as :func:`emit` does, and FactNotKept while no replication slot would keep
    it.
    """
    model = entity_type.validate(fact)
    key = check_key(entity_type.name, entity_type.key_of(model))
    values: Arguments = {
        "entity": entity_type.name,
        "key": key,
        "after": entity_type.encode(model).decode(),
        **_why(entity_type.name, key, provenance, event, occurred_at),
    }
    (change_id,) = _row(connection, EMIT_EVENT, values)
    return change_id if isinstance(change_id, UUID) else UUID(str(change_id))


def emit_arguments(
    entity_type: EntityType,
    key: str | None,
    before: Entity | None,
    after: Entity | None,
    provenance: Provenance,
    event: DomainEvent | None,
    occurred_at: datetime | None,
    chain: Chain,
) -> Arguments:
    """Values of :data:`EMIT`, checked and encoded by the model; raises as :func:`emit` does."""
    name = entity_type.name
    states = [None if state is None else entity_type.validate(state) for state in (before, after)]
    keys = {entity_type.key_of(state) for state in states if state is not None}
    if key is not None:
        keys.add(key)
    if len(keys) != 1:
        reason = "before and after are both None" if not keys else f"{sorted(keys)} are different"
        raise InvalidChange(name, key, "key", reason)
    checked = check_key(name, keys.pop())
    texts = [None if state is None else entity_type.encode(state).decode() for state in states]
    return {
        "entity": name,
        "key": checked,
        "before": texts[0],
        "after": texts[1],
        "chain": chain,
        **_why(name, checked, provenance, event, occurred_at),
    }


def _why(
    entity: str,
    key: str,
    provenance: Provenance,
    event: DomainEvent | None,
    occurred_at: datetime | None,
) -> Arguments:
    provenance_text(entity, key, provenance)
    wire = WireProvenance(
        provenance.api_version,
        provenance.service_name,
        provenance.identifier,
        provenance.actor,
        provenance.reason,
        provenance.correlation_id,
        provenance.causation_id,
    )
    given = msgspec.to_builtins(wire)
    del given["transaction"]
    return {
        "provenance": _encode(given).decode(),
        "event": None if event is None else event_text(entity, key, event),
        "occurred_at": None if occurred_at is None else moment_text(entity, key, occurred_at),
    }


def as_written(row: Any, values: Arguments) -> Written:
    """What the function's row says."""
    version, kind, change_id = row.values() if isinstance(row, Mapping) else row
    if change_id is not None and not isinstance(change_id, UUID):
        change_id = UUID(str(change_id))
    return Written(
        key=values["key"],
        version=version,
        kind=None if kind is None else Kind(kind),
        change_id=change_id,
    )


def _row(target: Target, query: str, values: Arguments) -> Any:
    if isinstance(target, psycopg.Connection):
        target = target.cursor(row_factory=tuple_row)
    try:
        target.execute(query, values)
        row = target.fetchone()
    except Exception as error:  # of whatever driver; ours are recognised by their code
        ours = translated(error, values)
        if ours is error:
            raise
        raise ours from error
    assert row is not None
    return tuple(row.values()) if isinstance(row, Mapping) else tuple(row)


def translated(error: BaseException, values: Arguments) -> BaseException:
    """Our error of what the function raised, whatever the driver; else the error itself.

    Wrappers (SQLAlchemy's and Django's) are looked through.
    """
    said = getattr(error, "orig", None) or error
    if not hasattr(said, "diag") and said.__cause__ is not None:
        said = said.__cause__
    diag = getattr(said, "diag", None)
    state = getattr(diag, "sqlstate", None)
    if diag is None or state is None:
        return error
    return _ours(state, diag, values["entity"], values["key"]) or error


def _ours(state: str, diag: Any, entity: str, key: str) -> EverstateError | None:
    reason = diag.message_primary or ""
    if state == "EV001":
        return InvalidChange(entity, key, diag.column_name or "change", reason)
    if state == "EV002":
        return ChangeTooLarge(entity, key, int(reason), int(diag.message_hint))
    if state == "EV003":
        return ChainBroken(entity, key, reason)
    if state == "EV004":
        return NotRegistered(reason)
    if state == "EV005":
        return FactNotKept(f"{entity} {key!r}: {reason}.", advice=diag.message_hint)
    if state == "EV006":
        return NotAllowed(f"{entity} {key!r}: {reason}.", advice=diag.message_hint)
    if state in _STATEMENTS_END:
        return NotRegistered("the outbox is not installed in this database")
    return None
