"""The rota of the full tier: which tests are due, and what a run of one came to."""

from __future__ import annotations

from pathlib import Path

from lines import counted
from rota import Run, chosen, due, keep, only_full, read, results

REPORT = """<testsuites><testsuite>
<testcase classname="tests.faults.test_a" name="test_kill[1]" time="2.5"/>
<testcase classname="tests.faults.test_a" name="test_kill[2]" time="1.0"><failure/></testcase>
<testcase classname="tests.faults.test_a" name="test_kill[3]" time="1.0"/>
<testcase classname="tests.faults.test_a" name="test_other" time="4"/>
</testsuite></testsuites>"""


def green(date: str, seconds: float = 10.0) -> Run:
    return Run("c0ffee", date, seconds, "ok", date)


def test_a_function_is_in_the_rota_when_one_of_its_tests_runs_in_the_full_tier_only() -> None:
    everything = ["a.py::t[1]", "a.py::t[2]", "a.py::u", "b.py::v"]
    assert only_full(everything, ["a.py::t[1]", "a.py::u"]) == ["a.py::t", "b.py::v"]


def test_the_tests_of_a_file_run_in_the_order_of_the_file() -> None:
    everything = ["b.py::killed[1]", "b.py::afterwards", "a.py::t"]
    assert only_full(everything, []) == ["b.py::killed", "b.py::afterwards", "a.py::t"]


def test_what_was_never_green_comes_first_and_then_the_oldest() -> None:
    red = Run("c0ffee", "2026-11-29", 1.0, "failure")
    runs = {"new": green("2026-11-28"), "old": green("2026-11-20"), "red": red}
    assert due(["never", "new", "old", "red"], runs) == ["never", "red", "old", "new"]


def test_as_many_tests_are_chosen_as_fit_and_always_one() -> None:
    runs = {"a": green("2026-11-20", 50), "b": green("2026-11-21", 50), "c": green("", 50)}
    assert chosen(["a", "b", "c"], runs, 100) == ["a", "b"]
    assert chosen(["a", "b", "c"], runs, 1) == ["a"]


def test_a_function_is_red_when_one_of_its_tests_is(tmp_path: Path) -> None:
    report = tmp_path / "junit.xml"
    report.write_text(REPORT)
    file = "tests/faults/test_a.py"
    assert results(report) == {
        f"{file}::test_kill": (4.5, "failure"),
        f"{file}::test_other": (4.0, "ok"),
    }


def test_runs_are_kept_in_a_file(tmp_path: Path) -> None:
    assert read(tmp_path / "rota.json") == {}
    keep({"b": green("2026-11-29"), "a": green("2026-11-28")}, tmp_path / "rota.json")
    assert list(read(tmp_path / "rota.json")) == ["a", "b"]
    assert read(tmp_path / "rota.json")["b"] == green("2026-11-29")


def test_the_lines_of_a_file_are_code_prose_or_blank() -> None:
    text = '"""What it is.\n\nMore.\n"""\n\nA = """one\ntwo"""  # why\n"""What A is."""\n# Alone.\n'
    assert counted(text) == (9, 2, 6)
