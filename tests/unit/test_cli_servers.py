"""Which servers a verb needs, and which it names when something is wrong."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace

import psycopg
import pytest
from typer.testing import CliRunner

from everstate.api.server import _listen
from everstate.cli import cli
from everstate.errors import InvalidConfig, InvalidQuery
from everstate.postgres import unavailable
from everstate.sources.cdc.preview import Previewed


@pytest.mark.parametrize(
    ("words", "module", "needed"),
    [
        ("outbox status", "outbox", ("postgres",)),
        ("archive verify guest --no-against-log", "archive", ("kafka",)),
    ],
)
def test_a_verb_needs_no_server_that_it_does_not_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, module: str, needed: object
) -> None:
    asked: list[Collection[str] | None] = []

    def resolve(_: object, *, needs: Collection[str] | None = None) -> None:
        asked.append(needs)
        raise InvalidQuery("enough")

    monkeypatch.setattr(f"everstate.cli.{module}.resolve", resolve)
    CliRunner().invoke(cli, ["-C", str(tmp_path), *words.split()])
    assert asked == [needed]


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_a_host_that_this_machine_does_not_have_is_not_blamed_on_the_port(host: str) -> None:
    with pytest.raises(InvalidConfig, match=r"api\.host"):
        _listen(host, 0)


def test_advice_does_not_call_a_server_local_that_may_be_your_own() -> None:
    error = unavailable("postgresql://u@db.example/x", psycopg.OperationalError("refused"))
    assert "local PostgreSQL" not in (error.advice or "")


def test_a_preview_shows_values_as_json_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Previewed("t", 0, 1, "{}", "created", "7", {"a": None, "b": True, "c": "text"})
    project = SimpleNamespace(capture_of=lambda _: None, entities={})
    monkeypatch.setattr("everstate.cli.console.AppSession.connected", lambda *_: (None, project))
    monkeypatch.setattr("everstate.cli.cdc_preview.preview_rows", lambda *_: [row])
    told = CliRunner().invoke(cli, ["cdc", "preview", "shop"]).stdout
    assert "a=–, b=true, c=text" in told
