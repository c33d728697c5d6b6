"""A service with tables of its own, whose writes are emitted; and an oracle that shares nothing.

`purchase` is the service's. A trigger of the test writes each committed step of it into `audit`:
what the log must be, by PostgreSQL's own hand.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from contextlib import suppress
from typing import Any

import psycopg
from pydantic import BaseModel

from everstate.changes import EntityType, Provenance
from everstate.config import Config
from everstate.errors import ChainBroken
from everstate.log.topics import TopicNames
from everstate.sources.outbox import Installation, emit, emit_event, install_outbox
from everstate.testing.log_checker import read_topic

SHOP = Provenance(api_version="v1", service_name="shop", identifier="writer")


class Purchase(BaseModel):
    """What the service sells."""

    id: str
    total: int
    note: str = ""


class Click(BaseModel):
    """A fact: somebody looked at something."""

    id: str
    page: str


PURCHASE = EntityType("purchase", Purchase, "id")
CLICK = EntityType("click", Click, "id")

_TABLES = """
CREATE TABLE purchase (id text PRIMARY KEY, total integer NOT NULL, note text NOT NULL DEFAULT '');
CREATE TABLE audit (
    n bigint GENERATED ALWAYS AS IDENTITY, xid xid8 NOT NULL DEFAULT pg_current_xact_id(),
    entity text NOT NULL, id text NOT NULL, before jsonb, after jsonb
);
CREATE FUNCTION audit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO audit (entity, id, before, after) VALUES ('purchase', coalesce(new.id, old.id),
        to_jsonb(old), to_jsonb(new));
    RETURN NULL;
END $$;
CREATE TRIGGER audited AFTER INSERT OR UPDATE OR DELETE ON purchase
FOR EACH ROW EXECUTE FUNCTION audit();
"""


def make_service(dsn: str, installation: Installation | None = None) -> None:
    """The service's tables, and the outbox beside them."""
    wanted = installation or Installation(entity_types=[PURCHASE, CLICK], events=["click"])
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(_TABLES)
        install_outbox(connection, wanted)


def set_total(connection: psycopg.Connection[Any], key: str, total: int) -> None:
    """Create or update a purchase, as a service does: lock, write, emit."""
    before = read(connection, key)
    after = Purchase(id=key, total=total, note=before.note if before else "")
    connection.execute(
        "INSERT INTO purchase (id, total) VALUES (%s, %s)"
        " ON CONFLICT (id) DO UPDATE SET total = excluded.total",
        [key, total],
    )
    emit(connection, PURCHASE, before=before, after=after, provenance=SHOP)


def remove(connection: psycopg.Connection[Any], key: str) -> None:
    """Delete a purchase, if it is there."""
    before = read(connection, key)
    if before is not None:
        connection.execute("DELETE FROM purchase WHERE id = %s", [key])
        emit(connection, PURCHASE, before=before, after=None, provenance=SHOP)


def click(connection: psycopg.Connection[Any], key: str) -> None:
    """Emit a fact, and note it for the oracle."""
    fact = Click(id=key, page="home")
    emit_event(connection, CLICK, fact, provenance=SHOP)
    connection.execute(
        "INSERT INTO audit (entity, id, after) VALUES ('click', %s, %s)",
        [key, fact.model_dump_json()],
    )


def read(connection: psycopg.Connection[Any], key: str) -> Purchase | None:
    """A purchase under its lock."""
    query = "SELECT id, total, note FROM purchase WHERE id = %s FOR UPDATE"
    row = connection.execute(query, [key]).fetchone()
    return None if row is None else Purchase(id=row[0], total=row[1], note=row[2])


def transact(connection: psycopg.Connection[Any], rng: random.Random, *, clicks: bool) -> bool:
    """One transaction of a writer: a few purchases, at times a fact; whether it was committed.

    At times it is rolled back. Two writers that create one purchase at once have both read that it
    is not there: then `emit` refuses the second one.
    """
    with suppress(ChainBroken), connection.transaction():
        for number in sorted(rng.sample(range(60), rng.choice([1, 1, 1, 2, 5]))):
            key = f"p-{number:02}"
            if rng.random() < 0.1:
                remove(connection, key)
            else:
                set_total(connection, key, rng.randrange(1_000_000))
        if clicks and rng.random() < 0.3:
            click(connection, f"c-{rng.randrange(2**60)}")
        if rng.random() < 0.15:
            raise psycopg.Rollback
        return True
    return False


def problems(config: Config, *, complete: bool = True, whole: bool = True) -> list[str]:
    """Where the log is not what the service committed, key by key; empty when it is the same.

    ``whole``: also each source transaction's block.
    """
    found: list[str] = []
    committed, blocks = _committed(config)
    logged: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for entity in ("purchase", "click"):
        seen: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
        for record in read_topic(config, TopicNames(config.log.prefix).changes(entity)):
            message = json.loads(record.value or b"")
            key = message["key"]
            seen[key].append((message["originalEntityState"], message["currentEntityState"]))
            if message["version"] != len(seen[key]):
                found.append(f"{entity} {key}: version {message['version']} is {len(seen[key])}th")
            block = message["provenance"]["transaction"]
            logged[block["id"]].append((block["index"], block["count"]))
        for key in seen.keys() | committed[entity].keys():
            wanted, got = committed[entity].get(key, []), seen.get(key, [])
            if (got != wanted) if complete else (got != wanted[: len(got)]):
                found.append(f"{entity} {key}: {len(got)} in the log, {len(wanted)} committed")
    if whole:
        for block_id, members in logged.items():
            count = blocks.get(block_id, 0)
            if sorted(members) != [(index, count) for index in range(1, count + 1)]:
                found.append(f"{block_id}: {count} committed, came as {sorted(members)[:9]}")
    return found


def _committed(
    config: Config,
) -> tuple[dict[str, dict[str, list[tuple[Any, Any]]]], dict[str, int]]:
    steps: dict[str, dict[str, list[tuple[Any, Any]]]] = defaultdict(lambda: defaultdict(list))
    blocks: dict[str, int] = defaultdict(int)
    query = "SELECT entity, id, before, after, 'pg:' || xid::text FROM audit ORDER BY n"
    with psycopg.connect(config.store_dsn) as connection:
        for entity, key, before, after, block in connection.execute(query):
            # An update to the same values is a step of the table, and no change of the entity.
            if before != after:
                steps[entity][key].append((before, after))
                blocks[block] += 1
    return steps, blocks
