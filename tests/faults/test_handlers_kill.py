"""Processes of a group are killed, stopped, ended and started; each effect is there once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from handler_cases import EFFECTS, rows
from kit.waiting import until
from reading_cases import Orders
from tiers import counted, kills

KILLS = kills(3, full=20)
SEED = int(os.environ.get("FAULT_SEED") or time.time_ns() % 2**32)
KEYS = 40
RATE = counted(200, full=500)
SESSION_S = 6.0
HERE = Path(__file__).parent


class Processes:
    """Processes that run both handlers; at the end none is left."""

    def __init__(self, orders: Orders, defect: str = "", fails: float = 0.0) -> None:
        self.orders, self.defect, self.fails = orders, defect, fails
        self.running: list[subprocess.Popen[bytes]] = []
        self.log = orders.config.project.data_dir.parent / "handlers.log"

    def start(self, *, is_good: bool = False) -> None:
        config = self.orders.config
        environment = {k: v for k, v in os.environ.items() if not k.startswith("EVERSTATE_")}
        environment |= {"PYTHONPATH": str(HERE.parent), "FAILS": str(0 if is_good else self.fails)}
        folder = config.project.data_dir.parent
        given = [config.bootstrap_servers, config.log.prefix, config.views_dsn]
        given += [config.views.schema_name, str(folder), "" if is_good else self.defect]
        with self.log.open("ab") as output:
            argv = [sys.executable, str(HERE / "handlers_child.py"), *given]
            self.running.append(
                subprocess.Popen(argv, env=environment, stdout=output, stderr=output)
            )

    def end(self, number: int, *signals: int) -> None:
        process = self.running.pop(number)
        for each in signals:
            process.send_signal(each)
        try:
            process.wait(120)
        except subprocess.TimeoutExpired as cause:
            process.send_signal(signal.SIGUSR1)
            time.sleep(1)
            process.kill()
            raise AssertionError(self.log.read_text("utf-8")[-9_000:]) from cause


@contextmanager
def processes(
    orders: Orders, count: int, defect: str = "", fails: float = 0.0
) -> Iterator[Processes]:
    with psycopg.connect(orders.config.views_dsn, autocommit=True) as connection:
        connection.execute(EFFECTS)
    found = Processes(orders, defect, fails)
    try:
        for _ in range(count):
            found.start()
        yield found
    finally:
        for each in found.running:
            each.kill()
            each.wait()


@contextmanager
def load(orders: Orders) -> Iterator[None]:
    """Changes at a steady rate, judged as they come."""
    stop, rng = threading.Event(), random.Random(SEED)

    def run() -> None:
        while not stop.wait(0.05):
            keys = (f"k{rng.randrange(KEYS)}" for _ in range(RATE // 20))
            orders.send(*(orders.change(key, quantity=rng.randrange(99)) for key in keys))

    thread = threading.Thread(target=run)
    with orders.keeping(500):
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        orders.wait_until_kept()


def problems(orders: Orders, handler: str, *, once: bool) -> list[str]:
    """What is wrong with the effects of a handler, by what was sent and nothing else.

    Without ``once`` an effect may be repeated: with the same id, and none may be missing; the
    order counts the first effect of each version.
    """
    query = "SELECT key, version, call FROM effect WHERE handler = %s ORDER BY id"
    found: dict[str, list[int]] = {}
    calls: dict[tuple[str, int], set[object]] = {}
    for key, version, call in rows(orders.config, query, handler):
        found.setdefault(key, []).append(version)
        calls.setdefault((key, version), set()).add(call)
    told = [f"{place}: {len(ids)} ids" for place, ids in calls.items() if len(ids) > 1]
    for key, (newest, _) in orders.versions.items():
        versions = found.get(key, [])
        seen = versions if once else list(dict.fromkeys(versions))
        wanted = list(range(1, newest + 1))
        if seen == wanted:
            continue
        missing = sorted(set(wanted) - set(seen))
        twice = sorted(v for v, count in Counter(seen).items() if count > 1)
        what = f"missing {missing[:5]}" if missing else f"twice {twice[:5]}" if twice else "order"
        told.append(f"{key}: {what}")
    return told


def drained(orders: Orders) -> bool:
    """Whether the position of both handlers is the end of what was judged."""
    query = (
        "SELECT partition, min(next_offset) FROM everstate_handlers.position"
        " WHERE handler LIKE %s GROUP BY handler, partition"
    )
    ends = sorted(orders.kept.vector().items()) * 2
    return sorted(rows(orders.config, query, "%.kill.%")) == sorted(ends)


def finished(orders: Orders, running: Processes) -> None:
    """Two processes without defects handle the rest."""
    for _ in list(running.running):
        running.end(0, signal.SIGKILL)
    for _ in range(2):
        running.start(is_good=True)
    until(lambda: drained(orders), 240)


def disturb(running: Processes, rng: random.Random) -> None:
    """Kill one, stop one for longer than its session, end one, start others; in any order."""
    deeds = ["kill", "stop", "end"] * KILLS
    rng.shuffle(deeds)
    for deed in deeds:
        time.sleep(rng.uniform(0.3, 1.5))
        at = rng.randrange(len(running.running))
        if deed == "kill":
            running.end(at, signal.SIGKILL)
            running.start()
        elif deed == "end":
            running.end(at, signal.SIGTERM)
            running.start()
        else:
            stopped = running.running[at]
            stopped.send_signal(signal.SIGSTOP)
            time.sleep(SESSION_S + rng.uniform(1, 3))
            stopped.send_signal(signal.SIGCONT)


@pytest.mark.timeout(1800)
def test_a_group_that_is_killed_stopped_and_moved_handles_each_change_once(
    orders: Orders,
) -> None:
    rng = random.Random(SEED)
    with processes(orders, 3) as running:
        with load(orders):
            # On a busy machine a process needs long to start.
            until(lambda: len(rows(orders.config, "SELECT FROM effect LIMIT 200")) == 200, 240)
            disturb(running, rng)
        finished(orders, running)
    assert problems(orders, "inside", once=True) == [], f"seed {SEED}"
    assert problems(orders, "outside", once=False) == [], f"seed {SEED}"
    sent = sum(version for version, _ in orders.versions.values())
    print(f"{sent} changes, {KILLS} kills, {KILLS} stops, {KILLS} ends; seed {SEED}")


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("defect", "what"),
    [
        ("position before effect", "missing"),
        ("no compare-and-swap", "twice"),
        ("order", "order"),
        ("taken for a duplicate", "missing"),
    ],
)
def test_the_checker_finds_a_planted_defect(orders: Orders, defect: str, what: str) -> None:
    """Calls kill or stop their own process, so that it happens within a transaction."""
    fails = {"position before effect": 0.002, "no compare-and-swap": 0.01}.get(defect, 0.0)
    with processes(orders, 2, defect, fails) as running:
        with load(orders):
            # On a busy machine a process needs long to start.
            until(lambda: len(rows(orders.config, "SELECT FROM effect LIMIT 20")) == 20, 240)
            for _ in range(4):
                time.sleep(SESSION_S + 2)
                for each in running.running:
                    # Those that were stopped go on when others have taken their place.
                    each.send_signal(signal.SIGCONT)
                running.start()
        finished(orders, running)
    told = [*problems(orders, "inside", once=True), *problems(orders, "outside", once=False)]
    assert any(what in each for each in told), told
