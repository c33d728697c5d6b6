"""The exit code of `everstate status` with servers of one's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from everstate.attention.conditions import Concern
from everstate.cli import cli

NOBODY = 'log.bootstrap_servers = "127.0.0.1:1"\nstore.dsn = "postgresql://u@127.0.0.1:1/x"\n'


def status_in(folder: Path, *words: str) -> int:
    return CliRunner().invoke(cli, ["-C", str(folder), "status", *words]).exit_code


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_without_an_app_servers_that_are_down_are_code_6(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "everstate.toml").write_text(NOBODY)
    assert status_in(tmp_path, *words) == 6


@pytest.mark.parametrize(("more", "code"), [("", 6), ("1/0\n", 1)])
def test_with_an_app_servers_that_are_down_are_code_6_and_a_broken_app_is_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str, code: int
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"app_of_status_{code}"
    source = f"from everstate.app import App\napp = App('shop')\n{more}"
    (tmp_path / f"{name}.py").write_text(source)
    (tmp_path / "everstate.toml").write_text(f'{NOBODY}project.app = "{name}:app"\n')
    assert status_in(tmp_path) == code


@pytest.mark.parametrize(("level", "code"), [("bad", 6), ("warn", 0)])
def test_a_server_that_refuses_a_question_is_not_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str, code: int
) -> None:
    (tmp_path / "everstate.toml").write_text(NOBODY)
    told = Concern("no-answer:views", "always", "views", "", "views", "why", None, level)  # type: ignore[arg-type]
    monkeypatch.setattr("everstate.cli.status._conditions", lambda *_: [told])
    assert status_in(tmp_path) == code
