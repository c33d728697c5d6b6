"""commands: sent, decided in one handler process, answered; the floor and the peer beside it."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import quantiles
from threading import Semaphore
from typing import Any

import confluent_kafka
from confluent_kafka import TopicPartition

from bench import commands_app as bank
from bench.commands_peer import saves
from bench.report import Reach, Result, result
from bench.session import Session
from everstate.config import Config
from everstate.log.positions import Offsets
from everstate.log.topics import TopicNames, Topics
from everstate.sources.commands import Answer, CommandClient
from everstate.testing.command_checker import read_command_log

COUNT = 100_000
COUNT_MIN = 20_000
KEYS = 10_000
RATE = 1_000
SECONDS = 15.0
OPEN_MAX = 10_000
"""Commands that a client has sent and not yet heard of."""


def run(session: Session) -> list[Result]:
    """Throughput and latency, each beside the bare loop; then the peer."""
    count = max(COUNT_MIN, session.size(COUNT))
    seconds = SECONDS if not session.quick else 5.0
    speeds: list[float] = []
    floors: list[float] = []
    ours_ms: list[list[float]] = []
    bare_ms: list[list[float]] = []
    for _ in range(session.repeat):
        config = session.fresh()
        with Topics(config) as topics:
            topics.ensure_commands([bank.ENTITY])
        with child(config), CommandClient(config, bank.app) as client:
            throughput(client, KEYS)
            speeds.append(throughput(client, count))
            ours_ms.append(latencies(client, seconds))
        sample = sample_of(config)
        session.drop(config)
        config = session.fresh()
        with Topics(config) as topics:
            topics.ensure_commands([bank.ENTITY])
        with child(config, sample), BareClient(config, sample["command"]) as bare:
            bare.throughput(KEYS)
            floors.append(bare.throughput(count))
            bare_ms.append(bare.latencies(seconds))
        session.drop(config)
    loop = "bare confluent-kafka client and transaction loop, same batch"
    made = [
        result(
            "commands",
            "sent → answered, one handler",
            "commands/s",
            speeds,
            floors=floors,
            floor_is=loop,
            reach=Reach(value_min=10_000),
        )
    ]
    for name, at, reach in (("p50", 49, None), ("p99", 98, Reach(value_max=100))):
        made.append(
            result(
                "commands",
                f"{RATE:,} commands/s, sent → answered, {name}",
                "ms",
                [quantiles(each, n=100)[at] for each in ours_ms],
                floors=[quantiles(each, n=100)[at] for each in bare_ms],
                floor_is=loop,
                reach=reach,
            )
        )
    for row in made:
        session.say(f"[dim]  {row.metric}: {row.value:,.4g} beside {row.floor:,.4g}[/dim]")
    return made + peers(session)


@contextmanager
def child(config: Config, sample: dict[str, Any] | None = None) -> Iterator[None]:
    """A handler in a process of its own; the bare loop when there is a sample."""
    with tempfile.TemporaryDirectory() as folder:
        argv = [folder, config.bootstrap_servers, config.log.prefix]
        if sample is not None:
            path = Path(folder) / "sample.json"
            path.write_text(json.dumps(sample), "utf-8")
            argv.append(str(path))
        process = subprocess.Popen([sys.executable, "-m", "bench.commands_app", *argv])
        try:
            yield
        finally:
            process.kill()
            process.wait()


def throughput(client: CommandClient, count: int) -> float:
    """Commands a second until the last answer is heard; a bounded number is on its way."""
    room = Semaphore(OPEN_MAX)
    futures: list[Future[Answer]] = []
    gc.freeze()
    began = time.perf_counter()
    for index in range(count):
        room.acquire()
        future = submit(client, index)
        future.add_done_callback(lambda _: room.release())
        futures.append(future)
    for future in futures:
        assert future.result(120).accepted
    spent = time.perf_counter() - began
    gc.unfreeze()
    return count / spent


def submit(client: CommandClient, index: int) -> Future[Answer]:
    """One deposit."""
    key = f"a{index % KEYS}"
    command = bank.Deposit(account_id=key, amount=1 + index % 7)
    return client.submit(bank.ENTITY, key, command, provenance=bank.TELLER)


def latencies(client: CommandClient, seconds: float) -> list[float]:
    """Milliseconds from sent to heard, at a steady rate."""
    found: list[float] = []

    def heard(sent: float, _future: Future[Answer]) -> None:
        found.append((time.perf_counter() - sent) * 1000)

    def one(index: int) -> None:
        sent = time.perf_counter()
        submit(client, index).add_done_callback(partial(heard, sent))

    count = paced(one, seconds)
    deadline = time.perf_counter() + 60
    while len(found) < count:
        assert time.perf_counter() < deadline, f"{count - len(found)} answers are missing"
        time.sleep(0.01)
    return found


def paced(one: Callable[[int], None], seconds: float) -> int:
    """Do something ``RATE`` times a second; says how often it was done."""
    count = int(RATE * seconds)
    began = time.perf_counter()
    for index in range(count):
        wait_s = began + index / RATE - time.perf_counter()
        if wait_s > 0:
            time.sleep(wait_s)
        one(index)
    took = time.perf_counter() - began
    assert took < 1.05 * seconds + 0.1, f"{count:,} of {RATE:,} a second took {took:.1f} s"
    return count


def sample_of(config: Config) -> dict[str, Any]:
    """A command, a change and an answer as they were written."""
    log = read_command_log(config, bank.ENTITY)
    change = log.changes[-1]
    return {
        "command": (log.commands[-1].value or b"").decode(),
        "change": (change.value or b"").decode(),
        "headers": [(name, (value or b"").decode()) for name, value in change.headers],
        "reply": (log.replies[-1].value or b"").decode(),
    }


class BareClient:
    """Sends ready bytes and counts answers; what a client costs at least."""

    def __init__(self, config: Config, command: str) -> None:
        names = TopicNames(config.log.prefix)
        self._topic, replies = names.commands(bank.ENTITY), names.replies(bank.ENTITY)
        self._value = command.encode()
        servers = {"bootstrap.servers": config.bootstrap_servers}
        self._producer: Any = confluent_kafka.Producer(
            {
                **servers,
                "enable.idempotence": True,
                "partitioner": "murmur2_random",
                "linger.ms": config.log.linger_ms,
                "compression.type": "lz4",
                "delivery.report.only.error": True,
                "queue.buffering.max.messages": 200_000,
            }
        )
        self._consumer: Any = confluent_kafka.Consumer(
            {
                **servers,
                "group.id": "bare",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "fetch.wait.max.ms": 100,
            }
        )
        with Offsets(config) as offsets:
            ends = offsets.stable_ends([replies])
        self._consumer.assign([TopicPartition(topic, p, at) for (topic, p), at in ends.items()])

    def __enter__(self) -> BareClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._producer.flush(10)
        self._consumer.close()

    def throughput(self, count: int) -> float:
        """Commands a second until the last answer came."""
        began = time.perf_counter()
        sent = heard = 0
        while heard < count:
            while sent < count and sent - heard < OPEN_MAX:
                self._send(sent)
                sent += 1
            self._producer.poll(0)
            heard += len(self._hear(0.01))
        return count / (time.perf_counter() - began)

    def latencies(self, seconds: float) -> list[float]:
        """Milliseconds from sent to heard, at a steady rate; the time goes along as a header."""
        found: list[float] = []

        def note(messages: list[Any]) -> None:
            now = time.perf_counter()
            for message in messages:
                found.append((now - float(dict(message.headers())["sent"])) * 1000)

        def one(index: int) -> None:
            self._send(index)
            note(self._hear(0))

        count = paced(one, seconds)
        while len(found) < count:
            note(self._hear(0.01))
        return found

    def _send(self, index: int) -> None:
        headers = [("sent", repr(time.perf_counter()).encode())]
        self._producer.produce(
            self._topic, self._value, f"a{index % KEYS}".encode(), headers=headers
        )

    def _hear(self, timeout_s: float) -> list[Any]:
        first = self._consumer.poll(timeout_s)
        return [] if first is None else [first, *self._consumer.consume(5_000, 0)]


def peers(session: Session) -> list[Result]:
    """The `eventsourcing` library: load an aggregate from its cache, deposit, save."""
    found = []
    for name in ("sqlite", "postgres"):
        speeds = []
        for _ in range(session.repeat):
            config = session.fresh()
            with tempfile.TemporaryDirectory() as folder:
                speeds.append(saves(name, config, folder))
            session.drop(config)
        metric = f"the eventsourcing library on {name}, saves"
        found.append(result("commands", metric, "commands/s", speeds))
    return found
