"""The connection string that `everstate psql --url` prints is one that libpq reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict
from typer.testing import CliRunner

from everstate.cli import cli
from everstate.cli.psql import environment_of, url_of
from everstate.config import load
from everstate.errors import InvalidQuery

OWN = "-c search_path=everstate_views -c TimeZone=UTC"
CASES = {
    "postgresql://me:p%40ss%2F@db.example:5433/x": {"password": "p@ss/", "host": "db.example"},
    "host=/var/run dbname=x user=y": {"host": "/var/run", "dbname": "x", "user": "y"},
    "postgresql://u@[::1]/x?sslmode=require": {"host": "::1", "sslmode": "require"},
}


@pytest.mark.parametrize(("dsn", "parts"), CASES.items(), ids=CASES)
def test_what_the_dsn_says_is_in_the_url(tmp_path: Path, dsn: str, parts: dict[str, str]) -> None:
    found = conninfo_to_dict(url_of(load(tmp_path, views={"dsn": dsn})))
    assert found["options"] == OWN
    assert {name: found[name] for name in parts} == parts


@pytest.mark.parametrize(
    ("dsn", "host", "port"),
    [
        ("postgresql://u@h1:5433,h2:5434/x", "h1,h2", "5433,5434"),
        ("host=h1,::1,/var/run port=5433 user=u dbname=x", "h1,::1,/var/run", "5433,5433,5433"),
        ("host=h1,h2 port=,5434 user=u dbname=x", "h1,h2", "5432,5434"),
    ],
)
def test_each_host_keeps_its_port(tmp_path: Path, dsn: str, host: str, port: str) -> None:
    found = conninfo_to_dict(url_of(load(tmp_path, views={"dsn": dsn})))
    assert (found["host"], found["port"]) == (host, port)


@pytest.mark.parametrize("words", [["--url", "--json"], ["--url", "-c", "SELECT 1"], ["--json"]])
def test_options_that_exclude_each_other_are_refused(words: list[str]) -> None:
    done = CliRunner().invoke(cli, ["psql", *words])
    assert done.exit_code == InvalidQuery.exit_code
    assert "--json" in done.stderr


def test_options_of_the_dsn_are_kept(tmp_path: Path) -> None:
    dsn = "postgresql://u@h/x?options=-c%20work_mem%3D1MB"
    found = conninfo_to_dict(url_of(load(tmp_path, views={"dsn": dsn})))
    assert found["options"] == f"-c work_mem=1MB {OWN}"


def test_psql_gets_every_parameter_of_the_dsn_in_its_environment(tmp_path: Path) -> None:
    dsn = (
        "service=views sslcert=/c.pem sslkey=/k.pem sslmode=verify-full connect_timeout=3"
        " options='-c work_mem=1MB'"
    )
    assert environment_of(load(tmp_path, views={"dsn": dsn})) == {
        "PGSERVICE": "views",
        "PGSSLCERT": "/c.pem",
        "PGSSLKEY": "/k.pem",
        "PGSSLMODE": "verify-full",
        "PGCONNECT_TIMEOUT": "3",
        "PGOPTIONS": f"-c work_mem=1MB {OWN} -c default_transaction_read_only=on",
    }
