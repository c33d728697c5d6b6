"""Options that exclude each other are refused, and none is ignored in silence."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner, Result

from everstate.cli import cli
from everstate.errors import InvalidQuery
from everstate.log.dead_letters import DeadReason

APP = """
from pydantic import BaseModel
from everstate.app import App
from everstate.changes.derived import patch_of

app = App("hotel")


@app.entity("guest", key="guest_id")
class Guest(BaseModel):
    guest_id: str
    name: str
    address: dict[str, str] = {}


app.derive("names", patch_of("guest"))
"""
SERVERS = 'log.bootstrap_servers = "127.0.0.1:1"\nstore.dsn = "postgresql://u@127.0.0.1:1/x"\n'


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "options_hotel.py").write_text(APP)
    (tmp_path / "everstate.toml").write_text(f'{SERVERS}project.app = "options_hotel:app"\n')
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def run(folder: Path, *words: str) -> Result:
    return CliRunner().invoke(cli, ["-C", str(folder), *words])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("replay guest --to x --by reason=a --by reason=b", "--by reason is given twice"),
        ("replay guest --file x.jsonl --append", "--append is for --to"),
        ("views rebuild names --undo --require-equal", "--require-equal is for a new version"),
        ("views rebuild names --cancel --require-equal", "--require-equal is for a new version"),
        ("views rebuild names --cancel --force", "--force publishes a version"),
        ("list guest --fields name --json", "--fields is for the table"),
        ("list guest --fields nmae", "guest has no field 'nmae'. It has guest_id, name, address."),
        ("list guest --fields address.city", "guest has no field 'address.city'"),
        ("views show names --wait-for x", "--wait-for is for views"),
    ],
)
def test_what_cannot_be_done_together_is_refused(project: Path, words: str, said: str) -> None:
    done = run(project, *words.split())
    assert done.exit_code == InvalidQuery.exit_code
    assert said in " ".join(done.stderr.split())


@pytest.mark.parametrize(("words", "count"), [([], 30), (["--limit", "2"], 2)])
def test_a_limit_of_dead_letters_holds_in_json_too(
    project: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], count: int
) -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    reasons = [DeadReason("guest", f"reason {n}", 1, at, at, 0, n) for n in range(30)]
    monkeypatch.setattr("everstate.cli.dead.resolve", lambda *_, **__: None)
    monkeypatch.setattr("everstate.cli.dead.read_dead_letters", lambda *_: [])
    monkeypatch.setattr("everstate.cli.dead.by_reason", lambda _: reasons)
    assert len(orjson.loads(run(project, "dead", "list", "--json", *words).stdout)) == count
