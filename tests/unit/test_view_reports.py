"""What the keeper reports of its views to `everstate status` and `everstate run`."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from everstate.parts import Journal, Part, run_parts
from everstate.pipeline.keeping.kept import EntityViews
from everstate.pipeline.keeping.metrics import ViewReports
from everstate.views.control import BUILDING, LIVE, WAITING, ViewVersion
from everstate.views.versions import REFUSED

FIRST = ViewVersion("totals", 1, "order", "linear", {}, (), "a", status=LIVE, published=True)
SECOND = replace(FIRST, version=2, published=False, fingerprint="b")


def reported(folder: Path, *second: ViewVersion) -> list[Mapping[str, Part]]:
    """Parts of the role after each state of the second version."""
    journal, seen = Journal("pipeline", folder), list[Mapping[str, Part]]()

    def keep(stop: threading.Event) -> None:
        reports = ViewReports()
        for row in second:
            reports.report({"order": EntityViews("order", {}, (), FIRST, (FIRST, row))})
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
    assert first["view totals"].state == then["view totals"].state == "running"
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
    assert set(then) == set(last) == {"view totals"}
