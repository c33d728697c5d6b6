"""Many readers go over from a snapshot to the stream at random moments, under load (acceptance)."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from everstate.changes import Change
from everstate.changes.tokens import Token, parse_token
from everstate.config import Config
from everstate.log.record import OutRecord
from everstate.serving import changes as changes_module
from everstate.serving import snapshots as snapshots_module
from everstate.serving.changes import Changes
from everstate.serving.merged import MergedChanges
from everstate.serving.places import position_of
from everstate.views.in_effect import in_effect
from everstate.views.trailing import Exceptions
from reading_cases import Orders
from tiers import counted

READERS = counted(20, full=200)
SECONDS = counted(3.0, full=20.0)
VIEWS = ("order_latest", "open_orders", "totals")


@dataclass
class Follower:
    """One reader: its snapshot, and what it has made of the changes since."""

    config: Config
    orders: Orders
    view: str
    delay_s: float
    changes: Changes | MergedChanges | None = None
    began: Any = None
    rows: dict[str, Any] = field(default_factory=dict)
    totals: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    seen: int = 0

    def run(self, ended: threading.Event) -> None:
        ended.wait(self.delay_s)
        app = self.orders.app
        snapshot = app.snapshot(self.view, config=self.config)
        if self.view == "order_latest":
            self.rows = {row["key"]: row["version"] for row in snapshot.records()}
        elif self.view == "open_orders":
            self.rows = {row["_key"]: row["_version"] for row in snapshot.records()}
        else:
            self.totals = [number or 0 for number in snapshot.rows[0]]
        self.changes = app.changes("order", since=snapshot.token, config=self.config)
        for item in self.changes:
            self.seen += 1
            self._take(item.change)

    def _take(self, change: Change[dict[str, Any]]) -> None:
        now, before = change.current, change.original
        if self.view == "order_latest":
            known = self.rows.get(change.key, 0)
            if change.version != known + 1:
                self.wrong.append(f"{change.key}: {change.version} after {known}")
            self.rows[change.key] = change.version
        elif self.view == "open_orders":
            if now is not None and now["status"] == "open":
                self.rows[change.key] = change.version
            else:
                self.rows.pop(change.key, None)
        else:
            self.totals[0] += (now is not None) - (before is not None)
            self.totals[1] += (now or {}).get("quantity", 0) - (before or {}).get("quantity", 0)

    def has(self, end: Token) -> bool:
        """Whether it has come to where the core is."""
        if self.changes is None:
            return False
        at = parse_token(self.changes.token).positions["order"].spots
        return all(at[place] >= spot for place, spot in end.positions["order"].spots.items())


def load(orders: Orders, ended: threading.Event, random: Random, pause_s: float = 0.2) -> None:
    """Some 16 changes of orders, then a pause; with duplicates, and versions that come late."""
    late: list[OutRecord] = []
    sent: list[OutRecord] = []
    while not ended.is_set():
        records = []
        for _ in range(random.randint(1, 30)):
            key = f"k{random.randrange(60)}"
            if random.random() < 0.1 and orders.versions.get(key, (0, None))[1] is not None:
                record = orders.change(key)
            else:
                status = random.choice(("open", "paid"))
                record = orders.change(key, quantity=random.randint(0, 9), status=status)
            if random.random() < 0.05:
                late.append(record)
            else:
                records.append(record)
            if sent and random.random() < 0.2:
                records.append(random.choice(sent[-50:]))
        # More come late than leave by chance: without a bound all keys would wait in the end.
        if late and (len(late) > 8 or random.random() < 0.4):
            records.append(late.pop(random.randrange(len(late))))
        orders.send(*records)
        sent += records
        ended.wait(pause_s)
    orders.send(*late)


def hand_over(orders: Orders, readers: int, seconds: float, seed: int = 5) -> list[str]:
    """What is wrong with what readers have in the end."""
    random, ended = Random(seed), threading.Event()
    followers = [
        Follower(orders.config, orders, VIEWS[n % len(VIEWS)], random.uniform(0, seconds * 0.8))
        for n in range(readers)
    ]
    threads = [threading.Thread(target=each.run, args=(ended,)) for each in followers]
    writer = threading.Thread(target=load, args=(orders, ended, random))
    with orders.keeping():
        for thread in (writer, *threads):
            thread.start()
        threading.Event().wait(seconds)
        ended.set()
        writer.join()
        orders.wait_until_kept()
        end = parse_token(orders.app.snapshot("order_latest", config=orders.config).token)
        deadline = threading.Event()
        for _ in range(1_500):
            if all(each.has(end) for each in followers):
                break
            deadline.wait(0.02)
    for each in followers:
        if each.changes is not None:
            each.changes.close()
    for thread in threads:
        thread.join(30)
    return wrong_of(orders, followers, end)


def wrong_of(orders: Orders, followers: list[Follower], end: Token) -> list[str]:
    found = [f"reader {n}: not at the end" for n, each in enumerate(followers) if not each.has(end)]
    last = {
        "order_latest": {
            row["key"]: row["version"]
            for row in orders.app.snapshot("order_latest", config=orders.config).records()
        },
        "open_orders": {
            row["_key"]: row["_version"]
            for row in orders.app.snapshot("open_orders", config=orders.config).records()
        },
    }
    totals = list(orders.app.snapshot("totals", config=orders.config).rows[0])
    for number, each in enumerate(followers):
        found += [f"reader {number}: {wrong}" for wrong in each.wrong]
        has = each.totals if each.view == "totals" else each.rows
        wanted = totals if each.view == "totals" else last[each.view]
        if has != wanted:
            found.append(f"reader {number} of {each.view}: {has} is not {wanted}")
    return found


@pytest.mark.timeout(240)
def test_no_reader_misses_a_change_or_gets_one_twice(orders: Orders) -> None:
    assert hand_over(orders, READERS, SECONDS) == []
    account = orders.kept.tables()
    assert account.duplicate > 0, "there were duplicates"
    held = orders.kept.query("SELECT count(*) FROM held WHERE released_at IS NOT NULL")
    assert held[0][0] > 0, "and changes that waited"


def _position_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows and the position are of two moments."""
    read = position_of

    def earlier(control: Any, row: Any) -> Any:
        found = read(control, row)
        control.connection.execute("COMMIT; BEGIN ISOLATION LEVEL REPEATABLE READ")
        threading.Event().wait(0.2)
        return found

    monkeypatch.setattr(snapshots_module, "position_of", earlier)


def _nothing_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Duplicates are given too."""
    order = in_effect

    def without(records: Any, offsets: Any, since: Any, end: Any, noted: Any, of: Any) -> Any:
        told = Exceptions(noted.dead, (), noted.held, noted.released)
        return order(records, offsets, since, end, told, of)

    monkeypatch.setattr(changes_module, "in_effect", without)


@pytest.mark.parametrize("plant", [_position_later, _nothing_noted])
def test_a_planted_defect_is_seen(
    orders: Orders, monkeypatch: pytest.MonkeyPatch, plant: Any
) -> None:
    plant(monkeypatch)
    # The defect shows when a change falls into the moment that it opens; soon one does.
    assert any(hand_over(orders, 6, 1.5) for _ in range(8))
