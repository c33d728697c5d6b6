"""pgbench runs while Connect, the clean role and PostgreSQL are killed, each of them twice.

At the end every table equals what the changelogs say, row by row; the balances agree, as pgbench
keeps them; and each of its transactions is whole in the log.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
from pydantic import BaseModel
from test_capture_kill import streams
from test_source_restored import Server

from capture_cases import PostgresSource, capture_config, eventually
from clean_role import has_come
from everstate.app import App
from everstate.config import Config
from everstate.declarations.captures import Table
from everstate.log.consumer import Consumer
from everstate.log.topics import TopicNames, Topics
from everstate.pipeline.clean import Cleaner
from everstate.sources.cdc.capturing import Capturing
from everstate.sources.cdc.cleaning import cleaning_of
from everstate.sources.cdc.restarting import keep_running, restarters_of

SCALE = 10
"""100,000 accounts each."""
CLIENTS = 4
VICTIMS = ("connect", "clean", "postgres") * 2
TURN_S = 20
"""How long pgbench runs around each kill."""
PATIENCE_S = 300.0
LAST = -1
"""Key of the last row that is written."""


class Branch(BaseModel):
    """A row of pgbench_branches."""

    bid: int
    bbalance: int


class Teller(BaseModel):
    """A row of pgbench_tellers."""

    tid: int
    bid: int
    tbalance: int


class Account(BaseModel):
    """A row of pgbench_accounts."""

    aid: int
    bid: int
    abalance: int


class Transfer(BaseModel):
    """A row of pgbench_history, which gets a key here."""

    id: int
    aid: int
    bid: int
    tid: int
    delta: int


Row = tuple[Any, ...]
ROWS: dict[str, tuple[str, type[BaseModel]]] = {
    "branch": ("branches", Branch),
    "teller": ("tellers", Teller),
    "account": ("accounts", Account),
    "transfer": ("history", Transfer),
}


def bank(dsn: str) -> App:
    app = App("bank")
    tables = {}
    for name, (table, model) in ROWS.items():
        app.entity(name, key=next(iter(model.model_fields)), source="capture")(model)
        tables[f"public.pgbench_{table}"] = Table(entity=name)
    app.capture("bank", kind="postgresql", dsn=dsn, tables=tables)
    return app


def clean(config: Config, dsn: str) -> None:
    """The role, in a process of its own."""
    app, stop = bank(dsn), threading.Event()
    restarters = restarters_of(app.captures, app.entities, lambda: config)
    threading.Thread(target=keep_running, args=(restarters, stop), daemon=True).start()
    Cleaner(config, cleaning_of(config, app, "bank")).run(stop)


class Bank:
    """The servers and the roles, and what kills and restarts each of them."""

    def __init__(self, connect: Any, config: Config, server: Server, dsn: str) -> None:
        self.connect, self.config, self.server, self.dsn = connect, config, server, dsn
        self.begin()

    def begin(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.role: BaseProcess = context.Process(
            target=clean, args=(self.config, self.dsn), daemon=True
        )
        self.role.start()

    def end(self) -> None:
        self.role.kill()
        self.role.join(30)

    def kill(self, victim: str) -> None:
        if victim == "connect":
            self.connect.servers.kill("connect")
        elif victim == "clean":
            self.end()
        else:
            pid = int((self.server.data / "postmaster.pid").read_text("utf-8").split()[0])
            sessions = psutil.Process(pid).children(recursive=True)
            os.kill(pid, signal.SIGKILL)
            # They see that their parent is gone, and end by themselves.
            assert psutil.wait_procs(sessions, 30)[1] == []

    def restart(self, victim: str) -> None:
        if victim == "connect":
            self.connect.servers.start()
        elif victim == "clean":
            self.begin()
        else:
            self.server.start()


@pytest.fixture
def server(connect: Any, tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path / "source", "postgres", connect.config.bootstrap_servers)
    try:
        yield made
    finally:
        made.stack.stop()


def pgbench(dsn: str, *options: str) -> subprocess.Popen[bytes]:
    command = shutil.which("pgbench")
    assert command, "pgbench is needed: the Debian package postgresql-contrib has it"
    return subprocess.Popen(
        [command, *options, dsn], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def read(config: Config, entity: str) -> Iterator[dict[str, Any]]:
    with Consumer(config) as consumer:
        for record in consumer.read_topic(TopicNames(config.log.prefix).changes(entity)):
            yield json.loads(record.value or b"")


@pytest.mark.full
@pytest.mark.timeout(1_500)
def test_what_pgbench_wrote_is_in_the_log_whatever_is_killed(
    connect: Any, topic_prefix: str, server: Server
) -> None:
    config, random, dsn = capture_config(connect.config, topic_prefix), Random(4), server.start()
    source = PostgresSource(dsn)
    assert pgbench(dsn, "-i", "-q", "-s", str(SCALE)).wait(300) == 0
    source.run("ALTER TABLE pgbench_history ADD id bigserial PRIMARY KEY")
    app = bank(dsn)
    capturing = Capturing(config, app.capture_of("bank"), local=True, entities=app.entities)
    with Topics(config) as topics:
        topics.ensure(app.entities)
    capturing.add(wait_s=120)
    roles = Bank(connect, config, server, dsn)
    try:
        assert eventually(lambda: streams(capturing), PATIENCE_S, every_s=1.0), capturing.status()
        for victim in VICTIMS:
            running = pgbench(dsn, "-n", "-c", str(CLIENTS), "-T", str(TURN_S))
            time.sleep(TURN_S * (0.2 + 0.6 * random.random()))
            roles.kill(victim)
            # Without its server pgbench ends at once, and otherwise it has answers for all.
            assert (running.wait(120) == 0) is (victim != "postgres")
            roles.restart(victim)
        source.run(f"INSERT INTO pgbench_history (id, aid, bid, tid, delta) "
                   f"VALUES ({LAST}, 0, 0, 0, 0)")  # fmt: skip
        assert eventually(
            lambda: has_come(config, "transfer", str(LAST)), PATIENCE_S, every_s=2.0
        ), capturing.status()
    finally:
        roles.end()
        capturing.remove(drop=True, topics=True)

    found = {entity: read(config, entity) for entity in ROWS}
    tables = {
        entity: source.rows(f"SELECT {', '.join(model.model_fields)} FROM pgbench_{table}")
        for entity, (table, model) in ROWS.items()
    }
    assert len(tables["transfer"]) > 1_000
    assert broken(found, tables) == []


def broken(
    changes: Mapping[str, Iterable[dict[str, Any]]], tables: Mapping[str, Iterable[Row]]
) -> list[str]:
    """What is wrong with the changelogs of all entity types, which are read once, in order."""
    wrong: list[str] = []
    states: dict[str, dict[str, Row]] = {}
    blocks: dict[str, Counter[tuple[int, int]]] = {}
    empty = set[str]()
    for entity, (_, model) in ROWS.items():
        newest, versions = states.setdefault(entity, {}), Counter[str]()
        for change in changes[entity]:
            key = change["key"]
            versions[key] += 1
            if change["version"] != versions[key]:
                wrong.append(f"{entity} {key}: {change['version']} and not {versions[key]}")
            before, now = (
                None if state is None else tuple(state[name] for name in model.model_fields)
                for state in (change["originalEntityState"], change["currentEntityState"])
            )
            if before != newest.get(key) or now is None:
                wrong.append(f"{entity} {key} v{versions[key]}: it does not follow from the last")
                continue
            newest[key] = now
            block = change["provenance"].get("transaction")
            if block is not None and key != str(LAST):
                blocks.setdefault(block["id"], Counter())[block["index"], block["count"]] += 1
                if entity == "transfer" and now[-1] == 0:
                    empty.add(block["id"])
        rows = {str(row[0]): row for row in tables[entity]}
        wrong += [f"{entity} {key}: its row differs" for key in rows.keys() | newest.keys()
                  if rows.get(key) != newest.get(key)]  # fmt: skip
    sums = [sum(row[-1] for row in rows.values()) for rows in states.values()]
    if len(set(sums)) != 1:
        wrong.append(f"the balances of {', '.join(states)} are {sums}")
    whole = Counter((index, 4) for index in range(1, 5))
    for name, parts in blocks.items():
        # An UPDATE that changes nothing is counted, and has no change.
        if parts != (Counter([(4, 4)]) if name in empty else whole):
            listed = ", ".join(f"{index} of {count}" for index, count in sorted(parts.elements()))
            wrong.append(f"transaction {name}: {listed}")
    if len(blocks) != len(states["transfer"].keys() - {str(LAST)}):
        wrong.append(f"there are {len(blocks)} transactions")
    return wrong


def told(entity: str, version: int, index: int, *values: int) -> dict[str, Any]:
    """A change in a transaction of four, of one row whose last field was 0 before."""
    now = dict(zip(ROWS[entity][1].model_fields, values, strict=True))
    return {
        "key": str(values[0]),
        "version": version,
        "originalEntityState": None if version == 1 else {**now, list(now)[-1]: 0},
        "currentEntityState": now,
        "provenance": {"transaction": {"id": "7", "count": 4, "index": index}},
    }


Planted = Callable[[dict[str, list[dict[str, Any]]]], object]
PLANTED: dict[str, tuple[Planted, str]] = {
    "nothing": (lambda _: None, ""),
    "a change is lost": (lambda found: found["account"].clear(), "its row differs"),
    "a change is there twice": (
        lambda found: found["branch"].append(found["branch"][0]), "and not 2"),
    "another value": (
        lambda found: found["teller"][0]["currentEntityState"].update(tbalance=6),
        "the balances of branch, teller"),
    "a part of a transaction is lost": (
        lambda found: found["transfer"][0]["provenance"].clear(),
        "transaction 7: 1 of 4, 2 of 4, 3 of 4"),
}  # fmt: skip


@pytest.mark.parametrize("planted", PLANTED)
def test_the_checker_finds_what_is_planted(planted: str) -> None:
    found = {
        "account": [told("account", 1, 1, 3, 1, 5)],
        "teller": [told("teller", 1, 2, 2, 1, 5)],
        "branch": [told("branch", 1, 3, 1, 5)],
        "transfer": [told("transfer", 1, 4, 9, 3, 1, 2, 5)],
    }
    tables = {
        name: [tuple(one["currentEntityState"].values()) for one in changes]
        for name, changes in found.items()
    }
    plant, wanted = PLANTED[planted]
    plant(found)
    wrong = broken(found, tables)
    assert any(wanted in each for each in wrong) if wanted else wrong == []
