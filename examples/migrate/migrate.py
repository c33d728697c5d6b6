"""Move the service, one step at a time: `migrate.py forward | back | verify | status`.

own → emit → replica → reads → writes → retired. Each step can be taken back, and is verified
before the next one, while the service goes on writing.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psycopg
from guests import Guest
from psycopg import sql
from service import GUEST, TABLES, Connection, Service, lock, own_row, replica

from everstate import Config, Provenance, emit, project_config
from everstate.sources.outbox import Installation, install_outbox

BASELINE = Provenance(api_version="v1", service_name="migrate", identifier="baseline")
ACKNOWLEDGED = Path("acknowledged.jsonl")
PATIENCE_S = 300.0

# What the outbox has emitted last, against the service's own table, in one snapshot.
_DIFFERENT = sql.SQL("""
SELECT coalesce(own.id, emitted.key) FROM guest AS own
FULL JOIN (
    SELECT key, state::jsonb AS state FROM everstate_store.guest WHERE state IS NOT NULL
) AS emitted ON emitted.key = own.id
WHERE emitted.state IS DISTINCT FROM to_jsonb(own)
""")


def do_nothing(config: Config, connection: Connection) -> None:
    """This step moves nothing by itself."""


def emit_all(config: Config, connection: Connection) -> None:
    """Install the outbox, let every write be emitted, then emit what was written before.

    `mend` makes it one change for each guest whose last change is not what the table has: all of
    them the first time, those that were written in between when the step is taken again.
    """
    install_outbox(connection, Installation(entity_types=[GUEST]))
    switch(connection, writes="emit")
    for (key,) in connection.execute(_DIFFERENT).fetchall():
        with connection.transaction():
            lock(connection, key)
            row, emitted = own_row(connection, key), emitted_last(connection, key)
            if row is not None:
                emit(connection, GUEST, before=row, after=row, provenance=BASELINE, chain="mend")
            elif emitted is not None:
                emit(connection, GUEST, before=emitted, after=None, provenance=BASELINE)


def emitted_last(connection: Connection, key: str) -> Guest | None:
    """The guest as its last change left it."""
    query = "SELECT state FROM everstate_store.guest WHERE key = %s"
    row = connection.execute(query, [key]).fetchone()
    return None if row is None or row[0] is None else Guest.model_validate_json(row[0])


def wait_for_replica(config: Config, connection: Connection) -> None:
    """The pipeline keeps it (`everstate run`); until it has caught up once."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            replica_differs(config, connection)
            return
        except psycopg.errors.UndefinedTable:
            assert time.monotonic() < deadline, "is `everstate run` running?"
            time.sleep(1)


def retire(config: Config, connection: Connection) -> None:
    """Write the store only; the old table stays for a while under another name."""
    switch(connection, writes="store only", reads="store")
    connection.execute("ALTER TABLE guest RENAME TO guest_retired")


def bring_back(config: Config, connection: Connection) -> None:
    """Make the old table again from the store, while writes wait."""
    with connection.transaction():
        connection.execute("SELECT FROM switch FOR UPDATE")
        connection.execute("ALTER TABLE guest_retired RENAME TO guest")
        connection.execute("DELETE FROM guest")
        connection.execute(
            "INSERT INTO guest SELECT s.* FROM everstate_store.guest AS entity,"
            " jsonb_to_record(entity.state::jsonb) AS s (id text, name text, nights int)"
            " WHERE entity.state IS NOT NULL"
        )
        switch(connection, writes="store", reads="replica")


@dataclass(frozen=True)
class Step:
    """How to come to a step, and back to the one before it."""

    name: str
    forward: Callable[[Config, Connection], None]
    back: Callable[[Config, Connection], None]


STEPS = (
    Step("own", do_nothing, do_nothing),
    Step("emit", emit_all, lambda _, c: switch(c, writes="table")),
    Step("replica", wait_for_replica, do_nothing),
    Step(
        "reads",
        lambda _, c: switch(c, reads="replica"),
        lambda _, c: switch(c, reads="table"),
    ),
    Step(
        "writes",
        lambda _, c: switch(c, writes="store"),
        lambda _, c: switch(c, writes="emit"),
    ),
    Step("retired", retire, bring_back),
)
NAMES = [step.name for step in STEPS]


def switch(connection: Connection, **where: str) -> None:
    """Change where the service reads or writes; waits for the writes under way."""
    for column, value in where.items():
        connection.execute(
            sql.SQL("UPDATE switch SET {} = %s").format(sql.Identifier(column)), [value]
        )


def now_at(connection: Connection) -> int:
    """Number of the step at which the service is."""
    row = connection.execute("SELECT step FROM switch").fetchone()
    assert row is not None
    return NAMES.index(row[0])


def move(config: Config, connection: Connection, by: int) -> str:
    """Take one step forward or back; returns where the service is then."""
    at = now_at(connection)
    if not 0 <= at + by < len(STEPS):
        return NAMES[at]
    if by > 0:
        STEPS[at + 1].forward(config, connection)
    else:
        STEPS[at].back(config, connection)
    switch(connection, step=NAMES[at + by])
    return NAMES[at + by]


def verify(config: Config, connection: Connection) -> list[str]:
    """What is not as it must be at this step; empty when all is, with writes running."""
    at, found = now_at(connection), lost(config)
    if NAMES.index("emit") <= at < NAMES.index("retired"):
        rows = connection.execute(_DIFFERENT).fetchall()
        found += [f"{key}: the table and the last change differ" for (key,) in rows]
    if at >= NAMES.index("replica"):
        found += replica_differs(config, connection)
    return found


def replica_differs(config: Config, connection: Connection) -> list[str]:
    """Guests that the replica has otherwise than they were emitted, version by version.

    What is emitted now is looked for in the replica until each guest was met at that version, or
    later; the same version must have the same state.
    """
    compare = sql.SQL(
        "SELECT count(*), count(*) FILTER (WHERE coalesce(seen.version, 0) < wanted.version),"
        " coalesce(array_agg(wanted.key) FILTER (WHERE seen.version = wanted.version"
        " AND seen.state::jsonb IS DISTINCT FROM wanted.state::jsonb), '{{}}')"
        " FROM emitted_now AS wanted LEFT JOIN {} AS seen USING (key)"
    ).format(replica(config))
    connection.execute("DROP TABLE IF EXISTS emitted_now")
    connection.execute(
        "CREATE TEMP TABLE emitted_now AS SELECT key, version, state FROM everstate_store.guest"
    )
    deadline = time.monotonic() + PATIENCE_S
    while True:
        row = connection.execute(compare).fetchone()
        assert row is not None
        _, behind, different = row
        if different or not behind:
            return [f"{key}: the replica differs" for key in different]
        if time.monotonic() > deadline:
            return [f"{behind} guests are not in the replica"]
        time.sleep(0.2)


def lost(config: Config) -> list[str]:
    """Acknowledged writes (of load.py) that the service no longer knows; nights only grow."""
    if not ACKNOWLEDGED.exists():
        return []
    said: dict[str, int | None] = {}
    for line in ACKNOWLEDGED.read_text("utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            said.update([json.loads(line)])
    service, found = Service(config), []
    deadline = time.monotonic() + PATIENCE_S
    for key, nights in said.items():
        # A replica may be a moment behind.
        while not is_kept(service.look_up(key), nights):
            if time.monotonic() > deadline:
                found.append(f"{key}: acknowledged with {nights} nights, and lost")
                break
            time.sleep(0.2)
    service.close()
    return found


def is_kept(guest: Guest | None, nights: int | None) -> bool:
    """Whether the guest is as acknowledged, or as a later write left it."""
    if nights is None:
        return guest is None
    return guest is not None and guest.nights >= nights


def main(argv: list[str]) -> int:
    """Do what is asked; 1 when something is not as it must be."""
    config = project_config()
    with psycopg.connect(config.store_dsn, autocommit=True) as connection:
        if argv[0] == "init":
            connection.execute(TABLES)
        elif argv[0] in ("forward", "back"):
            print("at", move(config, connection, 1 if argv[0] == "forward" else -1))
        elif argv[0] == "status":
            print("at", NAMES[now_at(connection)])
        else:
            found = verify(config, connection)
            print("\n".join(found) or f"{NAMES[now_at(connection)]}: verified")
            return 1 if found else 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
