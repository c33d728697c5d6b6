"""Readers of feeds and streams go on when `serve` is killed: nothing is missed, nothing is double.

Some 500 changes come a second, with duplicates, and some versions late. Walkers of the feed and
subscribers of the stream leave at random, and the server is killed at random moments; once, the
log forgets all that is kept. At the end the checker counts the versions of each key that every
reader got. Both planted defects are found.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from socket import create_server
from typing import Any

import pytest
from test_reading_handover import load
from test_subscriptions import Subscriber, faults

from everstate.client import Client, RequestFailed
from kit.settings import altered
from kit.waiting import until
from log_cases import forget
from reading_cases import Orders
from tiers import kills

KILLS = kills(1, full=3)
LOAD_S = 15.0
"""How long changes come before each kill, and after the last one."""
CHILD = Path(__file__).with_name("serve_child.py")
PATIENCE_S = 120.0
STAY = 50
"""A subscriber leaves after so many times up to twenty changes."""
NOT_THERE = (0, 503)
"""No answer while the server is dead, and its answer while it starts."""

pytestmark = [
    pytest.mark.full,
    pytest.mark.slow,
    pytest.mark.kafka,
    pytest.mark.postgres,
    pytest.mark.timeout(900),
]


@pytest.fixture
def orders(orders: Orders) -> Orders:
    orders.config = altered(orders.config, api={"port": _free_port()})
    return orders


def _free_port() -> int:
    """A port that nobody gets by chance while the server is dead."""
    for port in Random().sample(range(15_000, 30_000), 100):
        try:
            with create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
    raise AssertionError("no port is free")


@dataclass
class Server:
    """`serve` in a process of its own."""

    orders: Orders
    defect: str = ""
    address: str = ""
    _process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, CHILD, self.defect],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(self.orders.config.model_dump_json())
        self._process.stdin.close()
        with self._process.stdout as said:
            self.address = said.readline().strip()
        assert self.address, "the server has ended"

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@dataclass
class Follower:
    """A thread that reads until it is told that nothing more will come."""

    address: str
    random: Random
    changes: list[dict[str, Any]] = field(default_factory=list)
    left: int = 0
    failed: list[BaseException] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._bookmark = "beginning"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._was_whole():
                time.sleep(self.random.random() * 0.05)
        except BaseException as error:
            self.failed.append(error)

    def _was_whole(self) -> bool:
        """Walk some pages; out: whether it was the last walk, and came to the end."""
        is_last = self.ended.is_set()
        stay = 10**9 if is_last else self.random.randrange(8)
        try:
            with Client(self.address) as client:
                for page in client.feed("order", since=self._bookmark):
                    self.changes += page.changes
                    self._bookmark = page.bookmark
                    stay -= 1
                    if stay < 0:
                        self.left += 1
                        return False
        except RequestFailed as error:
            if error.status not in NOT_THERE:
                raise
            return False
        return is_last

    def stop(self) -> None:
        self.ended.set()
        self._thread.join()


class Comer(Subscriber):
    """A subscriber that stays for a while, and comes back to a server that was killed."""

    def _follow(self, stay: int) -> None:
        try:
            super()._follow(STAY * stay)
        except AssertionError as error:
            if "503" not in str(error):
                raise


def readers(orders: Orders, server: Server, rounds: int) -> tuple[list[Follower], list[Comer]]:
    """Readers that followed a load while the server was killed ``rounds`` times."""
    random, ended = Random(3), threading.Event()
    writer = threading.Thread(target=load, args=(orders, ended, random, 0.03))
    with ExitStack() as running:
        running.callback(server.kill)
        server.start()
        running.enter_context(orders.keeping(2_000))
        walkers = [Follower(server.address, Random(seed)) for seed in range(3)]
        comers = [Comer(server.address, Random(seed), since="beginning") for seed in range(3)]
        for ending in [each.ended for each in walkers] + [each.ended for each in comers]:
            running.callback(ending.set)
        for comer in comers:
            assert comer.is_live.wait(PATIENCE_S)
        running.callback(ended.set)
        writer.start()
        for turn in range(rounds):
            time.sleep(LOAD_S + random.random())
            server.kill()
            if turn == 0:
                ends = orders.kept.vector()
                orders.archive(ends)
                forget(orders.config, orders.topic, ends)
            server.start()
        time.sleep(LOAD_S)
        ended.set()
        writer.join()
        orders.wait_until_kept()
        for walker in walkers:
            walker.stop()
        wanted = sum(version for version, _ in orders.versions.values())
        if not server.defect:
            until(lambda: all(len(comer.changes) >= wanted for comer in comers), PATIENCE_S)
    for comer in comers:
        comer.stop()
    return walkers, comers


def told(orders: Orders, changes: list[dict[str, Any]]) -> list[str]:
    """What is wrong with the changes that a reader got."""
    wrong = faults(changes, dict.fromkeys(orders.versions, 0))
    newest = {change["key"]: change["version"] for change in changes}
    for key, (version, _) in orders.versions.items():
        if newest.get(key, 0) != version:
            wrong.append(f"{key}: {newest.get(key, 0)} is the last, not {version}")
    return wrong


def test_readers_miss_nothing_and_get_nothing_twice_when_the_server_is_killed(
    orders: Orders,
) -> None:
    walkers, comers = readers(orders, Server(orders), KILLS)
    assert [error for each in walkers for error in each.failed] == []
    found = [(each.changes, each.left) for each in walkers]
    found += [(each.changes, each.left) for each in comers]
    for changes, left in found:
        assert told(orders, changes) == []
        assert left > 3, "it was away often"


@pytest.mark.parametrize("defect", ["a place is forgotten", "a page is what was written"])
def test_the_checker_finds_a_planted_defect(orders: Orders, defect: str) -> None:
    walkers, comers = readers(orders, Server(orders, defect), 1)
    found = [each.changes for each in (comers if defect == "a place is forgotten" else walkers)]
    assert all(told(orders, changes) for changes in found)
