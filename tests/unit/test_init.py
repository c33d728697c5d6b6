"""`everstate init` makes a project that works, and writes over nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from everstate.cli import cli
from everstate.cli.console import load_app
from everstate.config import load


def init(folder: Path) -> Result:
    return CliRunner().invoke(cli, ["init", str(folder)])


def test_the_made_project_has_an_app_and_its_tests(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "parcels"
    done = init(folder)
    assert done.exit_code == 0, done.output
    assert {each.name for each in folder.iterdir()} == {
        *(".gitignore", "README.md", "everstate.toml"),
        *("parcels.csv", "parcels.py", "test_parcels.py"),
    }


def test_the_settings_of_the_made_project_name_its_app(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init(tmp_path / "p")
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delitem(sys.modules, "parcels", raising=False)
    app = load_app(None, load(tmp_path / "p"))
    assert (app.name, list(app.entities), list(app.views)) == (
        "parcels",
        ["parcel"],
        ["parcels_by_city"],
    )
    assert not app.refused_views
    monkeypatch.delitem(sys.modules, "parcels")
    # Its file to begin with fits the model.
    checked = CliRunner().invoke(
        cli, ["-C", str(tmp_path / "p"), "import", "parcel", str(tmp_path / "p" / "parcels.csv"),
              "--check"]
    )  # fmt: skip
    assert checked.exit_code == 0, checked.output


def test_the_last_lines_are_the_next_three_commands(tmp_path: Path) -> None:
    lines = init(tmp_path / "my parcels").output.splitlines()
    assert lines[-3:] == [f"  cd '{tmp_path / 'my parcels'}'", "  pytest", "  everstate dev"]


def test_a_folder_with_anything_in_it_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine", "utf-8")
    done = init(tmp_path)
    assert done.exit_code == 2
    assert "is not empty: it has README.md" in done.output
    assert [each.name for each in tmp_path.iterdir()] == ["README.md"]
    assert (tmp_path / "README.md").read_text("utf-8") == "mine"
    assert init(tmp_path / "README.md").exit_code == 2
    # An empty folder that exists is taken.
    (tmp_path / "empty").mkdir()
    assert init(tmp_path / "empty").exit_code == 0
