"""Random tables and random statements, with a kill: entities equal their rows as printed.

A table that cannot be captured is refused before anything is made. ``FAULT_SEED`` repeats a run.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from capture_cases import LOSING, eventually, maria_source, raw_records
from clean_cases import CONFIG, Numbered
from clean_role import CleanRole, broken_laws, changelog
from everstate.app import App
from everstate.config import Config
from everstate.declarations.captures import DatabaseKind
from everstate.errors import CaptureFailed, Unavailable
from everstate.log.consumer import Consumer
from everstate.log.record import Record
from everstate.log.topics import TopicNames, Topics
from everstate.pipeline.clean import Cleaner
from everstate.sources.cdc.balance import read_balance
from everstate.sources.cdc.capturing import Capturing
from everstate.sources.cdc.cleaning import cleaning_of
from everstate.sources.cdc.comparing import compare_with_table
from everstate.sources.cdc.reading import RawReader
from random_databases import Database, Maria, Postgres
from random_tables import (
    DROPPED,
    MARKER,
    RandomTable,
    World,
    differences,
)
from tiers import TIER, counted

pytestmark = LOSING

SEED = int(os.environ.get("FAULT_SEED") or (time.time_ns() % 2**32 if TIER.is_full else 44))
TABLES, ROWS, TRANSACTIONS = counted(10, full=40), 4, counted(15, full=250)
_POSTGRES: list[DatabaseKind] = ["postgresql"] * 4
ROUNDS: list[DatabaseKind] = [*_POSTGRES, "mariadb", "mysql"]
UNSEEN = counted(3, full=12)
"""Statements that change rows without row events, each time."""
KINDS = counted(ROUNDS[:1], full=ROUNDS)
SHOWN = 20

Message = dict[str, Any]
"""A row of Debezium."""


def _default_for_null(message: Message) -> Message:
    after = dict(message["after"] or {})
    if "note" in after and after["note"] is None:
        after["note"] = "MANUAL"
        return {**message, "after": after}
    return message


def _without_column(message: Message) -> Message:
    after = {name: value for name, value in (message["after"] or {}).items() if name != "note"}
    return {**message, "after": after} if message["after"] else message


def _nothing(message: Message) -> Message | None:
    return None if message["op"] in ("c", "r") else message


PLANTED: dict[str, Callable[[Message], Message | None]] = {
    "NULL for default": _default_for_null,
    "a column left out": _without_column,
    "a row that gives nothing": _nothing,
}
"""Defects that a capture might have, planted into the rows of the first table."""


@contextmanager
def database_of(
    kind: DatabaseKind, request: pytest.FixtureRequest
) -> Iterator[tuple[Database, str]]:
    """A new database of that kind, and the URL of its connector."""
    if kind == "postgresql":
        dsn = request.getfixturevalue("database")
        yield Postgres(dsn), dsn
        return
    for source in maria_source(request.getfixturevalue(kind), kind):
        yield Maria(source.dsn, source.schema, kind), source.dsn


@pytest.mark.timeout(counted(300, full=1200))
@pytest.mark.parametrize("number", range(len(KINDS)), ids=[f"{n}-{k}" for n, k in enumerate(KINDS)])
def test_entities_of_random_tables_equal_their_rows_value_by_value_through_a_kill(
    connect: Any, config: Config, request: pytest.FixtureRequest, number: int
) -> None:
    seed = SEED + number
    print(f"FAULT_SEED={SEED}, so the seed of this round is {seed}")
    with database_of(KINDS[number], request) as (database, dsn):
        world = World(database, seed, TABLES)
        world.make()
        world.fill(ROWS)
        refused_before_anything_is_made(config, world, dsn)
        app = world.app(dsn, world.captured)
        capturing = Capturing(config, app.capture_of("shop"), local=True, entities=app.entities)
        with Topics(config) as topics:
            topics.ensure(app.entities)
        capturing.add()
        known = world.app(dsn, world.captured, dropped=False)
        role = CleanRole(lambda: Cleaner(config, cleaning_of(config, known, "shop")), capturing)
        try:
            world.write(TRANSACTIONS)
            # A connector that is killed earlier takes its first snapshot again.
            assert eventually(lambda: streams(capturing), 90, every_s=1.0), capturing.status()
            world.write(TRANSACTIONS)
            world.unseen(UNSEEN)
            if number % 2:
                role.end()
                killed_role(config, seed, database, dsn, world)
                role.begin()
            else:
                connect.servers.kill("connect")
                world.write(TRANSACTIONS)
                connect.servers.start()
            world.write(TRANSACTIONS)
            world.unseen(UNSEEN)
            world.plant()
            world.finish()
            found = eventually(lambda: bool(changelog(config, MARKER)), 240, every_s=1.0)
            assert found, (capturing.status(), read_balance(config, app.capture_of("shop")))
            is_settled = eventually(
                lambda: settled(capturing, config, app, world), 180, every_s=5.0
            )
            wrong = [] if is_settled else unequal(config, app, world)
            records = list(raw_records(config))
            compared = [
                compare_with_table(config, capturing, table.entity) for table in world.captured
            ]
        finally:
            role.end()
            capturing.remove(drop=True, topics=True)
        assert wrong[:SHOWN] == [], f"{len(wrong)} differences; seed {seed}"
        assert [one for one in compared if one.drifted or one.pending] == []
        assert found_defects(world, app, records) == set(PLANTED)


def refused_before_anything_is_made(config: Config, world: World, dsn: str) -> None:
    """Exactly the tables that cannot be captured are refused, and nothing was made."""
    app = world.app(dsn)
    capturing = Capturing(config, app.capture_of("shop"), local=True, entities=app.entities)
    expected = {table.name: table.refused for table in world.tables if table.refused}
    if not expected:
        return
    with pytest.raises(CaptureFailed, match="nothing was made") as caught:
        capturing.add()
    lines = str(caught.value).splitlines()
    told = {t.name: [line for line in lines if t.name in line] for t in world.tables}
    refused = {name for name, listed in told.items() if listed}
    assert refused == set(expected), {name: told.get(name) for name in refused ^ set(expected)}
    assert capturing.status().state == "absent"
    if world.database.kind == "postgresql":
        assert world.database.printed("SELECT pubname FROM pg_publication") == []
        own = "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'everstate%'"
    else:
        own = "SHOW TABLES LIKE 'everstate%'"
    assert world.database.printed(own) == []
    with Topics(config) as topics:
        assert [each for each in topics.existing() if each.startswith(config.log.prefix)] == []


def streams(capturing: Capturing) -> bool:
    """Whether the stored position is behind the first snapshot."""
    position = capturing.status().position
    return bool(position) and "snapshot" not in position


def clean(config: Config, seed: int, count: int, database: Database, dsn: str) -> None:
    """The clean role, in a process of its own."""
    world = World(database, seed, count)
    cleaning = cleaning_of(config, world.app(dsn, world.captured, dropped=False), "shop")
    Cleaner(config, cleaning).run(threading.Event())


def killed_role(config: Config, seed: int, database: Database, dsn: str, world: World) -> None:
    """Have a clean role killed while it publishes."""
    process = multiprocessing.get_context("spawn").Process(
        target=clean, args=(config, seed, len(world.tables), database, dsn), daemon=True
    )
    before = published(config, world)
    process.start()
    try:
        goal = before + 50
        while published(config, world) < goal:
            world.write(5)
            assert process.is_alive()
    finally:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(30)


def settled(capturing: Capturing, config: Config, app: App, world: World) -> bool:
    """Whether nothing is wrong: what changed without row events is read again by the role, and
    what may be gone is reported with the command that is run here."""
    try:
        if any("--new-epoch" in each for each in capturing.status().problems):
            capturing.begin_epoch()
        return not unequal(config, app, world)
    except Unavailable:
        return False


def published(config: Config, world: World) -> int:
    return sum(len(changelog(config, table.entity)) for table in world.captured)


def unequal(config: Config, app: App, world: World) -> list[str]:
    """All that is wrong: values, the laws of the changelog, and what `cdc status` counts."""
    wrong = []
    balance = {one.table: one for one in read_balance(config, app.capture_of("shop")).tables}
    read = Counter(table for table, _ in raw_records(config))
    for table in world.captured:
        changes = changelog(config, table.entity)
        states = {one["key"]: one["currentEntityState"] for one in changes}
        present = {key: state for key, state in states.items() if state is not None}
        wrong += broken_laws(changes)
        wrong += differences(table, world.printed(table), present)
        counts = balance[f"{world.database.schema}.{table.name}"]
        if (counts.published, counts.vanished, counts.held) != (len(changes), 0, 0):
            wrong.append(f"{table.name}: {counts}, and {len(changes)} changes")
        if counts.read != read[table.name]:
            wrong.append(f"{table.name}: {counts}, and {read[table.name]} raw records")
        wrong += [f"{table.name}: dead: {why}" for why in dead(config, table)]
    dropped = balance[f"{world.database.schema}.{DROPPED}"]
    if not dropped.read == dropped.skipped == read[DROPPED]:
        wrong.append(f"{DROPPED}: {dropped}, and {read[DROPPED]} raw records")
    return wrong


def dead(config: Config, table: RandomTable) -> set[str]:
    """Reasons of a table's dead letters."""
    topic = TopicNames(config.log.prefix).dead(table.entity)
    with Topics(config) as topics:
        if topic not in topics.existing():
            return set()
    with Consumer(config) as consumer:
        headers = [dict(record.headers) for record in consumer.read_topic(topic)]
    return {(each.get("everstate_reason") or b"").decode() for each in headers}


def as_written(message: Message) -> bytes:
    """JSON without blanks, in which markers of unchanged values are looked for."""
    return json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode()


def found_defects(world: World, app: App, records: list[tuple[str, Record]]) -> set[str]:
    """Which of the planted defects add differences, in the rows of the first table alone.

    Rows that a killed connector wrote twice, and those whose transaction has other tables, are not
    put in order here: what differs without a planted defect says nothing.
    """
    table = world.tables[0]
    own = [json.loads(record.value or b"") for name, record in records if name == table.name]
    keys = [record.key for name, record in records if name == table.name]
    printed = world.printed(table)
    differ: dict[str, set[str]] = {}
    for defect, planted in {"none": lambda message: message, **PLANTED}.items():
        numbered = Numbered(RawReader(app.capture_of("shop"), app.entities), CONFIG)
        messages = [(key, planted(message)) for key, message in zip(keys, own, strict=True)]
        rows = (("", key, as_written(one)) for key, one in messages if one is not None)
        numbered.run(numbered.read(*rows), time.time())
        states: dict[str, Mapping[str, Any]] = {}
        for change in numbered.changes:
            states.pop(change.key, None)
            if change.current is not None:
                states[change.key] = json.loads(change.current)
        differ[defect] = set(differences(table, printed, states))
    none = differ.pop("none")
    return {defect for defect, found in differ.items() if found - none}
