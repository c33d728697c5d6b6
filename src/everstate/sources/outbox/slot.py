"""The replication slot: PostgreSQL's promise to keep the WAL that the relay has not read."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, Literal

import psycopg
from psycopg import sql

from everstate.errors import ReplicationUnavailable
from everstate.sources.outbox.database import Connection

State = Literal["none", "reserved", "extended", "unreserved", "lost", "dropped", "foreign"]

_STATUS: Final = sql.SQL("""
SELECT ours.slot, slots.slot_name IS NOT NULL, slots.database = current_database(),
    slots.wal_status, slots.active_pid,
    pg_wal_lsn_diff(pg_current_wal_lsn(), slots.restart_lsn)::bigint,
    slots.safe_wal_size::bigint, (ours.spooled - '0/0'::pg_lsn)::bigint,
    ours.polls
FROM everstate_store.relay_slot AS ours
LEFT JOIN pg_replication_slots AS slots ON slots.slot_name = ours.slot
WHERE ours.name = %s
""")
_ABLE: Final = sql.SQL("""
SELECT current_setting('wal_level'), rolreplication OR rolsuper, rolname
FROM pg_roles WHERE rolname = current_user
""")
_CREATE_MS: Final = 2_000
"""A slot is ready only when all transactions that run now have ended: ask again later."""


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """How a relay's slot is. ``state`` is PostgreSQL's wal_status, or what is the matter.

    ``none``: never made; ``dropped``: it was made and is not there; ``foreign``: another database
    of the server has one of this name.
    """

    state: State
    slot: str | None = None
    active_pid: int | None = None
    held_bytes: int = 0
    """WAL that the server keeps for it."""
    safe_bytes: int | None = None
    """WAL that may still be written before it is lost; ``None``: no limit is set."""
    spooled: int = 0
    polls: bool = False
    """Its relay polls, because the log refused something of what it streamed."""

    @property
    def is_lost(self) -> bool:
        """Whether WAL that was not read is gone."""
        return self.state in ("lost", "dropped", "foreign")


def read_slot(connection: Connection, name: str = "main") -> SlotStatus:
    """Status of a relay's slot."""
    row = connection.execute(_STATUS, [name]).fetchone()
    if row is None:
        return SlotStatus("none")
    slot, exists, is_ours, wal_status, active_pid, held, safe, spooled, polls = row
    if not exists:
        return SlotStatus("dropped", slot, spooled=spooled)
    state: State = wal_status or "reserved"
    state = state if is_ours else "foreign"
    return SlotStatus(state, slot, active_pid, held or 0, safe, spooled, polls)


def create_slot(connection: Connection, store_id: str, name: str = "main") -> bool:
    """Make the relay's slot and note it; ``False``: a transaction runs that it must wait for.

    From now on the server keeps WAL until the relay confirms it. Raises ReplicationUnavailable
    with the SQL that mends it when the server or the role cannot replicate.
    """
    _check_able(connection)
    database = connection.info.dbname
    digest = blake2b(f"{store_id}\n{database}\n{name}".encode(), digest_size=8).hexdigest()
    slot = f"everstate_{digest}"
    try:
        connection.execute(sql.SQL("SET statement_timeout = {}").format(_CREATE_MS))
        connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
    except psycopg.errors.QueryCanceled:
        return False
    except psycopg.errors.DuplicateObject:
        # Killed between making and noting it: what it holds is read, and nothing is lost.
        pass
    finally:
        connection.execute("SET statement_timeout = 0")
    connection.execute(
        "INSERT INTO everstate_store.relay_slot (name, slot) VALUES (%s, %s)"
        " ON CONFLICT (name) DO UPDATE SET slot = excluded.slot, created_at = now(),"
        " spooled = '0/0', polls = false",
        [name, slot],
    )
    return True


def drop_slot(connection: Connection, name: str = "main") -> bool:
    """Drop the relay's slot, so that no WAL is held; ``False``: there is none.

    What stands in the outbox stays unpublished; facts that stand in the WAL only are lost. The
    relay must be stopped.
    """
    status = read_slot(connection, name)
    if status.state == "none":
        return False
    with connection.transaction():
        connection.execute("DELETE FROM everstate_store.relay_slot WHERE name = %s", [name])
        if status.state not in ("dropped", "foreign"):
            connection.execute("SELECT pg_drop_replication_slot(%s)", [status.slot])
    return True


def current_lsn(connection: Connection) -> int:
    """Position at which the next WAL record is written."""
    found = connection.execute("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint").fetchone()
    assert found is not None
    return int(found[0])


def lsn_text(lsn: int) -> str:
    """A position as PostgreSQL writes it."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def _check_able(connection: Connection) -> None:
    found = connection.execute(_ABLE).fetchone()
    assert found is not None
    wal_level, may_replicate, role = found
    if wal_level != "logical":
        raise ReplicationUnavailable(
            f"the server's wal_level is {wal_level}",
            "ALTER SYSTEM SET wal_level = logical; then restart the server",
        )
    if not may_replicate:
        quoted = sql.Identifier(role).as_string(connection)
        raise ReplicationUnavailable(
            f"role {role} may not replicate", f"ALTER ROLE {quoted} REPLICATION"
        )
