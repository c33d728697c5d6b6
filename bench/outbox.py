"""outbox: a service commits 1,000 transactions a second; how soon is each in the log?"""

from __future__ import annotations

import multiprocessing
import random
import threading
import time
from multiprocessing.connection import Connection as Pipe
from multiprocessing.synchronize import Event
from statistics import quantiles
from typing import Any

import psycopg
from psycopg import pq
from psycopg.pq.abc import PGresult
from pydantic import BaseModel

from bench.report import Reach, Result, result
from bench.session import Session
from everstate.changes import EntityType
from everstate.config import Config
from everstate.log.consumer import Follower
from everstate.log.producer import Producer
from everstate.log.topics import TopicNames, Topics
from everstate.sources.outbox import Installation, Relay, install_outbox

RATE = 1_000
WRITERS = 8
"""A commit waits for the disk; so many wait together."""
KEYS = 20_000
ROLLED_BACK = 0.1
SECONDS = 20
SECONDS_QUICK = 5
WARM_S = 10
PATIENCE_S = 60.0


class Account(BaseModel):
    """What the service keeps."""

    id: str
    balance: int
    owner: str


ACCOUNT = EntityType("account", Account, "id")

# One call is what a service does in a transaction: read under a lock, write, emit. It stands in
# the server, so that Python's writers leave the processors to what is measured.
_SERVICE = """
CREATE TABLE account (id text PRIMARY KEY, balance integer NOT NULL, owner text NOT NULL);
CREATE FUNCTION pay(who text, amount integer) RETURNS uuid LANGUAGE plpgsql AS $$
DECLARE
    old account; new account; sent record;
BEGIN
    SELECT * INTO old FROM account WHERE id = who FOR UPDATE;
    INSERT INTO account VALUES (who, amount, 'owner of ' || who)
    ON CONFLICT (id) DO UPDATE SET balance = account.balance + excluded.balance
    RETURNING * INTO new;
    SELECT * INTO sent FROM everstate_store.emit('account', who,
        CASE WHEN old.id IS NOT NULL THEN row_to_json(old) END, row_to_json(new),
        '{"apiVersion": "v1", "serviceName": "bank", "identifier": "bench"}');
    RETURN sent.id;
END $$;
"""
_READY = b"ready"


def run(session: Session) -> list[Result]:
    seconds = SECONDS_QUICK if session.quick else SECONDS
    measured: dict[str, list[tuple[float, float, float]]] = {"floor": [], "relay": []}
    for number in range(session.repeat):
        for way, runs in measured.items():
            runs.append(_measure(session, way, seconds))
            p50, p99, rate = runs[-1]
            session.say(
                f"[dim]  run {number + 1} {way}: p50 {p50:.1f} ms, p99 {p99:.1f} ms, "
                f"{rate:,.0f} transactions/s[/dim]"
            )
    floor_is = "pending rows deleted → plain producer"
    rows = [
        result(
            "outbox",
            f"{RATE} transactions/s, {ROLLED_BACK:.0%} rolled back; commit → Kafka, {name}",
            "ms",
            [run[at] for run in measured["relay"]],
            floors=[run[at] for run in measured["floor"]],
            floor_is=floor_is,
            reach=Reach(value_max=limit),
        )
        for at, name, limit in ((0, "p50", 50), (1, "p99", 250))
    ]
    achieved = [run[2] for run in measured["relay"]]
    reach = Reach(value_min=0.98 * RATE * (1 - ROLLED_BACK))
    return [
        *rows,
        result(
            "outbox",
            "committed and in the log",
            "changes/s",
            achieved,
            floors=[run[2] for run in measured["floor"]],
            floor_is=floor_is,
            reach=reach,
        ),
    ]


def _measure(session: Session, way: str, seconds: int) -> tuple[float, float, float]:
    """Milliseconds at the middle and at the 99th of a hundred, and changes a second."""
    config = _prepared(session)
    spawn = multiprocessing.get_context("spawn")
    stop = spawn.Event()
    target = _bare if way == "floor" else _relay
    mover = spawn.Process(target=target, args=(config, stop), daemon=True)
    mover.start()
    arrivals: dict[str, float] = {}
    reading = threading.Thread(target=_read, args=(config, arrivals, stop), daemon=True)
    reading.start()
    try:
        time.sleep(WARM_S)
        commits = _write(config, WARM_S + seconds)
        deadline = time.monotonic() + PATIENCE_S
        while len(arrivals) < len(commits):
            assert time.monotonic() < deadline, f"{len(commits) - len(arrivals)} never came"
            time.sleep(0.05)
    finally:
        stop.set()
        mover.join(30)
        reading.join(30)
    assert arrivals.keys() == commits.keys()
    session.drop(config)
    began = min(commits.values()) + WARM_S
    times = [arrivals[i] - at for i, at in commits.items() if at >= began]
    cuts = quantiles(times, n=100)
    spent_s = max(arrivals.values()) - min(commits.values())
    return 1000 * cuts[49], 1000 * cuts[98], len(commits) / spent_s


def _prepared(session: Session) -> Config:
    config = session.fresh()
    with Topics(config) as topics:
        topics.ensure([ACCOUNT.name])
    with psycopg.connect(config.store_dsn, autocommit=True) as connection:
        install_outbox(connection, Installation(entity_types=[ACCOUNT]))
        connection.execute(_SERVICE)
    return config


def _relay(config: Config, stop: Event) -> None:
    done = threading.Event()

    def watch() -> None:
        stop.wait()
        done.set()

    threading.Thread(target=watch, daemon=True).start()
    with Relay(config, [ACCOUNT]) as relay:
        relay.run(done)


def _bare(config: Config, stop: Event) -> None:
    """The floor: pending rows are produced, without order, transactions, states or marks."""
    topic = TopicNames(config.log.prefix).changes(ACCOUNT.name)
    take = (
        "WITH gone AS (DELETE FROM everstate_store.outbox_pending RETURNING id)"
        " SELECT change_id, key, after FROM everstate_store.outbox JOIN gone USING (id)"
    )
    with psycopg.connect(config.store_dsn, autocommit=True) as connection:
        with Producer(config) as producer:
            while not stop.is_set():
                rows = connection.execute(take).fetchall()
                for change_id, key, after in rows:
                    headers = [("ce_id", str(change_id).encode())]
                    producer.send_raw(topic, key.encode(), after.encode(), headers)
                producer.flush()
                if not rows:
                    time.sleep(config.store.relay_poll_ms / 1000)


def _read(config: Config, arrivals: dict[str, float], stop: Event) -> None:
    topic = TopicNames(config.log.prefix).changes(ACCOUNT.name)
    follower = Follower(config, {(topic, part): 0 for part in range(config.log.partitions)})
    while not stop.is_set():
        records = follower.poll(1_000, 0.1)
        now = time.time()
        for record in records:
            arrivals[(dict(record.headers)["ce_id"] or b"").decode()] = now
    follower.close()


def _write(config: Config, seconds: int) -> dict[str, float]:
    """Change id → the moment right before its COMMIT."""
    spawn = multiprocessing.get_context("spawn")
    pipes, writers = [], []
    for number in range(WRITERS):
        ours, theirs = spawn.Pipe()
        writer = spawn.Process(
            target=_writer, args=(config.store_dsn, number, seconds, theirs), daemon=True
        )
        writer.start()
        pipes.append(ours)
        writers.append(writer)
    for pipe in pipes:
        assert pipe.recv() == _READY
    for pipe in pipes:
        pipe.send(_READY)
    commits: dict[str, float] = {}
    for pipe in pipes:
        commits.update(pipe.recv())
    for writer in writers:
        writer.join(30)
    return commits


def _writer(dsn: str, number: int, seconds: int, pipe: Pipe[Any, Any]) -> None:
    rng, commits = random.Random(number), {}
    with psycopg.connect(dsn, autocommit=True) as connection:
        # The driver's lowest level, and each BEGIN with the COMMIT before it: a writer in Python
        # is to leave the processors to what is measured, as pgbench would.
        wire = connection.pgconn
        _done(wire.prepare(b"pay", b"SELECT pay($1, $2)"))
        _done(wire.exec_(b"BEGIN"))
        pipe.send(_READY)
        pipe.recv()
        began = time.perf_counter()
        for turn in range(RATE // WRITERS * seconds):
            time.sleep(max(0.0, began + turn * WRITERS / RATE - time.perf_counter()))
            # Each writer has keys of its own, so that none waits for another.
            who = f"a-{rng.randrange(KEYS) * WRITERS + number}"
            values = [who.encode(), str(turn + 1).encode()]
            paid = _done(wire.exec_prepared(b"pay", values)).get_value(0, 0)
            if rng.random() < ROLLED_BACK:
                _done(wire.exec_(b"ROLLBACK AND CHAIN"))
                continue
            assert paid is not None
            commits[paid.decode()] = time.time()
            _done(wire.exec_(b"COMMIT AND CHAIN"))
        _done(wire.exec_(b"ROLLBACK"))
    pipe.send(commits)


def _done(result: PGresult) -> PGresult:
    """The result of a statement that the server has run."""
    ran = result.status in (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK)
    assert ran, result.error_message
    return result
