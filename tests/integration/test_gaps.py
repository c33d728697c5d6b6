"""Gaps that an operator accepts: on a real log, a real database and Spark (law 2, C6, C14)."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from decimal import Decimal

import msgspec
import pytest
from keep_cases import NOW, WHO, World, drain

from everstate.cli import gaps as verb
from everstate.errors import GapTooWide, NoGap
from everstate.log.record import OutRecord
from everstate.pipeline.gaps import MISSING_MAX, AcceptedGap, accept_gap, list_gaps
from everstate.pipeline.keeping.keep import Keeper
from kit.verbs import verbs
from kit.waiting import until

CLERK = replace(WHO, identifier="clerk", reason="the source lost it")
BY_COUNTRY = "SELECT country, orders, amount FROM by_country ORDER BY country NULLS LAST"
HISTORY = (
    "SELECT version, kind, provenance->>'identifier', provenance->>'reason', state->>'amount'"
    " FROM ordr_history WHERE key = 'o-1' ORDER BY version"
)
APP = "import keep_cases\n\napp = keep_cases.orders_app()\n"


@pytest.fixture
def keeper(world: World) -> Iterator[Keeper]:
    with closing(world.keeper()) as keeper:
        yield keeper


def accept(world: World, key: str = "o-1") -> AcceptedGap:
    return accept_gap(world.config, world.app.entity_type("ordr"), key, provenance=CLERK, now=NOW)


def different(world: World) -> list[str]:
    return [report.name for report in world.verify().values() if not report.holds]


def conflicts(world: World) -> int:
    (row,) = world.rows("SELECT count(*) FROM dead WHERE reason = 'conflict'")
    return int(row[0])


def test_c14_an_accepted_gap_is_filled_for_all_readers_and_the_late_version_is_told_as_dead(
    world: World, keeper: Keeper
) -> None:
    first, lost, later, last = (
        world.put("o-1", country, amount)
        for country, amount in (("NL", "1.00"), ("BE", "2.00"), ("FR", "300.00"), ("DE", "400.00"))
    )
    world.send(first, last, later, world.put("o-2", "NL", "7.00"))
    drain(keeper)
    (gap,) = list_gaps(world.config)
    assert (gap.entity, gap.key, gap.expected_version) == ("ordr", "o-1", 2)
    assert (gap.held_versions, list(gap.missing)) == ((3, 4), [2])
    assert {"by_country", "large"} <= set(gap.views)
    assert list_gaps(world.config, "other") == []

    assert accept(world).published == (2,)
    applied, duplicate, held, dead = drain(keeper)
    assert (applied, duplicate, held, dead) == (3, 0, 0, 0)
    assert list_gaps(world.config) == []
    assert world.rows(BY_COUNTRY) == [("DE", 1, Decimal("400.00")), ("NL", 1, Decimal("7.00"))]
    second = world.rows(HISTORY)[1]
    reason = "the source lost it: versions 2 to 2 were never received"
    assert second == (2, "updated", "clerk", reason, "2.00")
    assert world.wrong() == []

    world.send(lost)
    assert drain(keeper) == (0, 0, 0, 1)
    assert conflicts(world) == 1
    assert world.rows(BY_COUNTRY) == [("DE", 1, Decimal("400.00")), ("NL", 1, Decimal("7.00"))]
    assert [row[0] for row in world.rows(HISTORY)] == [1, 2, 3, 4]
    assert different(world) == []
    with pytest.raises(NoGap, match="gaps list"):
        accept(world)


def test_accepting_twice_or_beside_the_late_version_changes_nothing_twice(
    world: World, keeper: Keeper
) -> None:
    for key, comes_first in (("o-1", False), ("o-2", True)):
        first, lost, later = (world.put(key, "NL", f"{n}.00") for n in (1, 2, 3))
        world.send(first, later)
        drain(keeper)
        if comes_first:
            world.send(lost)
        accept(world, key)
        accept(world, key)
        if not comes_first:
            world.send(lost)
        drain(keeper)
    assert conflicts(world) == 3  # once the late version, and twice the one in its place
    rows = world.rows("SELECT key, provenance->>'identifier' FROM ordr_history WHERE version = 2")
    assert sorted(rows) == [("o-1", "clerk"), ("o-2", "t")]
    assert world.rows("SELECT sum(held) FROM counters") == [(0,)]
    assert world.rows(BY_COUNTRY) == [("NL", 2, Decimal("6.00"))]
    assert world.wrong() == []


MISSING: dict[str, list[tuple[str, str | None]]] = {
    "never seen": [("created", "2.00"), ("updated", "2.00")],
    "a delete": [("deleted", None)],
    "deleted in between": [("updated", "1.00"), ("updated", "2.00")],
    "unknown": [("created", "3.00"), ("deleted", None)],
}
"""Key, and what is missing of it → kind and amount of what is written in its place."""


def test_the_chain_holds_over_whatever_is_missing(world: World, keeper: Keeper) -> None:
    never_seen, a_delete, between, unknown = MISSING
    world.put(never_seen, "NL", "1.00"), world.put(never_seen, "BE", "2.00")
    world.send(world.put(a_delete, "NL", "1.00"), world.put(between, "NL", "1.00"))
    world.change(a_delete, None)
    world.change(between, None), world.put(between, "BE", "2.00")
    world.put(unknown, "NL", "1.00"), world.change(unknown, None)
    world.send(*[world.put(key, "FR", "3.00") for key in MISSING])
    drain(keeper)
    for key in MISSING:
        accept(world, key)
    drain(keeper)
    for key, missing in MISSING.items():
        written = world.rows(HISTORY.replace("o-1", key))
        assert [(kind, amount) for _, kind, who, _, amount in written if who == "clerk"] == missing
    assert world.rows(BY_COUNTRY) == [("FR", 4, Decimal("12.00"))]
    assert list_gaps(world.config) == []
    assert world.wrong() == []


def test_c19_a_version_that_the_store_refused_can_be_accepted_as_gone(
    world: World, keeper: Keeper
) -> None:
    good, bad, later = (world.put("o-1", "NL", f"{n}.00") for n in range(1, 4))
    # jsonb's numbers end where numeric does; the parser does not look at unknown fields.
    unstorable = (bad.value or b"").replace(b'"country":"NL"', b'"country":"NL","x":1e200000', 1)
    world.send(good, msgspec.structs.replace(bad, value=unstorable), later)
    assert drain(keeper) == (1, 0, 1, 1)
    accept(world)
    drain(keeper)
    assert world.rows(BY_COUNTRY) == [("NL", 1, Decimal("3.00"))]
    assert different(world) == []


def test_a_keeper_that_runs_goes_on_by_itself(world: World, keeper: Keeper) -> None:
    first, _, later = (world.put("o-1", "NL", f"{n}.00") for n in (1, 2, 3))
    world.send(first, later)
    stop = threading.Event()
    running = threading.Thread(target=keeper.run, args=(stop,))
    running.start()
    try:
        until(lambda: len(list_gaps(world.config)) == 1)
        accept(world)
        world.send(world.put("o-1", "BE", "4.00"))
        until(lambda: world.rows(BY_COUNTRY) == [("BE", 1, Decimal("4.00"))])
    finally:
        stop.set()
        running.join()
    assert world.wrong() == []


def test_a_version_number_that_cannot_be_right_is_not_bridged(world: World, keeper: Keeper) -> None:
    first = world.put("o-1", "NL", "1.00")
    world.states["o-1"] = (MISSING_MAX + 2, world.states["o-1"][1])
    world.send(first, world.put("o-1", "NL", "2.00"))
    drain(keeper)
    ends = world.ends()
    with pytest.raises(GapTooWide, match="10,001 versions are missing"):
        accept(world)
    assert world.ends() == ends


def test_the_command_line_lists_asks_and_accepts(
    world: World, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = verbs(world.config, monkeypatch, "gaps", app="gaps_orders:app", code=APP)
    assert run("list") == (0, "", "no changes are held\n")
    assert run("accept", "ordr", "o-1")[0] == 4  # without a terminal, but also without a gap
    records: list[OutRecord] = [world.put("o-1", "NL", f"{n}.00") for n in range(1, 10)]
    world.send(records[0], *records[2:])
    drain(keeper)
    code, shown, _ = run("list", "ordr")
    assert code == 0
    assert "3, 4, 5, 6, 7 and 2 more" in shown
    (listed,) = json.loads(run("list", "--json")[1])
    assert (listed["key"], listed["expected_version"]) == ("o-1", 2)
    assert listed["held_versions"] == list(range(3, 10))
    assert run("list", "nothing")[0] != 0

    ends = world.ends()
    monkeypatch.setattr(verb, "_is_terminal", lambda: True)
    code, told, asked = run("accept", "ordr", "o-1", answer="n\n")
    assert (code, told.split()) == (1, ["n"])
    assert "Versions 2 of ordr o-1 are missing" in asked
    assert world.ends() == ends
    code, said, _ = run("accept", "ordr", "o-1", "--yes", "--reason", "a test")
    assert code == 0
    assert "published ordr o-1 version 2" in said
    drain(keeper)
    assert run("list")[2] == "no changes are held\n"
    assert world.rows(HISTORY)[1][3] == "a test: versions 2 to 2 were never received"
