"""Results of benches: medians, ratios of pairs, bounds, and the files that are written."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from bench.report import Kept, Measured, Reach, between, figure, now, read, result, table, write


def test_the_ratio_is_the_median_of_the_pairs() -> None:
    row = result("b", "m", "x/s", [10.0, 30.0, 20.0], floors=[20.0, 30.0, 80.0], floor_is="bare")
    assert (row.value, row.floor, row.ratio) == (20.0, 30.0, 0.5)
    assert row.spread == (10.0, 30.0)
    assert row.holds
    assert row.reach == ""


@pytest.mark.parametrize(
    ("reach", "value", "ratio", "holds"),
    [
        (Reach(ratio_min=0.8), 1.0, 0.8, True),
        (Reach(ratio_min=0.8), 1.0, 0.79, False),
        (Reach(ratio_min=0.25, value_min=10_000), 9_999.0, 0.5, False),
        (Reach(ratio_max=2.0), 1.0, 2.1, False),
        (Reach(value_max=500), 499.0, None, True),
        (Reach(ratio_max=2.0), 1.0, None, False),
        (Reach(), 1.0, None, True),
    ],
)
def test_a_reach_holds_when_all_of_its_bounds_do(
    reach: Reach, value: float, ratio: float | None, holds: bool
) -> None:
    assert reach.holds(value, ratio) is holds


def test_a_reach_is_told_in_words() -> None:
    assert str(Reach(ratio_min=0.25, value_min=10_000)) == "ratio ≥ 0.25 and value ≥ 10,000"


def test_results_are_written_as_json_and_as_a_table(tmp_path: Path) -> None:
    about = Measured("2026-11-27", "934a467", "two cores")
    rows = [
        result("keep", "warm", "changes/s", [5e4], floors=[1e5], reach=Reach(ratio_min=0.35)),
        result("keep", "slow", "changes/s", [1.0], reach=Reach(value_min=2)),
    ]
    kept = [Kept("keep", row, about) for row in rows]
    write({"keep": kept}, tmp_path / "results.json", ["keep"])
    first, second = json.loads((tmp_path / "results.json").read_text())
    wanted = {"bench", "metric", "value", "unit", "floor", "ratio", "reach", "holds"}
    assert wanted <= first.keys()
    assert (first["ratio"], first["holds"], second["floor"], second["holds"]) == (
        0.5,
        True,
        None,
        False,
    )
    page = (tmp_path / "RESULTS.md").read_text()
    assert page == table(kept)
    assert "Machine 1: two cores." in page
    assert "| **no** | 2026-11-27, 934a467, machine 1 |" in page
    assert read(tmp_path / "results.json") == {"keep": kept}


def test_a_bench_that_was_not_run_keeps_its_rows_and_their_date_and_machine(tmp_path: Path) -> None:
    path, order = tmp_path / "results.json", ["publish", "keep"]
    before = Measured("2026-11-22", "16086a3", "two cores")
    after = Measured("2026-11-27", "934a467", "four cores")
    old = [Kept(name, result("b", "old", "s", [1.0]), before) for name in ("keep", "publish")]
    write({row.name: [row] for row in old}, path, order)
    new = [Kept("keep", result("b", metric, "s", [2.0]), after) for metric in ("one", "two")]
    write({"keep": new}, path, order)
    assert read(path) == {"publish": [old[1]], "keep": new}
    page = (tmp_path / "RESULTS.md").read_text()
    assert "16086a3, machine 1 |" in page
    assert page.count("934a467, machine 2 |") == 2


def test_a_result_names_the_commit_it_was_measured_on() -> None:
    assert re.fullmatch(r"[0-9a-f]{7,}(-dirty)?|unknown", now().commit)


def test_figures_have_three_digits() -> None:
    assert [figure(v) for v in (None, 0.12345, 12.34, 123.4, 54_321.0)] == [
        "–",
        "0.123",
        "12.3",
        "123",
        "54,321",
    ]


def test_a_step_across_a_mark_is_split_by_its_changes() -> None:
    steps = [(100, 1.0), (200, 4.0), (100, 1.0)]
    assert between(steps, (150, 400)) == pytest.approx([2e6 / 150, 4e6 / 250])
