"""A receiver of webhooks fails at random, is killed and is away: each change arrives, in order."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID, uuid4

import pytest

from everstate.app import App
from everstate.declarations.handlers import Handler
from everstate.handling import webhooks
from everstate.handling.tables import HandlerTables, handler_states
from handler_cases import counts, handling, rows
from kit.waiting import until
from reading_cases import Orders, orders_app
from tiers import counted, kills
from webhook_receiver import receiving

KILLS = kills(3, full=10)
SEED = int(os.environ.get("FAULT_SEED") or time.time_ns() % 2**32)
KEYS = 20
RATE = counted(40, full=100)
SECRETS = ["whsec_" + "A" * 40, "whsec_" + "B" * 40]
CHILD = Path(__file__).with_name("webhooks_child.py")


def free_port() -> int:
    """A port that no client's connection takes while the receiver is away."""
    while True:
        port = random.randrange(20_000, 30_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def port_of(url: str) -> int:
    return urlsplit(url).port or 0


class Receiver:
    """A receiver that is killed and started again on its port."""

    def __init__(self, folder: Path, share: float) -> None:
        self.file, self.share = folder / "requests.jsonl", share
        self.port = free_port()
        self.running: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        argv = [sys.executable, str(CHILD), str(self.port), str(self.file), str(self.share)]
        self.running = subprocess.Popen([*argv, *SECRETS])

    def kill(self) -> None:
        if self.running is not None:
            self.running.kill()
            self.running.wait()

    def requests(self) -> list[dict[str, Any]]:
        """What it received, as far as the lines are whole."""
        lines = self.file.read_bytes().splitlines() if self.file.exists() else []
        return [json.loads(line) for line in lines]


def posting(port: int, **options: Any) -> App:
    app, more = orders_app(), {"start": "beginning", "pause_max_s": 1.0, **options}
    url = f"http://127.0.0.1:{port}/hook"
    app.webhook("order", url=url, secret=" ".join(SECRETS), allow=["127.0.0.1"], **more)
    return app


@contextmanager
def changing(orders: Orders) -> Iterator[None]:
    """Changes at a steady rate, judged as they come."""
    stop, rng = threading.Event(), random.Random(SEED)

    def run() -> None:
        while not stop.wait(0.1):
            keys = (f"k{rng.randrange(KEYS)}" for _ in range(RATE // 10))
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


def drained(orders: Orders, app: App) -> bool:
    """Whether all that was judged is delivered, as far as the handler knows."""
    tables = HandlerTables(orders.config, app.handlers["webhooks.order"])
    query = (
        "SELECT partition, min(next_offset) FROM everstate_handlers.position"
        " WHERE handler = %s GROUP BY partition"
    )
    with tables.connected() as connection:
        if counts(tables, connection) != (0, 0):
            return False
    return sorted(rows(orders.config, query, tables.id)) == sorted(orders.kept.vector().items())


def problems(orders: Orders, requests: list[dict[str, Any]]) -> list[str]:
    """What is wrong with the requests, by what was sent and nothing else."""
    ids, seen = defaultdict[tuple[str, int], set[str]](set), defaultdict[str, list[int]](list)
    found = list[str]()
    for each in requests:
        place = each["key"], each["version"]
        ids[place].add(each["id"])
        if each["overlaps"]:
            found.append(f"{place}: two at once")
        if not each["signed"]:
            found.append(f"{place}: signature")
        if each["status"] == 204 and each["version"] not in seen[each["key"]]:
            seen[each["key"]].append(each["version"])
    found += [f"{place}: {len(each)} ids" for place, each in ids.items() if len(each) > 1]
    for key, (newest, _) in orders.versions.items():
        wanted = list(range(1, newest + 1))
        if seen[key] != wanted:
            missing = sorted(set(wanted) - set(seen[key]))
            found.append(f"{key}: missing {missing[:5]}" if missing else f"{key}: order")
    return found


def delivered(orders: Orders, folder: Path, *, times: int) -> list[dict[str, Any]]:
    """Two processes deliver to a receiver that is killed so many times."""
    rng, receiver = random.Random(SEED), Receiver(folder, share=0.1)
    app = posting(receiver.port)
    receiver.start()
    try:
        with handling(orders, app, "webhooks.order", "webhooks.order"):
            with changing(orders):
                until(receiver.requests)
                for _ in range(times):
                    time.sleep(rng.uniform(1, 3))
                    receiver.kill()
                    time.sleep(rng.uniform(0, 3))
                    receiver.start()
                time.sleep(1)
            until(lambda: drained(orders, app), 240)
    finally:
        receiver.kill()
    return receiver.requests()


@pytest.mark.timeout(900)
def test_every_change_arrives_in_order_though_the_receiver_fails_and_is_killed(
    orders: Orders, tmp_path: Path
) -> None:
    requests = delivered(orders, tmp_path, times=KILLS)
    assert problems(orders, requests) == [], f"seed {SEED}"
    sent = sum(version for version, _ in orders.versions.values())
    refused = sum(each["status"] == 500 for each in requests)
    repeated = len(requests) - refused - sent
    assert min(refused, repeated) > 0
    print(f"{sent} changes, {KILLS} kills, {refused} refused, {repeated} repeated; seed {SEED}")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("defect", "what"),
    [
        ("two at once", "two at once"),
        pytest.param("a failure is a success", "missing", marks=pytest.mark.full),
        pytest.param("another id at each call", "ids", marks=pytest.mark.full),
    ],
)
def test_the_checker_finds_a_planted_defect(
    orders: Orders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defect: str, what: str
) -> None:
    send, post = webhooks._Sender.send, webhooks._Sender._post

    async def twice(self: Any, *given: Any) -> None:
        await asyncio.gather(send(self, *given), send(self, *given))

    async def whatever(self: Any, *given: Any) -> int:
        await post(self, *given)
        return 200

    def other(self: Handler, change_id: UUID) -> UUID:
        return uuid4()

    if defect == "two at once":
        monkeypatch.setattr(webhooks._Sender, "send", twice)
    elif defect == "a failure is a success":
        monkeypatch.setattr(webhooks._Sender, "_post", whatever)
    else:
        monkeypatch.setattr(Handler, "id_of", other)
    found = problems(orders, delivered(orders, tmp_path, times=1))
    assert any(what in each for each in found), found


def test_who_answers_410_gets_nothing_again_and_a_command_sends_it_later(orders: Orders) -> None:
    """The change is parked at once, those behind it wait, and `retry` calls them in order."""
    with receiving() as receiver:
        app = posting(port_of(receiver.url))
        receiver.status = 410
        tables = HandlerTables(orders.config, app.handlers["webhooks.order"])
        with orders.keeping(), tables.connected() as connection:
            orders.send(*(orders.change("o1", status=each) for each in ("new", "paid")))
            with handling(orders, app, "webhooks.order"):
                until(lambda: counts(tables, connection) == (1, 1))
                time.sleep(2)
                assert receiver.refused == 1
                ((*_, next_call, reason),) = tables.run(connection, "failed", None).fetchall()
                assert next_call is None
                assert reason == (
                    "ChangeParked: the receiver answered HTTP 410: it wants no more of them."
                )
                receiver.status = 204
                tables.run(connection, "retry", None, None)
                until(lambda: counts(tables, connection) == (0, 0))
        versions = [json.loads(body)["data"]["version"] for _, body in receiver.posted]
    assert versions == [1, 2]


def test_a_receiver_that_fails_for_one_entity_delays_no_other(orders: Orders) -> None:
    """And the handler is late, though all was read: what waits for a retry is not handled."""
    with receiving() as receiver:
        receiver.fails_for = b'"key":"bad"'
        app = posting(port_of(receiver.url), pause_max_s=3600.0)
        handler, config = app.handlers["webhooks.order"], orders.config
        with orders.keeping(), handling(orders, app, "webhooks.order"):
            orders.send(*(orders.change("bad", status=each) for each in ("new", "paid")))
            until(lambda: receiver.refused >= 2)
            for status in ("new", "paid"):
                orders.send(*(orders.change(f"o{n}", status=status) for n in range(20)))
            until(lambda: len(receiver.posted) == 40)
            until(lambda: (handler_states(config, [handler])[0][2] or 0.0) >= 1 + 2)
            assert handler_states(config, [handler])[0][3:5] == (0, 2)
            receiver.fails_for = None
            until(lambda: handler_states(config, [handler])[0][1:5] == (0, 0.0, 0, 0))
    changes = [json.loads(body)["data"] for _, body in receiver.posted]
    found = defaultdict[str, list[int]](list)
    for each in changes:
        found[each["key"]].append(each["version"])
    assert found == {key: [1, 2] for key in ("bad", *(f"o{n}" for n in range(20)))}
    assert [each["key"] for each in changes[-2:]] == ["bad", "bad"]
