"""What the keeper reports of its views to `everstate status` and `everstate run`."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from everstate.parts import Journal, Part, run_parts
from everstate.pipeline.keeping.kept import EntityViews
from everstate.pipeline.keeping.metrics import ViewReports
from everstate.views.control import BUILDING, LIVE, WAITING, ViewVersion
from everstate.views.versions import REFUSED

FIRST = ViewVersion("totals", 1, "order", "linear", {}, (), "a", status=LIVE, published=True)
SECOND = replace(FIRST, version=2, published=False, fingerprint="b")


State = tuple[EntityViews, Mapping[int, int], set[str]]
"""The views, where the log ends, and what can be read."""


def reported(folder: Path, *second: ViewVersion) -> list[Mapping[str, Part]]:
    """Parts of the role after each state of the second version."""
    kept = (EntityViews("order", {}, (), FIRST, (FIRST, row)) for row in second)
    return parts_after(folder, *((views, {}, {"totals"}) for views in kept))


def parts_after(folder: Path, *states: State) -> list[Mapping[str, Part]]:
    """Parts of the role after each state."""
    journal, seen = Journal("pipeline", folder), list[Mapping[str, Part]]()

    def keep(stop: threading.Event) -> None:
        reports = ViewReports()
        for views, ends, there in states:
            reports.report({"order": views}, {"order": ends}, there)
            told = journal.state.parts
            seen.append({name: part for name, part in told.items() if "totals" in name})
        stop.set()

    run_parts(journal, {"keeper": keep}, threading.Event())
    return seen


def test_a_version_that_spark_refuses_is_a_part_that_stopped_until_it_is_built(
    tmp_path: Path,
) -> None:
    reason = f"{REFUSED}view totals: no such column."
    refused = replace(SECOND, status=WAITING, status_reason=reason)
    first, then = reported(tmp_path, refused, replace(SECOND, status=BUILDING))
    assert "view totals" not in first, "readers see an earlier version"
    part = first["view totals, version 2"]
    assert (part.state, part.reason) == ("stopped", reason)
    assert "view totals, version 2" not in then


def test_a_build_that_failed_is_tried_again_and_one_that_nobody_asked_for_is_no_trouble(
    tmp_path: Path,
) -> None:
    failed = replace(SECOND, status=BUILDING, error="the disk is full")
    asked = replace(SECOND, status=WAITING, status_reason="`views rebuild totals` builds it")
    late = replace(failed, built={"changes": 3})
    first, then, last = reported(tmp_path, failed, asked, late)
    part = first["view totals, version 2"]
    assert (part.state, part.reason) == ("waiting", "the disk is full")
    assert not then
    assert not last


def test_a_view_runs_once_its_rows_have_all_that_the_log_held_at_the_first_look(
    tmp_path: Path,
) -> None:
    there, row = {"totals"}, replace(FIRST, version=2)

    def at(offset: int, **how: Any) -> EntityViews:
        seen = replace(row, **how)
        return EntityViews("order", {0: offset}, (), seen, (seen, FIRST))

    told = parts_after(
        tmp_path,
        (at(0), {0: 9}, there),
        (at(8), {0: 20}, there),
        (at(9, waits_for="the view totals keeps its present columns"), {0: 20}, there),
        (at(9), {0: 20}, there),
        (at(9), {0: 90}, there),
    )
    assert [set(parts) for parts in told] == [set()] * 3 + [{"view totals"}] * 2
    assert told[-1]["view totals"].state == "running"


def test_a_view_whose_name_nobody_can_read_waits_with_the_next_step(tmp_path: Path) -> None:
    views = EntityViews("order", {0: 9}, (), FIRST, (FIRST,))
    gone, failed, back = parts_after(
        tmp_path,
        (views, {0: 9}, set()),
        (replace(views, status=replace(FIRST, error="division by zero")), {0: 9}, set()),
        (views, {0: 9}, {"totals"}),
    )
    part = gone["view totals"]
    assert (part.state, part.advice) == ("waiting", "Start the pipeline again.")
    assert "nobody can read it" in (part.reason or "")
    assert failed["view totals"].reason == "division by zero"
    assert back["view totals"].state == "running"


def test_a_view_that_runs_goes_on_running_while_a_new_version_is_built(tmp_path: Path) -> None:
    one = EntityViews("order", {}, (), FIRST, (FIRST,))
    two = replace(one, rows=(FIRST, replace(SECOND, status=BUILDING)))
    told = parts_after(tmp_path, (one, {}, {"totals"}), (two, {}, {"totals"}))
    assert [parts["view totals"].state for parts in told] == ["running", "running"]
