"""How the pages' readers compare outputs, and what they may ask twice."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest

from page_reader import matches, only_reads, run_here


@pytest.mark.parametrize(
    ("expected", "output", "same"),
    [
        ("", "anything", True),
        ("a b", "x a   b y", True),
        ("a … b", "a 1 2 b", True),
        ("a … c", "a 1 2 b", False),
        ("…1.5…", "ab 1.5", True),
        ("…1.5…", "ab 125", False),
    ],
)
def test_an_output_is_compared_with_what_the_page_shows(
    expected: str, output: str, same: bool
) -> None:
    assert matches(expected, output) is same


def test_where_other_data_is_played_any_number_does_for_one_and_words_stay() -> None:
    assert not matches("73,592 changes, 1.5 s", "8,123 changes, 0.25 s")
    assert matches("73,592 changes, 1.5 s", "8,123 changes, 0.25 s", figures=False)
    assert not matches("73,592 changes", "8,123 records", figures=False)
    assert not matches("73,592 changes", "no changes", figures=False)
    assert matches("at 7.… of 17b228d9 rows", "at 5.25 s of 0af rows", figures=False)


@pytest.mark.parametrize(
    ("command", "may_repeat"),
    [
        ("everstate get guest g1", True),
        ("everstate -C demo views show delays", True),
        ("everstate views verify delays", False),
        ("everstate drift check guest", False),
        ("everstate archive verify", False),
        ("everstate commands send room r1 OpenRoom {}", False),
        ("everstate commands parked room", True),
        ("curl -s http://localhost/ready", True),
        ("curl -s http://localhost/v1/guest --json {}", False),
        ("curl -si -X DELETE http://localhost/v1/guest/g1", False),
    ],
)
def test_only_a_command_that_reads_is_run_until_it_shows_what_the_page_shows(
    command: str, may_repeat: bool
) -> None:
    """A proof or a write that fails at first must not pass in the end."""
    assert only_reads(shlex.split(command)) is may_repeat


def test_a_module_of_another_tests_project_is_not_taken_for_the_pages_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ModuleType("parcels")
    other.__file__ = str(tmp_path / "other" / "parcels.py")
    monkeypatch.setitem(sys.modules, "parcels", other)
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "parcels.py").write_text("WEIGHT = 3\n")
    command = ["python", "-c", "import parcels; print(parcels.WEIGHT)"]
    assert run_here(command, folder, {}) == (0, "3\n")
