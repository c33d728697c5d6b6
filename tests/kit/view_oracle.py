"""The right contents of views of orders: an oracle that uses no SQL, no sums and no batches."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any

from everstate.views.tables import Row
from kit.view_orders import START, Log, Logged, OrderState, state_text


@dataclass
class OracleTables:
    """Rows that readers must see, and the account of all records (law 7)."""

    latest: list[Row]
    history: list[Row]
    by_region: list[Row]
    totals: list[Row]
    open_orders: list[Row]
    applied: int
    duplicate: int
    held: int
    dead: int


class _Account:
    """Applies the laws to one record after the other."""

    def __init__(self) -> None:
        self.versions: dict[str, list[Logged]] = defaultdict(list)
        self.waiting: dict[str, dict[int, Logged]] = defaultdict(dict)
        self.duplicate = self.dead = 0

    def take(self, record: Logged) -> None:
        if record.reason is not None:
            self.dead += 1
            return
        done, waiting = self.versions[record.key], self.waiting[record.key]
        known = done[record.version - 1] if record.version <= len(done) else None
        known = known or waiting.get(record.version)
        if known is not None:
            same = known.change_id == record.change_id
            self.duplicate += same
            self.dead += not same
            return
        waiting[record.version] = record
        while len(done) + 1 in waiting:
            done.append(waiting.pop(len(done) + 1))


def accepted(logs: Iterable[Log], until: Mapping[int, int]) -> list[Logged]:
    """The changes that are applied before a vector, versions of each key in order."""
    return [change for done in _account(logs, until).versions.values() for change in done]


def expected(logs: Iterable[Log], until: Mapping[int, int] | None = None) -> OracleTables:
    """Contents of views after all records of some partitions, or those before a vector."""
    account = _account(logs, until)
    alive = [done[-1].current for done in account.versions.values() if done]
    orders = [state for state in alive if state is not None]
    latest, older = [], []
    for key, done in account.versions.items():
        as_of = START
        for change in done:
            as_of = max(as_of, change.occurred_at)
            older.append((key, change.version, change.kind, as_of, _text(change.current)))
        if done:
            latest.append((key, len(done), done[-1].kind, as_of, _text(done[-1].current)))
    regions: dict[str | None, list[OrderState]] = defaultdict(list)
    for state in orders:
        if state["status"] != "void":
            regions[state["region"]].append(state)
    by_region = []
    for region, states in regions.items():
        quantities = [s["quantity"] for s in states if s["quantity"] is not None]
        average = Decimal(sum(quantities)) / len(quantities) if quantities else None
        total = _sum(s["amount"] for s in states)
        by_region.append((region, len(states), total, _rounded(average), len(quantities)))
    return OracleTables(
        latest=in_order(latest),
        history=in_order(older),
        by_region=in_order(by_region),
        totals=[(len(orders), _sum(s["quantity"] for s in orders))],
        open_orders=in_order(
            (s["region"], s["amount"], s["order_id"]) for s in orders if s["status"] == "open"
        ),
        applied=len(older),
        duplicate=account.duplicate,
        held=sum(map(len, account.waiting.values())),
        dead=account.dead,
    )


def _account(logs: Iterable[Log], until: Mapping[int, int] | None) -> _Account:
    account = _Account()
    for partition, log in enumerate(logs):
        end = log.end if until is None else until[partition]
        for offset, record in sorted(log.records.items()):
            if offset < end:
                account.take(record)
    return account


def _sum(values: Iterable[Any]) -> Any:
    present = [value for value in values if value is not None]
    return sum(present) if present else None


def _rounded(value: Decimal | None) -> Decimal | None:
    return None if value is None else round(value, 8)


def _text(state: OrderState | None) -> Any:
    return None if state is None else _parsed(state_text(state))


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Any:
    return json.loads(text)


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Rows in an order that does not depend on their input order."""
    return sorted(rows, key=repr)


def differences(found: OracleTables, wanted: OracleTables) -> dict[str, tuple[Any, Any]]:
    """Fields in which two sets of tables differ; empty when they are equal."""
    left, right = vars(found), vars(wanted)
    return {name: (left[name], right[name]) for name in left if left[name] != right[name]}
