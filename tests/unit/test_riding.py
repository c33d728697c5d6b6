"""Riders of which some fail: which are written, and what that costs; without a server."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from everstate.views.batch import Batch
from everstate.views.stores.postgres.transaction import RIDING_TRIES_MAX, PostgresCore
from everstate.views.tables import Core, KeptTable
from kit.view_contract import TOTALS
from kit.view_orders import orders

RIDERS = [replace(TOTALS, view=f"v{n}") for n in range(100)]


class Riding(PostgresCore):
    """A transaction in memory, in which some riders cannot be written."""

    def __init__(self, failing: Collection[str]) -> None:
        self.failing, self.written, self.tries, self.savepoints = failing, list[str](), 0, 0
        self.core, self.partition = Core("order", "order.changes"), 0
        self._unprepared, self._writing = {}, None

    def take_riders(self, riders: Sequence[KeptTable], *_place: Any) -> set[str]:
        return {rider.name for rider in riders}

    def write_rider(self, rider: KeptTable, batch: Batch) -> None:
        self.tries += 1
        if rider.view in self.failing:
            raise psycopg.errors.CheckViolation(f"{rider.view} refuses it")
        self.written.append(rider.view)

    def _execute(self, statement: str) -> None:
        if statement.startswith("SAVEPOINT"):
            self.savepoints += 1
            self._kept = len(self.written)
        elif statement.startswith("ROLLBACK"):
            del self.written[self._kept :]


def ridden(*failing: int) -> tuple[Riding, list[str]]:
    """The transaction after a ride, and the views that failed in it."""
    opened = Riding({f"v{n}" for n in failing})
    failures = opened.ride(RIDERS, 0, 3, Batch(orders(3).between(0, 3), {}))
    assert all(failure.reason == f"{failure.view} refuses it" for failure in failures)
    return opened, [failure.view for failure in failures]


@pytest.mark.parametrize("failing", [(), (0,), (50,), (99,), (3, 4, 70), tuple(range(40, 50))])
def test_c13_all_but_the_failing_riders_are_written_and_none_more_than_twice(
    failing: tuple[int, ...],
) -> None:
    opened, failures = ridden(*failing)
    assert failures == [f"v{n}" for n in failing]
    assert sorted(opened.written) == sorted(r.view for r in RIDERS if r.view not in failures)
    assert opened.tries <= 2 * len(RIDERS)
    assert opened.savepoints <= 2 * len(failing) + 1


def test_c13_after_many_failures_the_other_riders_trail_without_an_error() -> None:
    opened, failures = ridden(*range(100))
    assert failures == [f"v{n}" for n in range(RIDING_TRIES_MAX)]
    assert opened.written == []
    assert opened.savepoints == RIDING_TRIES_MAX


def test_an_error_that_is_of_no_rider_ends_the_transaction() -> None:
    class NoPositions(Riding):
        def take_riders(self, riders: Sequence[KeptTable], *_place: Any) -> set[str]:
            raise psycopg.errors.UndefinedTable("position")

    with pytest.raises(psycopg.errors.UndefinedTable):
        NoPositions(()).ride(RIDERS, 0, 3, Batch(orders(3).between(0, 3), {}))
