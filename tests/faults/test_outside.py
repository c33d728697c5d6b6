"""Nobody from outside stops a running project: PostgreSQL, Kafka and HTTP send what they take."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import psycopg
import pytest

import outside_app as project
from everstate.config import Config, load
from everstate.local.processes import free_port
from everstate.log.consumer import Consumer
from everstate.log.dead_letters import REASON
from everstate.log.producer import Producer
from everstate.log.topics import TopicNames, Topics
from everstate.sources.outbox import read_status
from outside_doors import Door, doors
from running_stack import RunningStack

TESTS = Path(__file__).parents[1]
FUZZ_S = float(os.environ.get("OUTSIDE_S", "600"))
"""A shorter time is for whoever works on this test."""
LATE_S = 60.0
"""A change of the load is in the views within this time."""
LINES_MAX = 200
"""Log lines of all roles in a minute; who is outside may not fill the disk with more."""
_PAUSE_S = 0.05
"""Between two things that one door sends: what is sent counts here, and not how much of it."""
_PATIENCE_S = 300.0
_TOML = """
[project]
app = "outside_app:app"
[log]
partitions = 2
[archive]
trigger_s = 5
[pipeline]
master = "local[2]"
driver_memory = "1g"
"""
_FAILED = "is started again in"
"""What a role logs of a part that failed."""
_WHO = {"Everstate-Service": "load", "Everstate-Identifier": "l"}


def until(condition: Callable[[], object], what: str, about: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}\n{about()}"
        time.sleep(0.2)


class Project:
    """A project on the servers of this run, with its processes."""

    def __init__(self, folder: Path, stack: RunningStack, database: str, plant: str | None) -> None:
        self.folder, self.port = folder, free_port(set())
        (folder / "everstate.toml").write_text(_TOML, "utf-8")
        log = {"bootstrap_servers": stack.bootstrap_servers, "prefix": f"t{uuid.uuid4().hex[:12]}"}
        self._env = {
            **os.environ,
            "PYTHONPATH": str(TESTS),
            "EVERSTATE_LOG_BOOTSTRAP_SERVERS": log["bootstrap_servers"],
            "EVERSTATE_LOG_PREFIX": log["prefix"],
            "EVERSTATE_STORE_DSN": database,
            "EVERSTATE_METRICS_ENABLED": "false",
            project.PLANT: plant or "",
        }
        self.config: Config = load(folder, log=log, store={"dsn": database})
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        raw = TopicNames(log["prefix"]).raw("shop", "item")
        with Topics(self.config) as topics:
            topics.ensure_raw([raw], partitions=1, settings={})
        self.call("outbox", "install")

    def call(self, *words: str) -> str:
        done = subprocess.run(
            self._argv(*words),
            env=self._env,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _argv(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "everstate.cli", "--project", str(self.folder), *words]

    def start(self, *words: str) -> None:
        """Start a process; its name is the last word."""
        with (self.folder / f"{words[-1]}.out").open("ab") as output:
            self.processes[words[-1]] = subprocess.Popen(
                self._argv(*words), env=self._env, stdout=output, stderr=output
            )

    def serve(self) -> None:
        """Start the server, and wait until it answers."""
        self.start("serve", "--port", str(self.port))
        self.processes["serve"] = self.processes.pop(str(self.port))
        until(self.answers, "it serves", self.log)

    def answers(self) -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=5).status_code < 500
        return False

    def stop(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(120)
            process.kill()
            process.wait()
        self.processes.clear()

    def log(self) -> str:
        """What all processes have printed."""
        return "\n".join(
            f"{file.name}:\n{file.read_text('utf-8')[-9_000:]}" for file in self._logs()
        )

    def _logs(self) -> list[Path]:
        return [*self.folder.glob("*.out"), *self.folder.glob(".everstate/logs/*.log")]

    def pids(self) -> set[int]:
        """All processes of the roles."""
        found = set()
        for process in self.processes.values():
            if process.poll() is None:
                found |= {process.pid, *(c.pid for c in psutil.Process(process.pid).children())}
        return found

    def failures(self) -> list[str]:
        """Roles that have ended by themselves, and parts of roles that failed."""
        codes = {name: process.poll() for name, process in self.processes.items()}
        ended = [
            f"{name} ended with code {code}" for name, code in codes.items() if code is not None
        ]
        return ended + [line for line in self.lines() if _FAILED in line]

    def lines(self) -> list[str]:
        """All lines that the processes have printed."""
        return [line for file in self._logs() for line in file.read_text("utf-8").splitlines()]


@pytest.fixture
def make(stack: RunningStack, database: str, tmp_path: Path) -> Iterator[Callable[..., Project]]:
    made: list[Project] = []

    def new(plant: str | None = None) -> Project:
        made.append(Project(tmp_path, stack, database, plant))
        return made[-1]

    yield new
    for each in made:
        each.stop()


@dataclass
class Load:
    """Somebody who uses the project in the usual way, by each way in, and looks for the result."""

    running: Project
    waiting: list[tuple[str, str, float]] = field(default_factory=list)
    """Entity type, key, and when it was sent."""
    arrived: Counter[str] = field(default_factory=Counter)
    late: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    number: int = 0

    def __post_init__(self) -> None:
        self._client = httpx.Client(
            base_url=f"http://127.0.0.1:{self.running.port}", headers=_WHO, timeout=60
        )
        self._producer = Producer(self.running.config)
        self._database = psycopg.connect(self.running.config.store_dsn, autocommit=True)

    def close(self) -> None:
        self._client.close()
        self._producer.close()
        self._database.close()

    def send(self) -> None:
        """One change by each way in."""
        self.number += 1
        key = f"load-{self.number}"
        self._sent("order", f"{key}-put", self._put)
        self._sent("order", f"{key}-emit", self._emit)
        self._sent("visit", key, self._visit)
        self._sent("account", key, self._open)
        self._sent("item", key, self._capture)

    def begin(self) -> None:
        """Wait until a change by each way in is in the views: roles and Spark take a while."""
        until(self._are_decided, "commands are decided", self.running.log)
        self.send()
        until(lambda: self.look(_PATIENCE_S), "all roles run", self.running.log)

    def _are_decided(self) -> bool:
        """Whether an account was opened now, or was open."""
        answer = self._opened(project.VISITORS)
        return answer.status_code == 200 or answer.json().get("code") == "open"

    def look(self, late_s: float = LATE_S) -> bool:
        """Take off the list what is in the views; returns whether all of it is."""
        left = []
        for entity, key, sent_at in self.waiting:
            age_s = time.monotonic() - sent_at
            if self._client.get(f"/v1/{entity}/{key}/history").status_code == 200:
                self.arrived[entity] += 1
                self.slowest_s = max(self.slowest_s, age_s if late_s == LATE_S else 0.0)
            elif age_s > late_s:
                self.late.append(f"{entity} {key}")
            else:
                left.append((entity, key, sent_at))
        self.waiting = left
        return not left

    def _sent(self, entity: str, key: str, send: Callable[[str], None]) -> None:
        began = time.monotonic()
        send(key)
        self.waiting.append((entity, key, began))

    def _put(self, key: str) -> None:
        body = {"order_id": key, "note": "n"}
        assert self._client.put(f"/v1/order/{key}", json=body).status_code == 201

    def _emit(self, key: str) -> None:
        who = json.dumps({"apiVersion": "v1", "serviceName": "load", "identifier": "l"})
        after = json.dumps({"order_id": key, "note": "n"})
        run = "SELECT everstate_store.emit('order', %s, NULL, %s, %s)"
        self._database.execute(run, [key, after, who])

    def _visit(self, key: str) -> None:
        answer = self._client.post("/v1/visit", json={"visit_id": key, "page": "p"})
        assert answer.status_code in (200, 201, 202), answer.text

    def _open(self, key: str) -> None:
        answer = self._opened(key)
        told = f"{key}: {answer.status_code} {answer.text}\n{self.running.log()}"
        # A command that is not decided within its time is decided later: `look` waits for it.
        assert answer.status_code in (200, 504), told

    def _opened(self, key: str) -> httpx.Response:
        body = {"account_id": key, "owner": "load"}
        return self._client.post(f"/v1/account/{key}/commands/Open", json=body)

    def _capture(self, key: str) -> None:
        place = {
            "connector": "postgresql",
            "schema": "public",
            "table": "item",
            "snapshot": "false",
        }
        source = {**place, "lsn": 10**9 + self.number, "ts_ms": int(time.time() * 1000)}
        value = {"op": "c", "before": None, "after": {"id": key, "name": "n"}, "source": source}
        topic = TopicNames(self.running.config.log.prefix).raw("shop", "item")
        self._producer.send_raw(topic, json.dumps({"id": key}).encode(), json.dumps(value).encode())
        self._producer.flush()


def in_threads(opened: Sequence[Door], stop: threading.Event) -> list[threading.Thread]:
    """Each door in a thread of its own, until ``stop`` is set."""

    def run(door: Door) -> None:
        while not stop.wait(_PAUSE_S):
            try:
                door.step()
            except Exception as cause:
                door.found.append(f"{type(door).__name__}: {cause!r}")
                raise

    threads = [threading.Thread(target=run, args=(door,)) for door in opened]
    for thread in threads:
        thread.start()
    return threads


def refusals(config: Config) -> list[str | None]:
    """The reasons of all dead letters."""
    names, found = TopicNames(config.log.prefix), list[str | None]()
    with Topics(config) as topics, Consumer(config) as consumer:
        existing = topics.existing()
        for topic in [names.dead_unknown, *map(names.dead, project.app.entities)]:
            if topic in existing and topic != names.dead("order"):  # the fuzzer writes to that one
                for record in consumer.read_topic(topic):
                    reason = dict(record.headers).get(REASON)
                    found.append(None if reason is None else reason.decode())
    return found


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_nobody_from_outside_stops_a_running_project(make: Callable[..., Project]) -> None:
    running = make()
    running.start("run")
    running.serve()
    load, stop = Load(running), threading.Event()
    load.begin()
    pids, known = running.pids(), set(running.failures())

    seed = int(os.environ.get("OUTSIDE_SEED", "1"))
    opened = doors(running.config, seed, running.port)
    threads = in_threads(opened, stop)
    ends = time.monotonic() + FUZZ_S
    try:
        while time.monotonic() < ends:
            load.send()
            load.look()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    until(load.look, "the load arrives", running.log)
    found = [each for door in opened for each in door.found]
    print({**opened[0].outcomes, **opened[1].outcomes, **opened[2].outcomes})
    late = Counter(each.split()[0] for each in load.late)
    print(load.arrived, f"slowest {load.slowest_s:.1f} s", f"late: {late}")
    assert found == []
    assert set(running.failures()) == known, running.log()
    assert running.pids() == pids
    assert load.late == []
    assert len(running.lines()) < LINES_MAX * (FUZZ_S / 60 + 5), "the logs were flooded"
    with psycopg.connect(running.config.store_dsn, autocommit=True) as connection:
        assert read_status(connection).blocked == ()
    reasons = refusals(running.config)
    assert reasons
    assert all(reasons)

    # What others have written is met again at a start.
    running.stop()
    running.start("run")
    running.serve()
    load.begin()
    assert (load.late, set(running.failures())) == ([], known), running.log()
    load.close()
    for door in opened:
        door.close()


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("plant", project.PLANTS)
def test_a_planted_defect_is_found(make: Callable[..., Project], plant: str) -> None:
    running = make(plant)
    running.start("run", "--only", "relay")
    running.start("run", "--only", "commands")
    running.serve()
    stop = threading.Event()
    opened = doors(running.config, 1, running.port)
    threads = in_threads(opened, stop)

    def found() -> list[str]:
        return running.failures() + [each for door in opened for each in door.found]

    try:
        until(found, "the defect is found", running.log)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        for door in opened:
            door.close()
    # A role may have ended by the defect: then only its log has the reason.
    reasons = "\n".join(found()) if plant == "serve" else running.log()
    assert ("http: 500" if plant == "serve" else "RuntimeError: planted") in reasons, found()
