"""What verbs print: whole rows, exact values, text that is no markup, and sentences for errors."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest

from everstate.cli import console
from everstate.cli.console import SafeConsole, table, working


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.00042, "0.00042"), (5e22, "5e+22"), (0.1 + 0.2, "0.30000000000000004"), (7.0, "7.0")],
)
def test_a_float_of_a_row_keeps_its_digits(
    capsys: pytest.CaptureFixture[str], value: float, shown: str
) -> None:
    table(("x",), [(value,)], exact=True)
    assert capsys.readouterr().out.split()[-1] == shown


def test_a_figure_of_our_own_has_three_places(capsys: pytest.CaptureFixture[str]) -> None:
    table(("seconds",), [(1234.56789,)])
    assert capsys.readouterr().out.split()[-1] == "1,234.568"


def test_a_row_in_a_pipe_is_on_one_line_however_long_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table(("key", "value"), [("a", "x" * 300), ("b", "界" * 900)])
    lines = capsys.readouterr().out.splitlines()
    assert any("x" * 300 in line for line in lines)
    assert any("界" * 900 in line for line in lines)


def test_a_spinner_shows_text_that_looks_like_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = StringIO()
    terminal = SafeConsole(file=screen, force_terminal=True)
    monkeypatch.setattr(console, "err", terminal)
    with working("reading [/x]") as tell:
        tell("topic [/y]")
        tell.now("view [bold]z")
    assert "view [bold]z" in screen.getvalue()


def everstate(*words: str, stdout: int | None = None) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "everstate.cli", *words]
    return subprocess.run(argv, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)


@pytest.mark.parametrize(
    "words",
    [
        *(["token", "new", "desk"], ["token", "new", "desk", "--json"]),
        *(["--help"], ["--version"], ["views", "--help"]),
    ],
)
def test_a_full_disk_under_stdout_is_a_sentence(words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = everstate(*words, stdout=full.fileno())
    assert done.returncode == 1
    assert "error: No space left on device." in done.stderr
    assert "Traceback" not in done.stderr


def test_a_closed_stdout_is_a_sentence() -> None:
    program = "exec {python} -m everstate.cli token new desk --json >&-"
    argv = ["sh", "-c", program.format(python=sys.executable)]
    done = subprocess.run(argv, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: stdout:")


@pytest.mark.parametrize("name", ["file/sub", "file"])
@pytest.mark.parametrize("verb", ["init", "schema"])
def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path, name: str, verb: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "shop.py").write_text("from everstate.app import App\napp = App('shop')\n")
    target = str(tmp_path / name)
    export = ["-C", str(tmp_path), "schema", "export", target, "--app", "shop:app"]
    done = everstate(*(["init", target] if verb == "init" else export))
    assert done.returncode > 0
    assert done.stderr.startswith(f"error: {target}")
    assert "Traceback" not in done.stderr


def test_a_user_without_a_name_is_named_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr(getpass, "getuser", nobody)
    assert console.user_name() == str(os.getuid())


def test_only_one_place_asks_for_the_name_of_the_user() -> None:
    folder = Path(console.__file__).parent
    asking = [path.name for path in folder.glob("*.py") if "getuser()" in path.read_text()]
    assert asking == ["console.py"]
