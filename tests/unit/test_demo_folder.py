"""The demonstration empties its own folder, and never anybody else's."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from everstate.cli import cli
from everstate.demo import run
from everstate.demo.run import DemoOptions, run_demo
from everstate.errors import LocalStackError


@pytest.mark.parametrize(
    ("name", "text"),
    [("notes.txt", "mine"), ("everstate.toml", '[project]\napp = "shop:app"\n')],
)
def test_a_folder_that_holds_something_else_is_not_touched(
    tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / ".everstate").mkdir()
    (tmp_path / ".everstate" / "archive").write_text("years of it")
    (tmp_path / name).write_text(text)
    options = DemoOptions(folder=tmp_path, first=date(2013, 2, 1), last=date(2013, 2, 2))
    with pytest.raises(LocalStackError, match="holds something else"):
        run_demo(options, Console())
    assert (tmp_path / name).read_text() == text
    assert (tmp_path / ".everstate" / "archive").read_text() == "years of it"


@pytest.mark.parametrize(
    "options",
    [
        ["--days", "4"],
        ["--from", "2013-02-06"],
        ["--year", "--from", "2013-02-06", "--days", "4"],
        ["--from", "2013-12-30", "--days", "3"],
    ],
)
def test_a_period_that_is_not_whole_or_not_in_the_data_is_refused(
    tmp_path: Path, options: list[str]
) -> None:
    result = CliRunner().invoke(cli, ["-C", str(tmp_path), "demo", *options])
    assert result.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_the_days_played_are_those_from_the_first_one_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[DemoOptions] = []
    monkeypatch.setattr(run, "run_demo", lambda options, console: played.append(options))
    argv = ["-C", str(tmp_path), "demo", "--from", "2013-02-06", "--days", "4"]
    assert CliRunner().invoke(cli, argv).exit_code == 0
    assert [(each.first, each.last) for each in played] == [(date(2013, 2, 6), date(2013, 2, 9))]


def test_the_data_of_other_days_is_not_continued(tmp_path: Path) -> None:
    first = DemoOptions(folder=tmp_path, first=date(2013, 2, 1), last=date(2013, 2, 2), keep=True)
    run._prepare(first)
    run._prepare(first)
    other = DemoOptions(folder=tmp_path, first=date(2013, 2, 1), last=date(2013, 2, 3), keep=True)
    with pytest.raises(LocalStackError, match="flights of 2013-02-01 to 2013-02-02, and not"):
        run._prepare(other)
    data = tmp_path / "data" / "days"
    assert data.read_text() == "2013-02-01 to 2013-02-02"
