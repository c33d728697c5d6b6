"""Questions of the command line are on stderr, and nothing is done where nobody can answer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

from everstate.cli import cli
from everstate.cli.cdc_balance import vanished_pieces
from everstate.cli.console import AppSession
from everstate.errors import InvalidConfig, InvalidQuery


def accept(monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> tuple[Result, list[str]]:
    """`gaps accept --json` of a gap, with the answer "no"; and the keys that were accepted."""
    done: list[str] = []
    gap = SimpleNamespace(entity="order", key="o-1", missing=[2])
    project = SimpleNamespace(entity_type=lambda name: name)
    monkeypatch.setattr(AppSession, "connected", lambda *_, **__: (None, project))
    monkeypatch.setattr("everstate.cli.gaps._is_terminal", lambda: terminal)
    monkeypatch.setattr("everstate.pipeline.gaps.list_gaps", lambda *_: [gap])

    def accept_gap(_: object, __: object, key: str, **___: object) -> dict[str, object]:
        done.append(key)
        return {}

    monkeypatch.setattr("everstate.pipeline.gaps.accept_gap", accept_gap)
    words = ["gaps", "accept", "order", "o-1", "--json"]
    return CliRunner().invoke(cli, words, input="n\n"), done


def test_a_gap_is_not_accepted_unasked_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    result, done = accept(monkeypatch, terminal=False)
    assert (result.exit_code, done) == (InvalidQuery.exit_code, [])
    assert "Add --yes" in result.stderr


def test_the_question_is_not_among_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    result, done = accept(monkeypatch, terminal=True)
    assert (result.exit_code, done) == (1, [])
    assert result.stdout.split() == ["n"]  # the runner shows what is typed there
    assert "Versions 2 of order o-1 are missing" in result.stderr


def test_vanished_rows_are_reported_also_for_a_capture_with_another_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = SimpleNamespace(name="shop", dsn=None)
    app = SimpleNamespace(captures={"shop": capture}, capture_of=lambda _: capture)
    balance = SimpleNamespace(vanished=3, tables=[], unread=0)
    cdc = "everstate.cli.cdc"
    monkeypatch.setattr("everstate.cli.console.AppSession.app", lambda *_, **__: app)
    monkeypatch.setattr(f"{cdc}.connected", lambda *_: None)
    monkeypatch.setattr(f"{cdc}.balance_of", lambda *_: balance)
    monkeypatch.setattr(f"{cdc}.why_not_cleaned", lambda *_: "its table is gone")
    done = CliRunner().invoke(cli, ["-C", str(tmp_path), "cdc", "status"])
    assert done.exit_code == 6
    assert "shop: 3 rows were read and have no outcome" in " ".join(done.stderr.split())
    assert list(vanished_pieces({"shop": None})) == []


def test_a_number_of_deletes_for_a_snapshot_that_deletes_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cdc = "everstate.cli.cdc"
    monkeypatch.setattr(f"{cdc}.connected", lambda *_: None)
    monkeypatch.setattr(f"{cdc}.capturing_of", lambda *_: None)
    done = CliRunner().invoke(cli, ["-C", str(tmp_path), "cdc", "snapshot", "shop", "--yes", "3"])
    assert done.exit_code == InvalidConfig.exit_code
    assert "without --new-epoch" in " ".join(done.stderr.split())
