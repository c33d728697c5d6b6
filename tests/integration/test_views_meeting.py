"""A version that is behind meets its core, however busy the core is (V7)."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from typing import Any

import pytest
from keep_cases import CHANGED, HOW, World, begun, changed_app

from everstate.pipeline.keeping.build import Builder
from everstate.pipeline.keeping.keep import Keeper
from everstate.pipeline.keeping.kept import EntityViews
from everstate.pipeline.keeping.trail import Trailer
from everstate.pipeline.keeping.turns import Turns
from everstate.views.control import Control

CORE_IS_OVERDUE_S = 3.0
"""Longer than a step of a core takes that does not wait."""


@pytest.mark.full
def test_v7_a_version_that_meets_the_core_while_a_job_runs_rides_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be behind again with each job, as long as one job follows the other."""
    begun(world)
    world.app = changed_app(CHANGED)
    keeper = world.keeper()
    world.send(*[world.put(f"o-{n}", "NL", "7.00", parts=9) for n in range(200, 230)])
    assert Keeper.step(keeper) is not None
    # The archive does not have these: the version is behind by them.
    assert keeper.builder.step() is not None
    world.send(*[world.put(f"o-{n}", "NL", "8.00", parts=1) for n in range(200, 230)])
    run, met = keeper._collect, []

    def meet_first(units: Any) -> list[Any]:
        met.append(keeper.trailer.step())
        return run(units)

    monkeypatch.setattr(keeper, "_collect", meet_first)
    assert Keeper.step(keeper) is not None
    assert met[0] >= 30
    assert keeper.trailer.step() == 0
    assert world.rows(HOW) == [(1, "kept", False), (2, "live", True)]
    assert all(report.holds for report in world.verify().values())
    keeper.close()


@pytest.mark.parametrize(
    "is_shared",
    [
        pytest.param(True, id="turns"),
        pytest.param(False, id="planted: no turns", marks=pytest.mark.full),
    ],
)
def test_v7_a_version_is_published_while_the_core_never_rests_and_its_jobs_are_slower(
    world: World, monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    """Each job of the version ends when the core has gone on, unless the core waits for it."""
    begun(world)
    world.app = changed_app(CHANGED)
    turns = Turns()
    keeper = Keeper(world.spark, world.config, world.app, turns=turns)
    trailer = Trailer(world.spark, world.config, world.app, turns if is_shared else Turns())
    stop, apply = threading.Event(), trailer._apply

    def keep() -> None:
        while not stop.is_set():
            world.send(*[world.put(f"o-{n}", "NL", "7.00", parts=9) for n in range(30)])
            keeper.step()

    def apply_late(control: Control, views: EntityViews, *rest: Any) -> tuple[str | None, int]:
        deadline = time.monotonic() + CORE_IS_OVERDUE_S
        while control.core_vector(views.entity) == views.vector and time.monotonic() < deadline:
            time.sleep(0.05)
        return apply(control, views, *rest)

    monkeypatch.setattr(trailer, "_apply", apply_late)
    keeping = threading.Thread(target=keep)
    with closing(keeper), closing(trailer):
        keeper.prepare()
        with closing(Builder(world.spark, world.config, world.app)) as builder:
            assert builder.step() is not None
        keeping.start()
        try:
            for _ in range(4):
                trailer.step()
            published = [version for version, _, seen in world.rows(HOW) if seen]
        finally:
            stop.set()
            keeping.join()
    assert published == ([2] if is_shared else [1])
