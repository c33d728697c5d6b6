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
from everstate.sources.stores.store import GivenEntity, Written

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
    before: GivenEntity | None,
    after: GivenEntity | None,
    provenance: Provenance,
    event: DomainEvent | None = None,
    occurred_at: datetime | None = None,
    chain: Chain = "strict",
) -> Written:
    """Like :func:`everstate.sources.outbox.emit`, with any PostgreSQL driver of SQLAlchemy.

    It does not flush the session: pending SQL of the session runs before or after it, depending on
    when the caller flushes, and all of it commits together. Call it by ``run_sync`` from an
    AsyncSession.
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
