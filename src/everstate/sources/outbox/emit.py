"""Changes of other teams' services: emitted in the transaction that writes their own tables.

All of them go through the SQL function `everstate_store.emit`. This module first checks a change
against its model, so that an invalid one does not abort the caller's transaction, and translates
the function's results and errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final, Literal, Protocol, TypeAlias
from uuid import UUID

import msgspec
import psycopg
from psycopg.rows import tuple_row
from pydantic import BaseModel

from everstate.changes import DomainEvent, EntityType, Kind, Provenance
from everstate.changes.codec import wire_provenance
from everstate.changes.keys import check_key
from everstate.errors import (
    ChainBroken,
    ChangeTooLarge,
    EverstateError,
    InvalidChange,
    NotAllowed,
    NotRegistered,
)
from everstate.sources.stores.rows import (
    event_text,
    moment_text,
    provenance_text,
)
from everstate.sources.stores.store import GivenEntity, Written

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
"""SQLSTATEs for a missing schema, function or table: the outbox is not installed here."""

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
    before: GivenEntity | None,
    after: GivenEntity | None,
    provenance: Provenance,
    event: DomainEvent | None = None,
    occurred_at: datetime | None = None,
    chain: Chain = "strict",
) -> Written:
    """Emit one change in the transaction that is open on ``connection``; the caller commits.

    ``before`` and ``after`` are the whole entity as it was and as it is: models of the entity
    type, or mappings; ``None``: it did not exist, it is deleted. ``key`` ``None``: the model's.
    Versions are dense; the key is locked until the commit, and a rollback leaves nothing. Equal
    states without an event make no change.

    ``before`` must be equal to the state emitted last: otherwise ``strict`` raises ChainBroken,
    and ``mend`` first emits the missing change that was made without `emit` (also for an entity
    that existed before the outbox). If that state has a field that ``before`` does not have, which
    is of a newer release, both raise InvalidChange (unless ``removed`` names it).

    Raises InvalidChange and MissingProvenance before any SQL runs. That InvalidChange,
    ChangeTooLarge, ChainBroken, NotRegistered, and NotAllowed (the login role may not name this
    service) come from the database, which has then aborted the caller's transaction. Other errors
    of the driver are raised unchanged. Cost: one round trip, about 0.4 ms.
    """
    values = emit_arguments(entity_type, key, before, after, provenance, event, occurred_at, chain)
    return as_written(_row(connection, EMIT, values), values)


async def emit_async(
    connection: psycopg.AsyncConnection[Any],
    entity_type: EntityType,
    key: str | None = None,
    *,
    before: GivenEntity | None,
    after: GivenEntity | None,
    provenance: Provenance,
    event: DomainEvent | None = None,
    occurred_at: datetime | None = None,
    chain: Chain = "strict",
) -> Written:
    """Like :func:`emit`, on an asynchronous connection of psycopg."""
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
    fact: GivenEntity,
    *,
    provenance: Provenance,
    event: DomainEvent | None = None,
    occurred_at: datetime | None = None,
) -> UUID:
    """Emit a behavioural fact in the transaction that is open on ``connection``.

    It is published exactly when the caller commits. It has version 1 and nothing before it, so no
    newest state is kept of it and no row is locked. Its key is its own id: emitting the same key
    again gives the same change. Returns the change's id. Raises as :func:`emit` does.
    """
    model = entity_type.accept(fact)
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
    before: GivenEntity | None,
    after: GivenEntity | None,
    provenance: Provenance,
    event: DomainEvent | None,
    occurred_at: datetime | None,
    chain: Chain,
) -> Arguments:
    """Values of :data:`EMIT`, checked and encoded by the model; raises as :func:`emit` does."""
    name = entity_type.name
    # The state before a change may have fields that only an older model had.
    read: Callable[[Any], BaseModel] = entity_type.validate
    if isinstance(before, Mapping):
        read = entity_type.validate_exactly
    states = [
        None if before is None else read(before),
        None if after is None else entity_type.accept(after),
    ]
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
    given = msgspec.to_builtins(wire_provenance(provenance))
    del given["transaction"]
    return {
        "provenance": _encode(given).decode(),
        "event": None if event is None else event_text(entity, key, event, provenance.service_name),
        "occurred_at": None if occurred_at is None else moment_text(entity, key, occurred_at),
    }


def as_written(row: Any, values: Arguments) -> Written:
    """The result of a write from the function's row."""
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
    except Exception as error:  # of any driver; errors of the function are recognised by SQLSTATE
        ours = translated(error, values)
        if ours is error:
            raise
        raise ours from error
    assert row is not None
    return tuple(row.values()) if isinstance(row, Mapping) else tuple(row)


def translated(error: BaseException, values: Arguments) -> BaseException:
    """The everstate error for an error of the function, with any driver; else the error itself.

    Errors wrapped by SQLAlchemy or Django are unwrapped.
    """
    cause = getattr(error, "orig", None) or error
    if not hasattr(cause, "diag") and cause.__cause__ is not None:
        cause = cause.__cause__
    diag = getattr(cause, "diag", None)
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
    if state == "EV006":
        return NotAllowed(f"{entity} {key!r}: {reason}.", advice=diag.message_hint)
    if state in _STATEMENTS_END:
        return NotRegistered("the outbox is not installed in this database")
    return None
