"""`emit` for SQLAlchemy: in the transaction of a Session or a Connection (extra `sqlalchemy`)."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from everstate.changes import DomainEvent, EntityType, Provenance
from everstate.sources.outbox.emit import (
    Chain,
    as_written,
    emit_arguments,
    translated,
)
from everstate.sources.outbox.rows import Entity
from everstate.sources.outbox.store import Written

_EMIT: Final = text(
    "SELECT version, kind, id FROM everstate_store.emit(:entity, :key, CAST(:before AS json),"
    " CAST(:after AS json), CAST(:provenance AS json), CAST(:event AS json), :occurred_at,"
    " chain => :chain)"
)


def emit(
    session: Session | Connection,
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
    """As :func:`everstate.sources.outbox.emit`, with any PostgreSQL driver of SQLAlchemy.

    The session is not flushed: its own SQL comes before or after this one as the caller flushes,
    and all of it commits together. An AsyncSession calls it by ``run_sync``.
    """
    values: dict[str, Any] = emit_arguments(
        entity_type, key, before, after, provenance, event, occurred_at, chain
    )
    try:
        row = session.execute(_EMIT, values).one()
    except DBAPIError as error:
        ours = translated(error, values)
        if ours is error:
            raise
        raise ours from error
    return as_written(tuple(row), values)
