"""The ways out on the command line, on tables that are filled by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import psycopg
import pytest
from serving_cases import fill
from typer.testing import CliRunner

from console_cases import SCHEMA
from everstate.changes import Provenance
from everstate.cli import cli
from everstate.cli.console import load_app
from everstate.config import load
from everstate.sources.stores.postgres import EntityStore
from everstate.views.control import BUILDING, WAITING, Control, ViewVersion

MODULE = """
from datetime import date
from pydantic import BaseModel
from everstate.app import App

app = App("hotel")


@app.entity("guest", key="guest_id")
class Guest(BaseModel):
    guest_id: str
    name: str
    nights: int | None = None
    born: date | None = None


app.view("names", sql="SELECT name FROM guest")
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def everstate(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command line in a project whose views are filled; (code, stdout, stderr)."""
    with psycopg.connect(database, autocommit=True) as connection:
        fill(connection)
        control = Control(connection, SCHEMA)
        control.open_positions("names", 1, "guest", "", {0: 3})
        control.add_version(ViewVersion("names", 1, "guest", "row", {}, (), "", published=True))
        connection.execute(f"CREATE VIEW {SCHEMA}.names AS SELECT 'Eva' AS name".encode())
    (tmp_path / "serving_hotel.py").write_text(MODULE, "utf-8")
    (tmp_path / "everstate.toml").write_text('[project]\napp = "serving_hotel:app"\n', "utf-8")
    monkeypatch.setenv("EVERSTATE_STORE_DSN", database)
    monkeypatch.setenv("EVERSTATE_LOG_BOOTSTRAP_SERVERS", "127.0.0.1:1")
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(*argv: str) -> tuple[int, str, str]:
        done = CliRunner().invoke(cli, ["--project", str(tmp_path), *argv])
        return done.exit_code, done.stdout, done.stderr

    return run


def json_of(answer: tuple[int, str, str]) -> Any:
    code, out, err = answer
    assert code == 0, err
    return orjson.loads(out)


def test_get_shows_an_entity_now_and_at_a_time(everstate: Run) -> None:
    code, out, _ = everstate("get", "guest", "eva")
    assert code == 0
    assert "Eva Maria" in out
    assert "version 3 (updated), as of 2026-01-01 02:00:00Z, by desk v1 clerk" in out
    before = json_of(everstate("get", "guest", "eva", "--at", "2026-01-01T02:30+01:00", "--json"))
    assert (before["version"], before["state"]["name"]) == (1, "Eva")
    assert list(before["state"]) == ["guest_id", "name", "nights", "born"]


def test_what_is_not_there_or_not_understood_has_its_exit_code(everstate: Run) -> None:
    code, out, err = everstate("get", "guest", "ada")
    assert (code, out) == (4, "")
    assert "was deleted by desk at version 2" in err
    assert everstate("get", "guest", "eva", "--at", "noon")[0] == 2
    code, _, err = everstate("list", "guest", "-w", "nigths=1")
    assert code == 2
    assert "Did you mean nights?" in err
    assert everstate("list", "gust")[0] == 2


def test_list_shows_the_fields_that_are_asked_for(everstate: Run) -> None:
    code, out, err = everstate(
        "list", "guest", "-f", "name,nights", "-o", "-nights", "--limit", "1"
    )
    assert code == 0
    assert "Eva Maria" in out
    assert "born" not in out
    assert "more than 1" in err
    found = json_of(
        everstate("list", "guest", "--at", "2026-01-01T03:00Z", "-w", "nights>5", "--json")
    )
    assert [entity["key"] for entity in found] == ["ada", "tom"]


def test_history_shows_what_each_version_changed(everstate: Run) -> None:
    code, out, _ = everstate("history", "guest", "eva", "--diff")
    assert code == 0
    assert "name: Eva → Eva Maria" in out
    versions = json_of(everstate("history", "guest", "eva", "--json"))
    assert versions[2]["differences"][1] == {
        "op": "replace",
        "path": "nights",
        "before": 2,
        "after": 3,
    }
    assert versions[0]["differences"][0] == {"op": "add", "path": "guest_id", "after": "eva"}


def test_explain_follows_a_version_to_the_log_and_the_views(everstate: Run) -> None:
    found = json_of(everstate("explain", "guest", "tom", "--json"))
    assert found["topic"] == "everstate.guest.changes.g1"
    assert found["version"]["place"] == {"generation": 1, "partition": 0, "offset": 5}
    assert found["archived"] is None
    applied = {view["view"]: view["applied"] for view in found["applied_by"]}
    assert applied == {"guest_history": True, "guest_latest": True, "names": False}
    code, out, _ = everstate("explain", "guest", "tom", "--version", "2")
    assert code == 0
    assert "guest tom, version 2" in out
    assert "not yet, at offset 3" in out


def test_a_view_that_is_not_declared_is_named(everstate: Run) -> None:
    code, _, err = everstate("views", "show", "nothing")
    assert code == 2
    assert "unknown view 'nothing'" in err


def test_a_view_is_shown_also_while_the_log_is_away(everstate: Run) -> None:
    shown = json_of(everstate("views", "show", "guest_latest", "--json"))
    assert {row["key"] for row in shown} == {"eva", "tom", "ada"}


@pytest.fixture
def without_log(everstate: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The same project, with a local broker that does not run."""
    monkeypatch.delenv("EVERSTATE_LOG_BOOTSTRAP_SERVERS")
    return everstate


@pytest.mark.parametrize(
    "argv",
    [
        ("get", "guest", "eva"),
        ("get", "guest", "eva", "--at", "2026-01-01T02:30+01:00"),
        ("list", "guest"),
        ("history", "guest", "eva"),
        ("explain", "guest", "tom"),
        ("views", "show", "guest_latest"),
    ],
    ids=" ".join,
)
def test_what_is_in_the_database_is_answered_while_the_log_is_down(
    without_log: Run, argv: tuple[str, ...]
) -> None:
    code, out, err = without_log(*argv)
    assert (code, bool(out)) == (0, True), err


def test_the_views_are_listed_without_their_lag_while_the_log_is_down(without_log: Run) -> None:
    code, out, err = without_log("views", "list", "--json")
    assert code == 0, err
    assert {view["lag_changes"] for view in orjson.loads(out)} == {None}
    assert "Kafka does not answer" in err


@pytest.fixture
def committed(everstate: Run, database: str, tmp_path: Path) -> Run:
    """The same project, whose store has what the views have not: a new version, and a new key."""
    config = load(tmp_path, store={"dsn": database})
    guest = load_app(None, config).entity_type("guest")
    desk = Provenance(api_version="v1", service_name="desk", identifier="clerk")
    with EntityStore(config, guest) as store:
        store.install()
        for key in ("eva", "new"):
            for nights in range(5):
                entity = guest.model(guest_id=key, name="Eva", nights=nights)
                store.put(entity, provenance=desk)
    return everstate


def test_an_answer_that_is_older_than_the_store_says_so(committed: Run) -> None:
    code, out, err = committed("get", "guest", "eva")
    assert code == 0
    assert "version 3 (updated)" in out
    assert "the store has guest 'eva' at version 5, which is not in the views yet" in err


def test_what_the_store_has_was_not_never_seen(committed: Run) -> None:
    code, _, err = committed("get", "guest", "new")
    assert code == 4
    assert "the store has guest 'new' at version 5, which is not in the views yet" in err
    assert "never seen" not in err
    assert "everstate run" in err
    assert "the views have no guest 'nobody'" in committed("get", "guest", "nobody")[2]


def test_an_answer_of_a_view_that_does_not_go_on_says_why(everstate: Run, database: str) -> None:
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(
            f"UPDATE {SCHEMA}.view SET error = 'no number at offset 3' "
            "WHERE name = 'names'".encode()
        )
    code, out, err = everstate("views", "show", "names")
    assert code == 0
    assert "Eva" in out
    assert "names is behind, and may lag: no number at offset 3" in err


def test_views_list_and_status_say_how_far_a_version_is_and_what_waits_for_whom(
    everstate: Run, database: str
) -> None:
    with psycopg.connect(database, autocommit=True) as connection:
        control = Control(connection, SCHEMA)
        made = ViewVersion("names", 2, "guest", "row", {}, (), "", status=BUILDING)
        control.add_version(made)
        control.add_version(
            replace(made, version=3, status=WAITING, status_reason="its SQL changed")
        )
        seen = {"doing": "reading the archive", "share": 0.34, "rate": 45_000.0, "left_s": 12.0}
        control.record("names", 2, progress=seen)
    _, out, _ = everstate("views", "list")
    assert "building: reading the archive 34%, 45,000 changes/s, 12 s to go" in out
    listed = {(v["name"], v["version"]): v for v in json_of(everstate("views", "list", "--json"))}
    assert listed["names", 2]["progress"] == seen
    assert listed["names", 2]["rows"] is None
    _, out, _ = everstate("status")
    assert "view names, version 2 building: reading the archive 34%" in out
    assert "view names, version 3 waiting: its SQL changed" in out


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM everstate_views.guest_latest",
        "SET default_transaction_read_only = off",
        "COMMIT; DELETE FROM everstate_views.guest_latest",
        "SET TRANSACTION READ WRITE",
        "WITH gone AS (DELETE FROM everstate_views.guest_latest RETURNING 1) SELECT * FROM gone",
    ],
)
def test_psql_reads_only(everstate: Run, database: str, statement: str) -> None:
    """One SET must not make what follows a writer."""
    rows = "SELECT count(*) FROM everstate_views.guest_latest"
    with psycopg.connect(database) as connection:
        before = connection.execute(rows.encode()).fetchone()
        code, _, err = everstate("psql", "-c", statement)
        assert code != 0 or statement.startswith("SET default")
        assert code == 0 or "refused the statement" in err
        assert connection.execute(rows.encode()).fetchone() == before
    assert json_of(everstate("psql", "-c", "SELECT name FROM names", "--json")) == [{"name": "Eva"}]
    statement = """SELECT '{"n": 12345678901234567890.12}'::jsonb AS state, 2::numeric ^ 80 AS n"""
    _, told, _ = everstate("psql", "-c", statement, "--json")
    assert '"n": 12345678901234567890.12' in told
    code, _, err = everstate("psql", "-c", "SELECT 1 AS a, 2 AS a", "--json")
    assert code != 0
    assert "two columns of the statement are called a" in err


VALUES = {
    r"'\x00ff'::bytea": r"\x00ff",
    "'1 mon'::interval": "1 mon",
    "'-23:00:00'::interval": "-23:00:00",
    "ARRAY['1 mon'::interval]": ["1 mon"],
    "'10:00:00+02:30'::timetz": "10:00:00+02:30",
    "0.00042::float8": 0.00042,
    "5e22::float8": 5e22,
}


def test_psql_shows_values_as_postgresql_has_them(everstate: Run) -> None:
    named = {f"c{number}": value for number, value in enumerate(VALUES.values())}
    columns = ", ".join(f"{sql} AS c{number}" for number, sql in enumerate(VALUES))
    assert json_of(everstate("psql", "-c", f"SELECT {columns}", "--json")) == [named]
    code, told, err = everstate("psql", "-c", f"SELECT {columns}")
    assert code == 0, err
    shown = r"""\x00ff 1 mon -23:00:00 ["1 mon"] 10:00:00+02:30 0.00042 5e+22"""
    assert told.split()[-9:] == shown.split()


def test_a_statement_that_postgresql_cannot_do_is_a_sentence(everstate: Run) -> None:
    """SQLSTATE 0A000 is none of the errors of a wrong statement."""
    code, _, err = everstate("psql", "-c", "SELECT * FROM elsewhere.public.t")
    assert (code, "PostgreSQL refused the statement" in err) == (2, True)
