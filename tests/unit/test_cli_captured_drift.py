"""What `everstate drift` says of a captured entity type, and its exit code."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from everstate.app import App
from everstate.changes.drift import DriftedKey, DriftReport
from everstate.cli import cli
from everstate.cli import drift as verbs
from everstate.cli.console import AppSession
from everstate.config import load
from everstate.declarations.captures import Table
from everstate.sources.cdc import comparing

KEYS = (DriftedKey("7", "different", "other values of name", 0, 3),)


class Note(BaseModel):
    id: int


def done(monkeypatch: pytest.MonkeyPatch, *words: str, **found: Any) -> Any:
    app = App("shop")
    app.entity("note", key="id", source="capture")(Note)
    tables = {"public.notes": Table(entity="note")}
    app.capture("notes", kind="postgresql", dsn="postgresql://u@h/d", tables=tables)
    counts = {"stored": 9, "logged": 9, "missing": 0, "different": 0, "extra": 0, "pending": 0}
    made = {**counts, "share": 0.0, "keys": (), "seconds": 0.1, **found}
    report = DriftReport(entity="note", checked_at=datetime.now(UTC), **made)
    monkeypatch.setattr(AppSession, "app", lambda *_, **__: app)
    monkeypatch.setattr(AppSession, "connected", lambda *_, **__: (load(), app))
    monkeypatch.setattr(verbs, "connected", lambda _: load())
    monkeypatch.setattr(comparing, "compare_with_table", lambda *_: report)
    return CliRunner().invoke(cli, ["drift", *words])


def test_a_captured_type_that_differs_has_exit_code_8_and_the_commands_that_repair_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert done(monkeypatch, "check", "note").stdout.rstrip().endswith("no drift")
    found = done(monkeypatch, "check", "note", different=1, share=0.1, keys=KEYS)
    assert found.exit_code == 8
    assert "other values of name" in found.stdout
    assert "1 of 9 entities of note have drifted" in found.stderr
    advice = " ".join(found.stderr.split())
    assert "`everstate cdc snapshot notes` reads all rows" in advice
    assert "`everstate cdc snapshot notes --new-epoch` also deletes entities" in advice
    refused = done(monkeypatch, "repair", "note")
    assert refused.exit_code == 2
    assert "`everstate cdc snapshot notes` reads all rows" in " ".join(refused.stderr.split())


def test_what_may_be_on_its_way_is_no_drift_and_does_not_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    why = "its connector does not run"
    found = done(monkeypatch, "check", "note", pending=2, pending_why=why, keys=KEYS)
    assert found.exit_code == 6
    assert "no drift" not in found.stdout
    told = " ".join(found.stderr.split())
    assert f"2 entities of note differ, and may have changed since: {why}." in told
    assert "`everstate cdc status notes`" in told


def test_a_row_that_was_refused_is_named_and_the_check_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = (DriftedKey("7", "refused", "no entity can be made of its row: name: …", 0, 0),)
    found = done(monkeypatch, "check", "note", refused_rows=1, keys=keys)
    assert found.exit_code == 0
    assert "the first 1 of 1" in found.stdout
    assert "1 entities have a row that the capture refused" in found.stderr
    assert "`everstate dead list note`" in found.stderr


def test_what_was_not_compared_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {"public.notes.place": "its type is point"}
    found = done(monkeypatch, "check", "note", not_compared=columns)
    assert found.exit_code == 0
    assert "public.notes.place was not compared: its type is point" in found.stderr
    shown = json.loads(done(monkeypatch, "check", "note", "--json", not_compared=columns).stdout)
    assert shown["not_compared"] == columns
