"""The connection string that `everstate psql --url` prints is one that libpq reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from everstate.cli.psql import environment_of, url_of
from everstate.config import load

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
