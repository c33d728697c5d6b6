"""Twenty tables of every shape are captured together under a load.

Each table's rows equal the newest states in the changelog, or the table is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from pydantic import create_model

from capture_cases import CONNECTED, PostgresSource, eventually
from clean_role import CleanRole, broken_laws, changelog
from everstate.app import App
from everstate.config import Config
from everstate.declarations.captures import Table
from everstate.errors import CaptureFailed
from everstate.log.topics import Topics
from everstate.pipeline.clean import Cleaner
from everstate.sources.cdc.balance import read_balance
from everstate.sources.cdc.capturing import Capturing
from everstate.sources.cdc.cleaning import cleaning_of
from tiers import counted

pytestmark = CONNECTED

SCALE = counted(1, full=10)
"""The full run loads about as many rows as the Sakila example database has: 47,000."""

SIZES = {
    "language": 6, "category": 16, "actor": 20 * SCALE, "film": 100 * SCALE,
    "film_actor": 546 * SCALE, "film_category": 100 * SCALE, "country": 109, "city": 60 * SCALE,
    "address": 60 * SCALE, "store": 2, "staff": 2, "customer": 60 * SCALE,
    "inventory": 458 * SCALE, "rental": 1604 * SCALE, "payment": 1605 * SCALE,
}  # fmt: skip
PARENTS: Mapping[str, tuple[str, ...]] = {
    "film": ("language",),
    "film_actor": ("film", "actor"),
    "film_category": ("film", "category"),
    "city": ("country",),
    "address": ("city",),
    "store": ("address",),
    "staff": ("store", "address"),
    "customer": ("store", "address"),
    "inventory": ("film", "store"),
    "rental": ("inventory", "customer", "staff"),
    "payment": ("customer", "staff", "rental"),
}
ODD = {
    "measured": "CREATE TABLE measured (id int PRIMARY KEY, label text) PARTITION BY RANGE (id)",
    "priced": "CREATE TABLE priced (id int PRIMARY KEY, label text, "
    "twice int GENERATED ALWAYS AS (id * 2) STORED)",
    "documents": "CREATE TABLE documents (id int PRIMARY KEY, label text)",
    "keyless": "CREATE TABLE keyless (id int, label text)",
    "unlogged": "CREATE UNLOGGED TABLE unlogged (id int PRIMARY KEY, label text)",
}
REFUSED = ("keyless", "unlogged")
DOCUMENTS, TOO_LARGE = 2_003, (700, 1_500)
"""Two documents of 1.2 MB among many small ones; the limit of a change is 1 MiB."""


CAPTURED = [*SIZES, *(name for name in ODD if name not in REFUSED)]


def shop(names: Iterable[str], dsn: str) -> App:
    """A capture of these tables; each table is an entity type of the same name."""
    app = App("shop")
    tables = {}
    for name in names:
        parents = {f"{parent}_id": parent for parent in PARENTS.get(name, ())}
        fields: dict[str, Any] = dict.fromkeys(parents, (int, ...))
        fields["label"] = (str | None, None)
        app.entity(name, key="id", source="capture")(create_model(name, id=(int, ...), **fields))
        tables[f"public.{name}"] = Table(
            entity=name, parents=parents, drop=("twice",) if name == "priced" else ()
        )
    app.capture("shop", kind="postgresql", dsn=dsn, tables=tables, parents_first=True)
    return app


def make(source: PostgresSource) -> None:
    """Create all tables, parents first."""
    for name in SIZES:
        references = [f"{each}_id int NOT NULL REFERENCES {each}" for each in PARENTS.get(name, ())]
        columns = ", ".join(["id int PRIMARY KEY", "label text", *references])
        source.run(f"CREATE TABLE {name} ({columns})")
    source.run(
        *ODD.values(),
        "CREATE TABLE measured_1 PARTITION OF measured FOR VALUES FROM (0) TO (500)",
        "CREATE TABLE measured_2 PARTITION OF measured FOR VALUES FROM (500) TO (10000)",
    )


def insert(source: PostgresSource, table: str, keys: range) -> None:
    """Insert rows in one transaction; the parents of row 0 are the rows 0 of their tables."""
    parents = PARENTS.get(table, ())
    columns = ", ".join(["id", "label", *(f"{each}_id" for each in parents)])
    values = ", ".join(["i", f"'{table} ' || i", *(f"(i * 7) % {SIZES[each]}" for each in parents)])
    source.run(
        f"INSERT INTO {table} ({columns}) SELECT {values} "
        f"FROM generate_series({keys.start}, {keys.stop - 1}) AS i"
    )


def load(source: PostgresSource) -> None:
    """Insert into every table, parents first; update and delete in some of them."""
    for name, size in SIZES.items():
        insert(source, name, range(1, size))
    for name in ("measured", "priced"):
        source.run(
            f"INSERT INTO {name} (id, label) SELECT i, 'new' FROM generate_series(0, 999) AS i",
            f"UPDATE {name} SET label = 'moved' WHERE id % 3 = 0",
            f"DELETE FROM {name} WHERE id % 5 = 0",
        )
    source.run("UPDATE measured SET id = id + 5000 WHERE id < 100")
    large = ", ".join(str(each) for each in TOO_LARGE)
    # Text that does not compress to less than the limit.
    source.run(
        "INSERT INTO documents SELECT i, CASE WHEN i IN "
        f"({large}) THEN (SELECT string_agg(md5(i::text || j::text), '') "
        "FROM generate_series(1, 37500) AS j) ELSE 'small' END "
        f"FROM generate_series(1, {DOCUMENTS}) AS i"
    )
    source.run("UPDATE rental SET label = 'returned' WHERE id % 10 = 0")
    source.run("DELETE FROM payment WHERE id % 20 = 0")
    # The last row of all: when it is published, everything before it was read.
    insert(source, "language", range(SIZES["language"], SIZES["language"] + 1))


def rows(source: PostgresSource, table: str) -> dict[str, dict[str, Any]]:
    """Key → row, as the model has it, without the two documents that are too large for a change."""
    names = ("id", "label", *(f"{parent}_id" for parent in PARENTS.get(table, ())))
    found = source.rows(f"SELECT {', '.join(names)} FROM {table}")
    states = {str(row[0]): dict(zip(names, row, strict=True)) for row in found}
    if table == "documents":
        for key in TOO_LARGE:
            del states[str(key)]
    return states


def cleaner(config: Config, app: App) -> Cleaner:
    return Cleaner(config, cleaning_of(config, app, "shop"))


@pytest.mark.timeout(600)
def test_tables_of_every_shape_are_captured_right_together_or_refused(
    config: Config, database: str
) -> None:
    source = PostgresSource(database)
    make(source)
    for name in SIZES:
        insert(source, name, range(1))
    with pytest.raises(CaptureFailed, match="nothing was made") as refused:
        capturing_of(config, shop([*SIZES, *ODD], database)).add()
    for name in REFUSED:
        assert f"public.{name}" in str(refused.value)
    assert source.rows("SELECT pubname FROM pg_publication") == []
    for name in REFUSED:
        source.run(f"INSERT INTO {name} VALUES (1, 'a')", f"UPDATE {name} SET label = 'b'")

    app = shop(CAPTURED, database)
    capturing = capturing_of(config, app)
    with Topics(config) as topics:
        topics.ensure(app.entities)
    capturing.add()
    role = CleanRole(lambda: cleaner(config, app), capturing)
    try:
        load(source)
        wanted = {f"public.{name}": len(rows(source, name)) for name in CAPTURED}
        done = eventually(lambda: unsettled(config, app, wanted) == {}, 300, every_s=2.0)
        assert done, unsettled(config, app, wanted)
    finally:
        role.end()
        capturing.remove(drop=True, topics=True)

    created: dict[str, dict[int, str]] = {}
    for name in CAPTURED:
        changes = changelog(config, name)
        assert broken_laws(changes) == [], name
        newest = {one["key"]: one["currentEntityState"] for one in changes}
        present = {key: state for key, state in newest.items() if state is not None}
        assert present == rows(source, name), name
        creations = [one for one in changes if one["version"] == 1]
        created[name] = {int(one["key"]): one["recordedAt"] for one in creations}
        for one in creations:
            state = one["currentEntityState"]
            for parent in PARENTS.get(name, ()):
                since = created[parent][state[f"{parent}_id"]]
                assert one["recordedAt"] >= since, f"{name} {state} was recorded before {parent}"


def capturing_of(config: Config, app: App) -> Capturing:
    return Capturing(config, app.capture_of("shop"), local=True, entities=app.entities)


def unsettled(config: Config, app: App, wanted: Mapping[str, int]) -> dict[str, Any]:
    """The balance of each table whose rows have not all become changes or dead letters.

    ``wanted``: table → how many of its changes there must be at least.
    """
    balance = read_balance(config, app.capture_of("shop"))
    found = {one.table: one for one in balance.tables}

    def settled(table: str, least: int) -> bool:
        one = found.get(table)
        dead = len(TOO_LARGE) if table == "public.documents" else 0
        return (
            one is not None
            and (one.held, one.vanished, one.dead) == (0, 0, dead)
            and one.published >= least
        )

    return {table: found.get(table) for table, least in wanted.items() if not settled(table, least)}
