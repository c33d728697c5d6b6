"""`everstate cdc held` says who has to do what about rows that wait or were refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from everstate.app import App
from everstate.cli import cdc_preview, cli
from everstate.cli.console import AppSession
from everstate.config import load
from everstate.declarations.captures import Table
from everstate.sources.cdc.completion import PRIOR_UNKNOWN
from everstate.sources.cdc.holding import HeldEntity
from everstate.sources.cdc.mapping import CleanRow


class Note(BaseModel):
    id: int


def held(key: str, reason: str, **options: Any) -> HeldEntity:
    return HeldEntity("public.notes", "note", key, {"id": key}, reason, 0.0, **options)


WAITING = [CleanRow(table="public.notes", op="u", key="1", columns={"id": 1})]
FOUND = [
    held("1", PRIOR_UNKNOWN, rows=WAITING),
    held("2", "a row was refused", is_unsure=True),
    held("3", "its parent is not there", rows=WAITING, waits_for=("customer", "7")),
]


def told(monkeypatch: pytest.MonkeyPatch, *words: str, dsn: str | None) -> Any:
    app = App("shop")
    app.entity("note", key="id", source="capture")(Note)
    tables = {"public.notes": Table(entity="note")}
    app.capture("shop", kind="postgresql", dsn=dsn, tables=tables)
    monkeypatch.setattr(AppSession, "connected", lambda *_: (load(), app))
    monkeypatch.setattr(cdc_preview, "read_held", lambda *_: FOUND)
    done = CliRunner().invoke(cli, ["cdc", "held", "shop", *words])
    assert done.exit_code == 0, done.output
    return done


def test_only_rows_whose_state_before_is_unknown_are_asked_for_by_clean(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = told(monkeypatch, dsn="postgresql://u@h/d")
    asked, needed, waits = (
        next(line for line in done.stdout.splitlines() if line.split()[1:2] == [key])
        for key in "123"
    )
    assert "requested by clean" in asked
    assert "needed" in needed
    assert "requested by clean" not in needed + waits
    assert "run `everstate cdc held shop --snapshot`" in done.stderr


def test_nobody_asks_the_database_of_a_capture_that_somebody_else_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = told(monkeypatch, dsn=None)
    assert "requested by clean" not in done.stdout
    assert "have the capture's own connector read these rows again" in done.stderr
    shown = json.loads(told(monkeypatch, "--json", dsn=None).stdout)
    assert [(one["needsSnapshot"], one["asksForSnapshot"]) for one in shown] == [
        (True, False),
        (True, False),
        (False, False),
    ]
