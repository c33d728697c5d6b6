"""A hundred views, of which some begin to fail: the others do not feel it.

Both tests compare times, so they run in the full tier, where no other worker runs beside them.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import count
from statistics import median

import pyarrow as pa
import pytest
from keep_cases import World, orders_app

from everstate.pipeline.keeping.keep import Keeper
from everstate.pipeline.keeping.trail import Trailer
from everstate.pipeline.keeping.turns import Turns
from everstate.views.kinds.python import PythonPlan
from kit.waiting import until

_FINE = [f"v{n}" for n in range(94)]
_CALL_S = 10.0
_STEPS = 9
_FAILING = {
    "cast": "sum(CAST(pow(10, parts) AS DECIMAL(10, 2)))",
    "division": "sum(CAST(60 DIV (parts - 2) AS BIGINT))",
    "overflow": "sum(CAST(parts * 60000000000000000 AS BIGINT))",
    "store": "sum(parts)",
    "gone": "sum(parts)",
}
# An order on which the view of that name fails.
_POISON: dict[str, tuple[str, int]] = {
    "cast": ("NL", 9),
    "division": ("NL", 2),
    "overflow": ("NL", 300),
    "store": ("BE", 1),
    "gone": ("NL", 1),
    "python": ("NL", 7),
    "exit": ("NL", 8),
}
_REASONS = {
    "cast": "cannot be represented",
    "division": "zero",
    "overflow": "overflow",
    "store": "no_be",
    "gone": "does not exist",
    "python": "ValueError: seven",
    "exit": "SystemExit: eight",
}


_VERSION = pa.schema([("version", pa.int64())])


def _versions(changes: pa.Table) -> pa.Table:
    return changes.select(["key", "version"])


def _has(changes: pa.Table, parts: int) -> bool:
    return any(each["current"]["parts"] == parts for each in changes.to_pylist())


def _raising(changes: pa.Table) -> pa.Table:
    if _has(changes, 7):
        raise ValueError("seven")
    return _versions(changes)


def _ending(changes: pa.Table) -> pa.Table:
    if _has(changes, 8):
        sys.exit("eight")
    return _versions(changes)


def _endless(changes: pa.Table) -> pa.Table:
    if _has(changes, 9):
        threading.Event().wait()
    return _versions(changes)


@contextmanager
def _running(world: World) -> Iterator[None]:
    """A keeper and two trailers as a pipeline runs them, each in a thread."""
    turns, stop = Turns(), threading.Event()
    keeper = Keeper(world.spark, world.config, world.app, turns=turns)
    some, failed = (
        Trailer(world.spark, world.config, world.app, turns, failed=which)
        for which in (False, True)
    )
    with closing(keeper), closing(some), closing(failed):
        keeper.prepare()
        parts = (keeper, some, failed)
        threads = [threading.Thread(target=each.run, args=(stop,)) for each in parts]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join(60)


@pytest.mark.full
@pytest.mark.timeout(500)
def test_c13_failing_views_among_a_hundred_delay_no_other(world: World) -> None:
    select = "SELECT country, {} AS n FROM ordr WHERE amount > {} GROUP BY country"
    world.app = orders_app(
        *((name, select.format("count(*)", n)) for n, name in enumerate(_FINE)),
        *((name, select.format(worth, 0)) for name, worth in _FAILING.items()),
    )
    for name, function in (("python", _raising), ("exit", _ending)):
        world.app.python_view(name, of="ordr", columns=_VERSION, fields=["parts"])(function)
    numbers, every = count(1), " UNION ALL ".join(f"SELECT sum(n) FROM {name}" for name in _FINE)
    every += (
        " UNION ALL SELECT count(*) FROM ordr_latest UNION ALL SELECT count(*) FROM ordr_history"
    )

    def fresh(country: str = "NL", parts: int = 1) -> float:
        """Seconds until a change is in `latest`, the history and every view that does not fail."""
        number = next(numbers)
        world.send(world.put(f"o-{number}", country, "500.00", parts=parts))
        begun = time.monotonic()
        while world.rows(every) != [(number,)] * (len(_FINE) + 2):
            assert time.monotonic() < begun + 60, "a view that does not fail stands"
            time.sleep(0.01)
        return time.monotonic() - begun

    def error(name: str) -> str:
        ((found,),) = world.rows(f"SELECT error FROM view WHERE name = '{name}'")
        return found or ""

    with _running(world):
        for _ in range(3):
            fresh()  # Java compiles
        before = median(fresh() for _ in range(_STEPS))
        world.change_tables(
            "ALTER TABLE store__v1 ADD CONSTRAINT no_be CHECK (store__v1::text NOT LIKE '%BE%')"
        )
        took = {}
        for kind, poison in _POISON.items():
            if kind == "gone":
                world.change_tables("DROP TABLE gone__v1 CASCADE")
            took[kind] = fresh(*poison)
        after = median(fresh() for _ in range(_STEPS))
        deadline = time.monotonic() + 60
        for kind, reason in _REASONS.items():
            while reason not in error(kind):
                assert time.monotonic() < deadline, f"{kind}: {error(kind)!r}"
                time.sleep(0.2)
    told = ", ".join(f"{kind} {seconds:.2f}" for kind, seconds in took.items())
    print(f"{len(_FINE)} views: {before:.2f} s; as one failed: {told}; then {after:.2f} s")
    assert median(took.values()) <= 2 * before
    assert after <= 2 * before
    lagging = world.rows("SELECT name FROM view WHERE error IS NOT NULL ORDER BY name")
    assert [name for (name,) in lagging] == sorted(_POISON)


@pytest.mark.full
def test_a_function_that_never_ends_stops_its_view_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call is given up after its time; the next tries delay nothing else."""
    for name, function in (("plain", _versions), ("endless", _endless)):
        world.app.python_view(name, of="ordr", columns=_VERSION, fields=["parts"])(function)
    table = PythonPlan.table
    monkeypatch.setattr(
        PythonPlan, "table", lambda *given: replace(table(*given), call_s_max=_CALL_S)
    )
    numbers = count(1)

    def fresh(parts: int = 1) -> tuple[float, float]:
        """Seconds until a change is in a view that rides, and in one in Python."""
        number = next(numbers)
        world.send(world.put(f"o-{number}", "NL", "500.00", parts=parts))
        begun, took = time.monotonic(), list[float]()
        for query in ("SELECT sum(orders) FROM by_country", "SELECT count(*) FROM plain"):
            while world.rows(query) != [(number,)]:
                assert time.monotonic() < begun + 60, query
                time.sleep(0.01)
            took.append(time.monotonic() - begun)
        return took[0], took[1]

    def medians() -> list[float]:
        return [median(each) for each in zip(*(fresh() for _ in range(_STEPS)), strict=True)]

    def error() -> str:
        return str(world.rows("SELECT error FROM view WHERE name = 'endless'")[0][0])

    with _running(world):
        for _ in range(3):
            fresh()  # Java compiles
        before = medians()
        first = fresh(9)
        until(lambda: "its code took longer than" in error(), 60, what=error)
        after = medians()
    print(f"before {before}; as it began not to end {first}; then {after}")
    assert first[0] <= 2 * before[0]
    assert all(now <= 2 * usual for now, usual in zip(after, before, strict=True))
