"""The frame of the command line: the menu, lazy verbs, errors, tables, and how an app is found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import everstate.cli as cli_package
from everstate.cli import cli
from everstate.cli.console import load_app, print_json, table
from everstate.cli.verbs import VERBS, VerbCommands
from everstate.config import load
from everstate.errors import InvalidConfig

APP = """
from everstate.app import App
app = App("shop")
number = 1
"""


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_the_menu_says_what_the_verb_says(verb: object) -> None:
    commands = VerbCommands()
    assert verb in VERBS
    for each in VERBS:
        if each is verb:
            first = (commands[each.name].help or "").split("\n\n")[0].replace("\n", " ")
            assert first == each.help


def test_the_menu_lists_every_verb_without_importing_it() -> None:
    program = (
        "import sys\nfrom typer.testing import CliRunner\nfrom everstate.cli import cli\n"
        "print(CliRunner().invoke(cli, ['--help']).output)\n"
        "print([name for name in ('pyspark', 'deltalake', 'pandas', 'sqlglot', 'jgo')"
        " if name in sys.modules])"
    )
    done = subprocess.run(
        (sys.executable, "-c", program), capture_output=True, text=True, check=True
    )
    assert all(f" {verb.name} " in done.stdout for verb in VERBS)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_slip_of_the_pen_is_answered_with_the_verb_that_was_meant() -> None:
    result = CliRunner().invoke(cli, ["statsu"])
    assert result.exit_code == 2
    assert "Did you mean 'status'?" in result.stderr


def test_an_error_is_a_sentence_with_advice_and_an_exit_code(tmp_path: Path) -> None:
    (tmp_path / "everstate.toml").write_text("[log]\npartitions = 0\n")
    result = CliRunner().invoke(cli, ["-C", str(tmp_path), "status"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "error: log.partitions is 0" in result.stderr
    debug = CliRunner().invoke(cli, ["-C", str(tmp_path), "--debug", "status"])
    assert isinstance(debug.exception, InvalidConfig)


def test_an_app_is_found_by_module_and_attribute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shop_of_test.py").write_text(APP)
    (tmp_path / "everstate.toml").write_text('[project]\napp = "shop_of_test:app"\n')
    monkeypatch.setattr(sys, "path", list(sys.path))
    config = load(tmp_path)
    assert load_app(None, config).name == "shop"
    assert load_app("shop_of_test:app", load(tmp_path)) is load_app(None, config)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (None, "project.app is None"),
        ("shop", "--app is 'shop'"),
        ("nowhere_at_all:app", "there is no module 'nowhere_at_all'"),
        ("app_of_frame:number", "app_of_frame has no App named 'number'"),
        ("app_of_frame:nothing", "app_of_frame has no App named 'nothing'"),
    ],
)
def test_an_app_that_is_not_there_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str | None, reason: str
) -> None:
    (tmp_path / "app_of_frame.py").write_text(APP)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(InvalidConfig, match=reason) as caught:
        load_app(spec, load(tmp_path))
    assert "module:attribute" in str(caught.value)


def test_an_import_error_inside_the_app_is_shown_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "app_that_breaks.py").write_text("import a_library_that_is_missing")
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ModuleNotFoundError, match="a_library_that_is_missing"):
        load_app("app_that_breaks:app", load(tmp_path))


def test_a_table_in_a_pipe_keeps_its_rows_whole(capsys: pytest.CaptureFixture[str]) -> None:
    table(("name", "count"), [("x" * 120, 1_234), ("[bold]", None)])
    told = capsys.readouterr().out
    assert any("x" * 120 in line and "1,234" in line for line in told.splitlines())
    assert "[bold]" in told


def test_json_takes_what_results_are_made_of(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"path": Path("a/b"), "verb": VERBS[1]})
    assert '"a/b"' in capsys.readouterr().out


def test_the_commands_are_the_menus_verbs_each_registered_by_its_own_module() -> None:
    commands = VerbCommands()
    assert list(commands) == [verb.name for verb in VERBS]
    folder = Path(cli_package.__file__).parent
    modules = {path.stem for path in folder.glob("*.py") if "def register(" in path.read_text()}
    assert modules == {verb.module for verb in VERBS}
    assert {commands[name].name for name in commands} == set(commands)
