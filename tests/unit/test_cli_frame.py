"""The frame of the command line: the menu, lazy verbs, errors, tables, and how an app is found."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

import everstate.cli as cli_package
from everstate.cli import cli, console
from everstate.cli.console import err, load_app, out, print_json, table, tell_error, working
from everstate.cli.verbs import VERBS, VerbCommands
from everstate.config import load
from everstate.errors import EverstateError, InvalidConfig, InvalidProject, NotFound

APP = """
from everstate.app import App
app = App("shop")
number = 1
"""


@pytest.mark.parametrize("verb", VERBS)
def test_the_menu_says_what_the_verb_says(verb: str) -> None:
    first = (VerbCommands()[verb].help or "").split("\n\n")[0].replace("\n", " ")
    assert first == VERBS[verb]


@pytest.mark.parametrize("words", [[], ["views", "list"], ["doctor"], ["commands", "send"]])
def test_a_flag_does_not_look_as_if_it_took_a_value(words: list[str]) -> None:
    shown = CliRunner().invoke(cli, [*words, "--help"]).output
    assert "--help" in shown
    assert "bool" not in shown.lower()


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
    assert all(f" {verb} " in done.stdout for verb in VERBS)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_slip_of_the_pen_is_answered_with_the_verb_that_was_meant() -> None:
    result = CliRunner().invoke(cli, ["statsu"])
    assert result.exit_code == 2
    assert "Did you mean 'status'?" in result.stderr


def test_a_value_that_begins_with_a_minus_is_answered_with_how_to_write_it() -> None:
    answer = CliRunner().invoke(cli, ["get", "sale", "-5"])
    assert answer.exit_code == 2
    assert "write -- before" in answer.output
    assert "write --" not in CliRunner().invoke(cli, ["get", "sale", "--jsn"]).output


def test_an_error_is_a_sentence_with_advice_and_an_exit_code(tmp_path: Path) -> None:
    (tmp_path / "everstate.toml").write_text("[log]\npartitions = 0\n")
    result = CliRunner().invoke(cli, ["-C", str(tmp_path), "status"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "error: everstate.toml:2: log.partitions is 0" in result.stderr
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
        (None, "project.app is not set"),
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
    (tmp_path / "everstate.toml").write_text("")
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(InvalidConfig, match=reason) as caught:
        load_app(spec, load(tmp_path))
    assert "module:attribute" in str(caught.value)


def test_a_folder_without_settings_is_no_project(tmp_path: Path) -> None:
    with pytest.raises(InvalidProject, match=r"has no everstate\.toml"):
        load_app(None, load(tmp_path))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import a_library_that_is_missing", "app_that_breaks.py:1: ModuleNotFoundError: "),
        ("\nx = 1 / 0", "app_that_breaks.py:2: ZeroDivisionError: division by zero."),
        ("def f(:", "app_that_breaks.py:1: SyntaxError: invalid syntax."),
        (
            'from everstate.app import App\n\nApp("x").entity("e", key="k", source="none")',
            "app_that_breaks.py:3: e: there is no source of truth 'none'",
        ),
    ],
)
def test_an_error_inside_the_app_is_told_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, said: str
) -> None:
    (tmp_path / "app_that_breaks.py").write_text(code)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(EverstateError) as raised:
        load_app("app_that_breaks:app", load(tmp_path))
    assert raised.value.message.startswith(said)
    assert raised.value.exit_code == 2
    assert raised.value.advice


@pytest.mark.parametrize(
    "verb",
    ["get guest g1", "list guest", "run", "serve", "views verify", "drift check guest"],
)
def test_the_project_is_checked_before_its_servers(tmp_path: Path, verb: str) -> None:
    """No server runs here, and that is not what is told."""
    (tmp_path / "everstate.toml").write_text('[project]\napp = "there_is_no_such:app"\n')
    told = CliRunner().invoke(cli, ["-C", str(tmp_path), *verb.split()])
    assert told.exit_code == 2
    assert "there is no module 'there_is_no_such'" in told.stderr


def test_an_app_is_found_beside_its_settings_wherever_the_data_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "shop_beside.py").write_text(APP)
    toml = f'[project]\napp = "shop_beside:app"\ndata_dir = "{tmp_path / "data"}"\n'
    (tmp_path / "project" / "everstate.toml").write_text(toml)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load_app(None, load(tmp_path / "project")).name == "shop"


def test_a_table_in_a_pipe_keeps_its_rows_whole(capsys: pytest.CaptureFixture[str]) -> None:
    table(("name", "count"), [("x" * 120, 1_234), ("[bold]", None)])
    told = capsys.readouterr().out
    assert any("x" * 120 in line and "1,234" in line for line in told.splitlines())
    assert "[bold]" in told


HOSTILE = "a\x1b]52;c;cm0=\x07b\x9b2Jc\u202ed [/x] [bold]e[/] :boom: f\rg\x00\ud800"
SHOWN = r"a\u001b]52;c;cm0=b\u009b2Jc\u202ed [/x] [bold]e[/] :boom: fg\u0000\ud800"
"""Rich leaves out BEL and CR by itself, where it can."""


def test_no_text_reaches_the_terminal_as_a_command_or_as_markup(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out.print(f"version 1 by {HOSTILE}")
    table(("key", HOSTILE), [(HOSTILE, 1)], title=HOSTILE)
    err.print(HOSTILE, style="cyan")
    tell_error(NotFound(HOSTILE, advice=HOSTILE))
    told = capsys.readouterr()
    for text, times in ((told.out, 4), (told.err, 3)):
        assert text.replace("\\u0007", "").replace("\\u000d", "").count(SHOWN) == times
        assert text.replace("\n", "").isprintable()


def test_json_on_the_terminal_is_safe_and_means_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    value = {"a\x1b": "\x9b2J\u202e\x7f", "é": ["\n"]}
    print_json(value)
    told = capsys.readouterr().out
    assert told.replace("\n", "").isprintable()
    assert orjson.loads(told) == value


def test_json_takes_what_results_are_made_of(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"path": Path("a/b")})
    assert '"a/b"' in capsys.readouterr().out


def test_json_of_a_result_keeps_each_value(capsys: pytest.CaptureFixture[str]) -> None:
    """Whole numbers of any size, and those that JSON does not have, as PostgreSQL writes them."""

    @dataclass
    class Found:
        amount: int
        parts: list[float | None]

    print_json([{"n": 2**80, 1: b"\x00\xff"}, Found(-(2**70), [1.5, None, float("-inf")])])
    print_json({"one": None, "sums": {"a": float("nan")}})
    told = capsys.readouterr().out
    assert f'"n": {2**80}' in told
    assert f'"amount": {-(2**70)}' in told
    assert r'"1": "\\x00ff"' in told
    assert '"-Infinity"' in told
    assert '"a": "NaN"' in told


def test_every_module_that_has_the_name_of_its_command_is_in_the_menu() -> None:
    commands = VerbCommands()
    assert list(commands) == list(VERBS)
    assert {commands[name].name for name in commands} == set(commands)
    named = {
        path.stem.rstrip("_")
        for path in Path(cli_package.__file__).parent.glob("*.py")
        if re.search(rf"^(def {path.stem}\(|{path.stem} = typer\.)", path.read_text(), re.MULTILINE)
    }
    assert named - set(VERBS) == {"query", "rebuild", "search"} < set(commands["views"].commands)


def test_long_work_shows_a_sign_of_life_where_nobody_sees_a_wheel(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "_SIGN_OF_LIFE_S", 0.05)
    with working("starting") as tell:
        tell("comparing")
        deadline = time.monotonic() + 10
        said = ""
        while "comparing (" not in said and time.monotonic() < deadline:
            time.sleep(0.01)
            said += capsys.readouterr().err
    assert said.startswith("starting\ncomparing\n")
    assert "comparing (0 s)" in said
