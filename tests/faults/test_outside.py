"""Defects in the roles that answer to others are found by what others may send."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

import outside_app as project
from everstate.config import Config, load
from everstate.local.processes import free_port
from everstate.log.topics import TopicNames, Topics
from outside_doors import Door, doors
from running_stack import RunningStack

TESTS = Path(__file__).parents[1]
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

    def failures(self) -> list[str]:
        """Roles that have ended by themselves, and parts of roles that failed."""
        codes = {name: process.poll() for name, process in self.processes.items()}
        ended = [
            f"{name} ended with code {code}" for name, code in codes.items() if code is not None
        ]
        lines = [line for file in self._logs() for line in file.read_text("utf-8").splitlines()]
        return ended + [line for line in lines if _FAILED in line]


@pytest.fixture
def make(stack: RunningStack, database: str, tmp_path: Path) -> Iterator[Callable[..., Project]]:
    made: list[Project] = []

    def new(plant: str | None = None) -> Project:
        made.append(Project(tmp_path, stack, database, plant))
        return made[-1]

    yield new
    for each in made:
        each.stop()


def in_threads(opened: Sequence[Door], stop: threading.Event) -> list[threading.Thread]:
    """Each door in a thread of its own, until ``stop`` is set."""

    def run(door: Door) -> None:
        while not stop.is_set():
            try:
                door.step()
            except Exception as cause:
                door.found.append(f"{type(door).__name__}: {cause!r}")
                raise

    threads = [threading.Thread(target=run, args=(door,)) for door in opened]
    for thread in threads:
        thread.start()
    return threads


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
    said = "http: 500" if plant == "serve" else "planted"
    assert any(said in each for each in found()), found()
