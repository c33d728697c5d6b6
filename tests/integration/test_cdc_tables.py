"""Tables of PostgreSQL of every shape: captured right, or refused before anything is made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from capture_cases import PostgresSource
from everstate.changes import EntityType
from everstate.cli import cli
from everstate.config import Config
from everstate.declarations.captures import Capture, ProvenanceFrom, Table
from everstate.errors import CaptureFailed
from everstate.sources.cdc.capturing import Capturing
from everstate.sources.cdc.database import Finding
from everstate.sources.cdc.refusing import peculiarities, shape_findings


class Item(BaseModel):
    """A row of each table here."""

    id: int
    a: int


class Total(Item):
    """A row with a column that the database computes."""

    total: int | None = None


class Long(Item):
    """A row with columns that may be stored apart from it."""

    b: str | None = None
    w: list[float] | None = None


PLAIN = "CREATE TABLE t (id int NOT NULL, a int)"
PARTED = "CREATE TABLE t (id int PRIMARY KEY, a int) PARTITION BY RANGE (id)"
KEYLESS_PARTED = "CREATE TABLE t (id int, a int) PARTITION BY RANGE (id)"
PART = "CREATE TABLE t_1 PARTITION OF t FOR VALUES FROM (0) TO (1000)"
WHOLE = "ALTER TABLE t REPLICA IDENTITY FULL"
COMPUTED = (
    "CREATE TABLE t (id int PRIMARY KEY, a int, total int GENERATED ALWAYS AS (a * 2) STORED)"
)


@pytest.fixture
def source(database: str) -> PostgresSource:
    return PostgresSource(database)


def capture_tables(
    config: Config, source: PostgresSource, model: type[BaseModel] = Item, **tables: Table
) -> Capturing:
    declared = {f"public.{name}": table for name, table in tables.items()}
    capture = Capture(name="shop", kind="postgresql", tables=declared, dsn=source.dsn)
    entities = {"item": EntityType("item", model, "id")}
    return Capturing(config, capture, local=True, entities=entities)


def capture_case(config: Config, source: PostgresSource, options: dict[str, Any]) -> Capturing:
    """A capture of the table `t`; ``options`` are those of its Table, and its model."""
    rest = {name: value for name, value in options.items() if name != "model"}
    table = Table(entity="item", **rest)
    return capture_tables(config, source, options.get("model", Item), t=table)


def failed(findings: list[Finding]) -> dict[str, Finding]:
    return {each.name: each for each in findings if each.outcome == "fail"}


def checked(capturing: Capturing) -> dict[str, Finding]:
    """What fails of the tables."""
    with capturing.database() as database:
        settings = capturing.capture.settings
        shapes = database.shapes(settings)
        shaped = shape_findings(capturing.capture, capturing.entities, shapes, settings)
        return failed([*database.check_tables(), *shaped])


def change_every_row(source: PostgresSource, table: str = "t") -> None:
    """Every kind of write; raises where PostgreSQL refuses one."""
    source.run(
        f"INSERT INTO {table} (id, a) VALUES (7, 1), (8, 2)",
        f"UPDATE {table} SET a = a + 10",
        f"DELETE FROM {table} WHERE id = 8",
    )


def publish(capturing: Capturing) -> list[str]:
    """Make publication and own tables, as `add` does; what was done to the publication."""
    with capturing.database() as database:
        return [step.done for step in database.prepare() if step.what.startswith("publication")]


REFUSED: dict[str, tuple[list[str], dict[str, Any], str]] = {
    "long values that nobody could tell from null": (
        ["CREATE TABLE t (id int PRIMARY KEY, a int, b bytea, w float8[])"], {"model": Long},
        "column public.t.w: a long value of type double precision[] is stored apart"),
    "long values of the provenance that nobody could tell from null": (
        ["CREATE TABLE t (id int PRIMARY KEY, a int, why path)"],
        {"provenance": ProvenanceFrom(columns={"reason": "why"})},
        "so reason of the provenance would be its default"),
    "a column of the provenance that is not there": (
        ["CREATE TABLE t (id int PRIMARY KEY, a int)"],
        {"provenance": ProvenanceFrom(columns={"reason": "why"})},
        "column public.t.why: the table has no such column"),
    "a field whose column was renamed": (
        ["CREATE TABLE t (id int PRIMARY KEY, a int, sum int)"], {"model": Total},
        "columns of public.t: it has no column for this field total"),
    "a column of a type that is not carried": (
        ["CREATE TYPE pair AS (a int, b int)", "CREATE TABLE t (id int PRIMARY KEY, a pair)"], {},
        "Debezium carries no values of type pair"),
    "a column of nested arrays": (
        ["CREATE TABLE t (id int PRIMARY KEY, a int[][])"], {}, "cannot read nested arrays"),
    "two columns for one field": (
        ['CREATE TABLE t (id int PRIMARY KEY, a int, "toTal" int, "to_Tal" int)'],
        {"model": Total, "columns": {"to_Tal": "total", "toTal": "total"}},
        "total: the columns toTal and to_Tal both become it"),
    "a key that leaves out a column of the primary key": (
        ["CREATE TABLE t (id int, line_no int DEFAULT 0, a int, PRIMARY KEY (id, line_no))"], {},
        "does not depend on line_no"),
    "key columns that leave out a column of the primary key": (
        ["CREATE TABLE t (id int, line_no int DEFAULT 0, a int, PRIMARY KEY (id, line_no))"],
        {"key_columns": ("id",)}, "key_columns lack line_no"),
    "no key at all": ([PLAIN], {}, "there is no primary key"),
    "a unique index that nobody declared": (
        [PLAIN, "CREATE UNIQUE INDEX t_id ON t (id)"], {}, "but the unique index t_id"),
    "declared key columns, and an identity that does not have them": (
        [PLAIN], {"key_columns": ("id",)}, "UPDATE and DELETE of public.t fail"),
    "a key that is checked at the end of a transaction": (
        ["CREATE TABLE t (id int PRIMARY KEY DEFERRABLE, a int)"], {},
        "key of public.t: t_pkey is DEFERRABLE"),
    "a deferrable key whose log has whole rows": (
        ["CREATE TABLE t (id int, a int, PRIMARY KEY (id) INCLUDE (a) DEFERRABLE INITIALLY "
         "DEFERRED)", WHOLE], {}, "PRIMARY KEY (id) INCLUDE (a) NOT DEFERRABLE;"),
    "declared key columns of which only a deferrable constraint is unique": (
        [PLAIN, "ALTER TABLE t ADD UNIQUE (id) DEFERRABLE", WHOLE], {"key_columns": ("id",)},
        "key of public.t: t_id_key is DEFERRABLE"),
    "an identity that was taken away": (
        ["CREATE TABLE t (id int PRIMARY KEY, a int)", "ALTER TABLE t REPLICA IDENTITY NOTHING"],
        {}, "UPDATE and DELETE of public.t fail"),
    "an identity whose index is gone": (
        [PLAIN, "CREATE UNIQUE INDEX t_id ON t (id)", "ALTER TABLE t REPLICA IDENTITY USING "
         "INDEX t_id", "DROP INDEX t_id"], {"key_columns": ("id",)},
        "UPDATE and DELETE of public.t fail"),
    "an identity of other columns than the key": (
        ["CREATE TABLE t (id int PRIMARY KEY, a int NOT NULL UNIQUE)",
         "ALTER TABLE t REPLICA IDENTITY USING INDEX t_a_key"], {},
        "the log of a delete of public.t has a"),
    "heirs without a key": (
        ["CREATE TABLE t (id int PRIMARY KEY, a int)", "CREATE TABLE t_1 () INHERITS (t)"], {},
        "public.t_1 inherit from it"),
    "partitions without a key": (
        [KEYLESS_PARTED, PART], {"key_columns": ("id",)}, "UPDATE and DELETE of public.t_1 fail"),
    "a table that is not logged": (
        ["CREATE UNLOGGED TABLE t (id int PRIMARY KEY, a int)"], {}, "public.t is UNLOGGED"),
    "a partition that is not logged": (
        [PARTED, PART.replace("TABLE", "UNLOGGED TABLE")], {}, "public.t_1 is UNLOGGED"),
    "a generated column that the model has": (
        [COMPUTED], {"model": Total}, "field total would never have a value"),
    "a generated column as the key": (
        ["CREATE TABLE t (a int, id int GENERATED ALWAYS AS (a) STORED PRIMARY KEY)"], {},
        "id is generated"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_add_refuses_what_it_cannot_capture_right_before_it_makes_anything(
    config: Config, source: PostgresSource, case: str
) -> None:
    statements, options, reason = REFUSED[case]
    source.run(*statements)
    capturing = capture_case(config, source, options)
    with pytest.raises(CaptureFailed, match="nothing was made") as caught:
        capturing.add()
    assert reason in str(caught.value)
    assert source.rows("SELECT pubname FROM pg_publication") == []
    assert source.rows("SELECT FROM pg_namespace WHERE nspname = 'everstate_capture'") == []
    if "GENERATED" not in statements[0] and " a int," in statements[0]:
        change_every_row(source)


UNMENDED = ("heirs", "a generated", "a field", "a column", "two col", "a key that l", "key col")
MENDED = [case for case in REFUSED if not case.startswith(UNMENDED)]


@pytest.mark.parametrize("case", MENDED)
def test_what_the_doctor_prints_makes_a_refused_table_fit_to_be_captured(
    config: Config, source: PostgresSource, case: str
) -> None:
    statements, options, _reason = REFUSED[case]
    source.run(*statements)
    capturing = capture_case(config, source, options)
    for finding in checked(capturing).values():
        source.run(*finding.sql)
    if case == "a unique index that nobody declared":
        capturing = capture_tables(config, source, t=Table(entity="item", key_columns=("id",)))
    assert checked(capturing) == {}
    publish(capturing)
    change_every_row(source)


def test_an_index_is_an_identity_for_declared_key_columns(
    config: Config, source: PostgresSource
) -> None:
    source.run(PLAIN, "CREATE UNIQUE INDEX t_id ON t (id)")
    source.run("ALTER TABLE t REPLICA IDENTITY USING INDEX t_id")
    capturing = capture_tables(config, source, t=Table(entity="item", key_columns=("id",)))
    assert checked(capturing) == {}
    with capturing.database() as database:
        peculiar = peculiarities(capturing.capture, {}, database.shapes({}))
        assert peculiar.keys == {"public.t": ("id",)}
        assert database.condition("public.t", {"id": 7}) == '("id" = 7::integer)'


def test_a_full_identity_captures_a_table_that_has_no_unique_column_with_a_warning(
    config: Config, source: PostgresSource
) -> None:
    source.run(PLAIN, "ALTER TABLE t REPLICA IDENTITY FULL")
    capturing = capture_tables(config, source, t=Table(entity="item", key_columns=("id",)))
    with capturing.database() as database:
        findings = {each.name: each for each in database.check_tables()}
    assert failed(list(findings.values())) == {}
    assert findings["key of public.t"].outcome == "warn"
    assert "nothing in the database keeps id unique" in findings["key of public.t"].found
    publish(capturing)
    change_every_row(source)


def test_a_key_that_becomes_deferrable_later_is_found_and_mended(
    config: Config, source: PostgresSource
) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY, a int)", WHOLE)
    capturing = capture_tables(config, source, t=Table(entity="item"))
    publish(capturing)
    assert "key of public.t" not in failed(capturing.check())
    made = "ADD CONSTRAINT t_pkey PRIMARY KEY (id) DEFERRABLE"
    source.run(f"ALTER TABLE t DROP CONSTRAINT t_pkey, {made}")
    found = failed(capturing.check())["key of public.t"]
    assert "two rows may have one key within a transaction" in found.found
    source.run(*found.sql)
    assert "key of public.t" not in failed(capturing.check())


def test_beside_a_deferrable_key_another_one_that_is_checked_at_once_is_enough(
    config: Config, source: PostgresSource
) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY DEFERRABLE, a int, UNIQUE (id))", WHOLE)
    assert checked(capture_tables(config, source, t=Table(entity="item"))) == {}


def test_heirs_are_captured_as_tables_of_their_own(config: Config, source: PostgresSource) -> None:
    source.run(
        "CREATE TABLE t (id int PRIMARY KEY, a int)",
        "CREATE TABLE t_1 (PRIMARY KEY (id)) INHERITS (t)",
        "CREATE TABLE t_2 (PRIMARY KEY (id)) INHERITS (t)",
    )
    item = Table(entity="item")
    assert set(checked(capture_tables(config, source, t=item))) == {"parts of public.t"}
    assert checked(capture_tables(config, source, t_1=item, t_2=item)) == {}


def test_a_partitioned_table_is_published_under_its_own_name(
    config: Config, source: PostgresSource
) -> None:
    source.run(PARTED, PART)
    capturing = capture_tables(config, source, t=Table(entity="item"))
    assert checked(capturing) == {}
    assert publish(capturing) == ["made"]
    tables = "SELECT tablename FROM pg_publication_tables WHERE tablename LIKE 't%'"
    assert source.rows(tables) == [("t",)]
    assert publish(capturing) == ["there"], "the same again changes nothing"
    change_every_row(source)


def test_a_publication_that_tells_the_partitions_names_is_found_and_mended(
    config: Config, source: PostgresSource
) -> None:
    source.run(PARTED, PART)
    capturing = capture_tables(config, source, t=Table(entity="item"))
    name = f"publication {capturing.names.identifier}"
    publish(capturing)
    tell_parts = f"ALTER PUBLICATION {capturing.names.identifier} SET "
    source.run(f"{tell_parts} (publish_via_partition_root = false)")
    found = failed(capturing.check())[name]
    assert "under the names of the partitions" in found.found
    source.run(*found.sql)
    assert name not in failed(capturing.check())
    source.run(f"{tell_parts} (publish_via_partition_root = false)")
    assert publish(capturing) == ["changed"], "as `add` does for a capture of an older version"
    assert name not in failed(capturing.check())


def test_a_partition_and_its_table_are_not_captured_together(
    config: Config, source: PostgresSource
) -> None:
    source.run(PARTED, PART)
    both = capture_tables(config, source, t=Table(entity="item"), t_1=Table(entity="item"))
    assert set(checked(both)) == {"parts of public.t_1"}
    assert checked(capture_tables(config, source, t_1=Table(entity="item"))) == {}


@pytest.mark.parametrize(
    "options", [{"computed": {"total": lambda state: state["a"] * 2}}, {"drop": ("total",)}]
)
def test_a_generated_column_is_left_out_and_its_field_is_computed_or_dropped(
    config: Config, source: PostgresSource, options: dict[str, Any]
) -> None:
    source.run(COMPUTED)
    capturing = capture_case(config, source, {"model": Total, **options})
    found = {each.name: each for each in capturing.check()}
    assert found["generated column public.t.total"].outcome == "ok"
    with capturing.database() as database:
        peculiar = peculiarities(capturing.capture, {}, database.shapes({}))
        assert list(peculiar.left_out["public.t"]) == ["total"]


def test_a_column_that_no_field_has_is_left_out_where_its_long_values_cannot_be_told(
    config: Config, source: PostgresSource
) -> None:
    source.run(
        "CREATE TABLE t (id int PRIMARY KEY, a int, w float8[] NOT NULL DEFAULT '{}', "
        "flags bit(8)[], name text)"
    )
    capturing = capture_case(config, source, {})
    found = {each.name: each for each in capturing.check()}
    assert checked(capturing) == {}
    assert found["column public.t.w"].outcome == found["column public.t.flags"].outcome == "ok"
    assert "left out, since no field has it: a long value" in found["column public.t.w"].found
    assert "column public.t.name" not in found

    chosen = {"column.include.list": "public.t.id,public.t.a,public.t.w"}
    capture = replace(capturing.capture, settings=chosen)
    capturing = Capturing(config, capture, local=True, entities=capturing.entities)
    assert (
        "and fail because the column is NOT NULL" in checked(capturing)["column public.t.w"].found
    )


def test_a_table_that_lost_its_key_can_be_written_again_after_the_capture_is_removed(
    config: Config, source: PostgresSource
) -> None:
    source.run("CREATE TABLE t (id int PRIMARY KEY, a int)")
    source.run("CREATE TABLE u (id int PRIMARY KEY, a int)")
    capturing = capture_tables(config, source, t=Table(entity="item"), u=Table(entity="item"))
    publish(capturing)
    source.run("ALTER TABLE t DROP CONSTRAINT t_pkey", "CREATE TABLE t_1 () INHERITS (t)")
    with pytest.raises(psycopg.Error, match="does not have a replica identity"):
        change_every_row(source)
    with capturing.database() as database:
        step, slot = database.release()
    assert step.what.startswith("table public.t of publication")
    assert slot.done == "kept"
    change_every_row(source)
    source.run("ALTER TABLE t ADD PRIMARY KEY (id)")
    assert publish(capturing) == ["changed"]


def test_what_postgres_says_is_told_with_its_detail(config: Config, source: PostgresSource) -> None:
    source.run("CREATE UNLOGGED TABLE t (id int PRIMARY KEY, a int)")
    capturing = capture_tables(config, source, t=Table(entity="item"))
    with capturing.database() as database, pytest.raises(CaptureFailed, match="for unlogged tabl"):
        database.prepare()


def test_a_capture_that_is_refused_starts_no_connect_and_the_reason_is_shown(
    config: Config, source: PostgresSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.run(PLAIN)
    (tmp_path / "everstate.toml").write_text('[project]\napp = "refused_shop:app"\n')
    (tmp_path / "refused_shop.py").write_text(
        "from everstate.app import App\n"
        "from everstate.declarations.captures import Table\nfrom pydantic import BaseModel\n"
        "app = App('shop')\n\n@app.entity('item', key='id', source='capture')\n"
        "class Item(BaseModel):\n    id: int\n\n"
        "app.capture('shop', kind='postgresql', dsn='$SHOP_DSN',\n"
        "    tables={'public.t': Table(entity='item')})\n"
    )
    monkeypatch.setenv("SHOP_DSN", source.dsn)
    monkeypatch.setenv("EVERSTATE_LOG_BOOTSTRAP_SERVERS", config.bootstrap_servers)
    monkeypatch.setenv("EVERSTATE_STORE_DSN", config.store_dsn)
    refused = CliRunner().invoke(cli, ["-C", str(tmp_path), "cdc", "add", "shop"])
    assert refused.exit_code == 10, refused.output
    assert "there is no primary key" in refused.stderr
    assert 'ALTER TABLE "public"."t" ADD PRIMARY KEY' in refused.stderr
    assert not (tmp_path / ".everstate" / "stack.json").exists()
