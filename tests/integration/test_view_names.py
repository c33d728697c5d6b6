"""The names that readers use: what a start, a new column and a reader in the way do to them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from errno import ENOSPC
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import psycopg
import pytest
from psycopg import sql
from pydantic import AwareDatetime, BaseModel, Field, NaiveDatetime

from everstate.app import App
from everstate.changes import EntityType
from everstate.cli.plan import planned
from everstate.config import load
from everstate.errors import InvalidQuery, PublishRefused, ViewStoreError
from everstate.pipeline.keeping.declare import retire_left, show_core
from everstate.pipeline.requests import answers
from everstate.serving.connection import ReadConnection
from everstate.serving.overview import overflows
from everstate.views.changing import drop
from everstate.views.control import BUILDING, LIVE, RECOMPUTE, RETIRED, Control
from everstate.views.kinds import LatestPlan
from everstate.views.kinds.linear import LinearPlan
from everstate.views.reading import overflow_sql
from everstate.views.stores import ViewTables
from everstate.views.stores.postgres.publishing import ReaderName
from everstate.views.versions import registered
from kit.view_postgres import core_tables

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Amount = Annotated[Decimal, Field(max_digits=12, decimal_places=2)]


class Order(BaseModel):
    order_id: str
    parts: int
    amount: Amount


class WithNote(BaseModel):
    """A field more, and not at the end."""

    order_id: str
    note: str | None = None
    parts: int
    amount: Amount


class Dated(BaseModel):
    """Fields whose type cannot hold every value that PostgreSQL reads for it."""

    id: str
    price: Annotated[Decimal, Field(max_digits=7, decimal_places=2)] | None = None
    day: date | None = None
    seen: AwareDatetime | None = None
    clock: NaiveDatetime | None = None


DATED = EntityType("dated", Dated, "id")
ORDER = EntityType("ordr", Order, "order_id")
NOTED = EntityType("ordr", WithNote, "order_id")


@pytest.fixture
def control(database: str) -> Iterator[Control]:
    with psycopg.connect(database, autocommit=True) as connection:
        control = Control(connection, "names")
        control.install()
        connection.execute("SET search_path = names")
        with connection.transaction():
            core_tables(control, ORDER)
        yield control


def columns(control: Control) -> list[str]:
    described = control.connection.execute("SELECT * FROM ordr").description
    return [column.name for column in described or ()]


def kept(control: Control, key: str, state: str, table: str = "ordr_latest__v1") -> None:
    control.connection.execute(
        f"INSERT INTO {table} (key, version, change_id, kind, as_of, occurred_at, "
        'recorded_at, generation, partition, "offset", provenance, state) VALUES '
        "(%s, 1, gen_random_uuid(), 'created', now(), now(), now(), 1, 0, 0, '{}', %s)",
        (key, state),
    )


def test_a_new_column_comes_last_so_that_views_of_others_stay(control: Control) -> None:
    control.connection.execute("CREATE VIEW of_mine AS SELECT order_id, parts FROM ordr")
    before = columns(control)
    assert show_core(control, NOTED)
    assert columns(control) == [*before, "note"]
    # Nothing is touched where nothing changed, also by a start with the former order.
    (identity,) = control.connection.execute(
        "SELECT xmin::text FROM pg_class WHERE oid = 'ordr'::regclass"
    ).fetchall()
    assert show_core(control, NOTED)
    assert control.connection.execute(
        "SELECT xmin::text FROM pg_class WHERE oid = 'ordr'::regclass"
    ).fetchall() == [identity]
    # A column that others use is not dropped: the name stays as it is.
    control.connection.execute("CREATE VIEW with_note AS SELECT note FROM ordr")
    control.add_version(registered(LatestPlan.of("ordr"), 1, published=True))
    assert not show_core(control, ORDER)
    assert columns(control) == [*before, "note"]
    (row,) = control.versions("ordr_latest")
    assert "with_note depends on it" in (row.waits_for or "")
    assert row.error is None
    control.connection.execute("DROP VIEW with_note, of_mine")
    assert show_core(control, ORDER)
    assert [row.waits_for for row in control.versions("ordr_latest")] == [None]


def test_a_name_that_is_somebody_elses_stays_and_no_start_ends_with_it(control: Control) -> None:
    control.connection.execute("DROP VIEW ordr; CREATE TABLE ordr (of_mine int)")
    control.add_version(registered(LatestPlan.of("ordr"), 1, published=True))
    assert not show_core(control, ORDER)
    (row,) = control.versions("ordr_latest")
    assert '"ordr" is not a view' in (row.waits_for or "")
    assert columns(control) == ["of_mine"]


def test_a_reader_in_the_way_does_not_hold_back_a_start(control: Control, database: str) -> None:
    before = columns(control)
    with psycopg.connect(database, application_name="report") as reader:
        reader.execute("SELECT * FROM names.ordr")
        assert ViewTables(control).holders("ordr") == [
            f"report (process {reader.info.backend_pid})"
        ]
        assert not show_core(control, NOTED)
        assert columns(control) == before
    assert show_core(control, NOTED)
    assert columns(control) == [*before, "note"]


def test_a_value_that_does_not_fit_its_column_is_null_and_fails_no_reader(
    control: Control,
) -> None:
    """As after the type of a field has changed."""
    kept(control, "a", '{"order_id": "a", "parts": "seven", "amount": "1.5"}')
    kept(control, "b", '{"order_id": "b", "parts": 7, "amount": "99999999999999"}')
    kept(control, "c", '{"order_id": "c", "parts": 7.5, "amount": {"x": 1}}')
    rows = control.connection.execute("SELECT order_id, parts, amount FROM ordr ORDER BY 1")
    assert rows.fetchall() == [("a", None, Decimal("1.50")), ("b", 7, None), ("c", None, None)]
    kinds = control.connection.execute(
        "SELECT format_type(atttypid, atttypmod) FROM pg_attribute "
        "WHERE attrelid = 'ordr'::regclass AND attname IN ('parts', 'amount') ORDER BY attname"
    )
    assert kinds.fetchall() == [("numeric(12,2)",), ("bigint",)]


def test_a_value_that_its_column_cannot_hold_exactly_is_null(control: Control) -> None:
    with control.connection.transaction():
        core_tables(control, DATED)
    seen = "2026-01-02 03:04:05"
    moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    for field, value, found in (
        ("price", "12.500", Decimal("12.50")),
        ("price", "125e-1", Decimal("12.50")),
        ("price", "12.505", None),
        ("price", "NaN", None),
        ("price", "1_0", None),
        ("price", "99999.995", None),
        ("day", "2026-01-02", moment.date()),
        ("day", "2026-01-02T10:00:00", None),
        ("day", "today", None),
        ("seen", f"{seen}.0000000Z", moment),
        ("seen", seen, moment),
        ("seen", f"{seen}.0000001Z", None),
        ("seen", "now", None),
        ("seen", f"{seen} BC", None),
        ("clock", f"{seen}.0000000", moment.replace(tzinfo=None)),
        ("clock", f"{seen}.0000001", None),
    ):
        kept(control, value, json.dumps({"id": "a", field: value}), "dated_latest__v1")
        read = sql.SQL("SELECT {} FROM dated WHERE _key = %s").format(sql.Identifier(field))
        assert control.connection.execute(read, [value]).fetchall() == [(found,)], (field, value)


DEPENDENTS = {
    "function": "CREATE FUNCTION of_mine() RETURNS bigint LANGUAGE sql "
    "BEGIN ATOMIC SELECT count(*) FROM shown; END",
    "table": "CREATE TABLE of_mine (seen shown)",
}


@pytest.mark.parametrize("kind", DEPENDENTS)
def test_whatever_depends_on_a_name_refuses_its_new_columns_and_is_named(
    control: Control, kind: str
) -> None:
    connection: psycopg.Connection[Any] = control.connection
    with connection.transaction():
        ReaderName(connection, "names", "shown").point("SELECT 1 AS a, 2 AS b")
    connection.execute(DEPENDENTS[kind].encode())
    with pytest.raises(PublishRefused, match="of_mine"), connection.transaction():
        ReaderName(connection, "names", "shown").point("SELECT 1 AS c")
    dropping = pytest.raises(PublishRefused, match=r"not dropped, because .*of_mine")
    with dropping, connection.transaction():
        ReaderName(connection, "names", "shown").drop()
    assert connection.execute("SELECT * FROM shown").fetchall() == [(1, 2)]


def test_a_sum_that_its_cast_cannot_hold_is_null_and_the_other_groups_are_read(
    control: Control, database: str
) -> None:
    app = App("orders")
    app.entity("ordr", key="order_id")(Order)
    app.view(
        "v",
        sql="SELECT CAST(sum(parts) AS DECIMAL(5, 2)) AS d, "
        "CAST(sum(parts) % 2 AS DECIMAL(2, 1)) AS odd FROM ordr GROUP BY order_id",
    )
    plan = app.views["v"]
    assert isinstance(plan, LinearPlan)
    shown = plan.outputs[0][1]
    sums = "(1::numeric, 1), (999.994, 1), (999.995, 1), (-1e30, 1), (0, 0)"
    query = f"SELECT {shown} FROM (VALUES {sums}) AS t (a0, a1)"
    rows = [value for (value,) in control.connection.execute(query.encode())]
    assert rows == [Decimal("1.00"), Decimal("999.99"), None, None, None]
    condition = overflow_sql(shown)
    query = f"SELECT count(*) FILTER (WHERE {condition}) FROM (VALUES {sums}) AS t (a0, a1)"
    assert control.connection.execute(query.encode()).fetchall() == [(2,)]
    # As `views list` counts them, over the shards of a version's table.
    control.connection.execute(
        "CREATE TABLE v__v1 (g0 text, shard int, n bigint, a0 numeric, a1 bigint); "
        "INSERT INTO v__v1 VALUES ('a', 0, 1, 600, 1), ('a', 1, 1, 600, 1), ('b', 0, 1, 600, 1)"
    )
    row = registered(plan, 1, published=True)
    with closing(ReadConnection(lambda: database)) as reading:
        assert overflows(reading, "names", row, plan) == {"d": 1}
        assert overflows(reading, "names", replace(row, fingerprint="another"), plan) == {}


def test_a_name_that_is_made_again_keeps_owner_options_and_grants(control: Control) -> None:
    connection = control.connection
    connection.execute("CREATE ROLE name_owner; CREATE ROLE name_reader")
    try:
        with connection.transaction():
            ReaderName(connection, "names", "shown").point("SELECT 1 AS a, 2 AS b")
        connection.execute(
            "GRANT USAGE, CREATE ON SCHEMA names TO name_owner; "
            "ALTER VIEW shown OWNER TO name_owner; ALTER VIEW shown SET (security_barrier = true); "
            "GRANT SELECT (a) ON shown TO name_reader; GRANT SELECT (b) ON shown TO PUBLIC; "
            "GRANT UPDATE ON shown TO name_reader WITH GRANT OPTION"
        )
        with connection.transaction():
            ReaderName(connection, "names", "shown").point("SELECT 1 AS a, 3 AS c")
        (found,) = connection.execute(
            "SELECT pg_get_userbyid(relowner), reloptions, "
            "has_column_privilege('name_reader', 'shown', 'a', 'SELECT'), "
            "has_column_privilege('name_reader', 'shown', 'c', 'SELECT'), "
            "has_table_privilege('name_reader', 'shown', 'UPDATE WITH GRANT OPTION') "
            "FROM pg_class WHERE oid = 'shown'::regclass"
        ).fetchall()
        assert found == ("name_owner", ["security_barrier=true"], True, False, True)
    finally:
        connection.execute("DROP OWNED BY name_owner, name_reader CASCADE")
        connection.execute("DROP ROLE name_owner, name_reader")


def test_comments_of_others_stay_whether_a_name_is_replaced_or_made_again(
    control: Control,
) -> None:
    connection = control.connection
    comments = (
        "SELECT obj_description('shown'::regclass, 'pg_class'), "
        "col_description('shown'::regclass, 1)"
    )
    shown = ["SELECT 1 AS a, 2 AS b", "SELECT 1 AS a, 3 AS c"]

    def point(query: str) -> None:
        with connection.transaction():
            ReaderName(connection, "names", "shown").point(query)

    point(shown[0])
    assert connection.execute(comments).fetchall() == [(None, None)]
    connection.execute("COMMENT ON VIEW shown IS 'of mine'; COMMENT ON COLUMN shown.a IS 'one'")
    identity = "SELECT xmin::text FROM pg_class WHERE oid = 'shown'::regclass"
    before = connection.execute(identity).fetchall()
    point(shown[0])
    assert connection.execute(identity).fetchall() == before, "it shows that already"
    for query in ("SELECT 4 AS a, 2 AS b", shown[1]):
        point(query)
        assert connection.execute(comments).fetchall() == [("of mine", "one")]


def test_a_prepared_select_of_all_columns_fails_after_a_column_was_added(
    control: Control, database: str
) -> None:
    """As the page on reading with SQL says."""
    with psycopg.connect(database, autocommit=True) as reader:
        for _ in range(2):
            reader.execute("SELECT * FROM names.ordr", prepare=True)
            reader.execute("SELECT order_id FROM names.ordr", prepare=True)
        assert show_core(control, NOTED)
        reader.execute("SELECT order_id FROM names.ordr", prepare=True)
        for _ in range(2):
            with pytest.raises(psycopg.errors.FeatureNotSupported, match="cached plan"):
                reader.execute("SELECT * FROM names.ordr", prepare=True)
        reader.execute("DEALLOCATE ALL")
        reader.execute("SELECT * FROM names.ordr", prepare=True)


def test_a_default_privilege_that_was_revoked_stays_revoked(control: Control) -> None:
    connection = control.connection
    connection.execute("ALTER DEFAULT PRIVILEGES IN SCHEMA names GRANT SELECT ON TABLES TO PUBLIC")
    with connection.transaction():
        ReaderName(connection, "names", "shown").point("SELECT 1 AS a")
    connection.execute("REVOKE SELECT ON shown FROM PUBLIC")
    with connection.transaction():
        ReaderName(connection, "names", "shown").point("SELECT 1 AS b")
    may = "SELECT has_table_privilege('public', 'shown', 'SELECT')"
    assert connection.execute(may).fetchall() == [(False,)]


def test_views_of_an_entity_type_that_left_the_app_can_be_dropped(control: Control) -> None:
    whole, left, other = App("orders"), App("orders"), App("others")
    for app in (whole, other):
        app.entity("ordr", key="order_id")(Order)
    left.entity("part", key="order_id")(Order)
    whole.view("v", sql="SELECT count(*) AS n FROM ordr")
    first = control.begin_deployment("orders", "here")
    control.declares(first, "ordr")
    control.add_version(registered(whole.views["v"], 1, published=True))
    control.add_version(registered(whole.views["v"], 2, status=BUILDING))
    second = control.begin_deployment("orders", "here")
    control.declares(second, "part")
    retire_left(control, whole, second)
    with pytest.raises(InvalidQuery, match="still declared"):
        drop(control, "v")
    retire_left(control, left, second)
    assert [(row.version, row.status) for row in control.versions("v")] == [(1, RETIRED)]
    assert [row.version for row in drop(control, "v")] == [1]
    # Not, where another project keeps them.
    control.add_version(registered(whole.views["v"], 3, published=True))
    third = control.begin_deployment("others", "there")
    control.declares(third, "ordr")
    retire_left(control, left, second)
    assert [(row.version, row.status) for row in control.versions("v")] == [(3, LIVE)]


def test_a_later_deployment_is_one_of_the_project_or_of_the_entity_type(control: Control) -> None:
    first = control.begin_deployment("orders", "here")
    second = control.begin_deployment("others", "there")
    control.declares(second, "part")
    assert control.later_deployment(first, "ordr") is None
    assert "others on there" in (control.later_deployment(first, "part") or "")
    third = control.begin_deployment("orders", "elsewhere")
    assert control.later_deployment(first, "ordr") is None  # it has declared nothing yet
    control.declares(third, "stock")
    assert "orders on elsewhere" in (control.later_deployment(first, "ordr") or "")


def test_control_tables_of_an_unreleased_version_are_refused(
    control: Control, database: str, tmp_path: Path
) -> None:
    """Reading them with today's names would give other answers; they stay as they are."""
    control.connection.execute("ALTER TABLE view DROP COLUMN waits_for, ADD COLUMN reason text")
    before = control_columns(control)
    with pytest.raises(ViewStoreError, match="schema names were made by an unreleased") as refused:
        control.install()
    assert "views.schema_name" in (refused.value.advice or "")
    assert "everstate log begin" in (refused.value.advice or "")
    settings: dict[str, Any] = {"store": {"dsn": database}, "views": {"schema_name": "names"}}
    app = App("orders")
    app.entity("ordr", key="order_id")(Order)
    with pytest.raises(ViewStoreError, match="by an unreleased version"):
        planned(load(tmp_path, log={"bootstrap_servers": "localhost:1"}, **settings), app)
    assert control_columns(control) == before


def control_columns(control: Control) -> list[tuple[str, str]]:
    """Table and column of all control tables."""
    query = "SELECT table_name, column_name FROM information_schema.columns "
    query += "WHERE table_schema = 'names' ORDER BY 1, 2"
    return control.connection.execute(query).fetchall()


def test_a_start_waits_for_no_reader_of_the_control_tables(control: Control, database: str) -> None:
    """Else it would wait for a long proof, and the views that are kept would wait for it."""
    stored = "SELECT attname FROM pg_attribute WHERE attrelid = to_regclass(%s) "
    stored += "AND attstorage = 'e' ORDER BY 1"
    found = control.connection.execute(stored, ("names.deferred",)).fetchall()
    assert found == [("keys",), ("rows",)], "these bytes are compressed already"
    tables = "SELECT tablename FROM pg_tables WHERE schemaname = 'names'"
    with psycopg.connect(database) as proof:
        for (name,) in control.connection.execute(tables).fetchall():
            proof.execute(sql.SQL("SELECT FROM {}").format(sql.Identifier("names", name)))
        control.connection.execute("SET lock_timeout = '1s'")
        control.install()


def test_a_client_gets_the_error_that_nobody_expected(
    control: Control, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the part of the pipeline that answers, at each of its new attempts."""

    def full(*_args: object, **_options: object) -> None:
        raise OSError(ENOSPC, "No space left on device")

    monkeypatch.setattr(answers, "recompute", full)
    settings: dict[str, Any] = {"store": {"dsn": database}, "views": {"schema_name": "names"}}
    config = load(tmp_path, log={"bootstrap_servers": "localhost:1"}, **settings)
    asked, stop = control.ask(RECOMPUTE, {}), threading.Event()
    answering = answers.Answers(cast("SparkSession", None), config, App("orders"))
    serving = threading.Thread(target=answering.run, args=(stop,))
    serving.start()
    deadline = time.monotonic() + 30
    while (found := control.request(asked)) is None or found.state != "failed":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert serving.is_alive()
    assert "No space left" in (found.answer or {})["message"]
    stop.set()
    serving.join()
    answering.close()


def test_labels_are_ordered_as_in_spark_in_a_database_of_any_locale(database: str) -> None:
    case = "CASE WHEN count(*) > 5 THEN 'many' ELSE 'Some' END"
    app = App("orders")
    app.entity("ordr", key="order_id")(Order)
    app.view("v", sql=f"SELECT parts, {case} AS w FROM ordr GROUP BY parts ORDER BY w LIMIT 1")
    (order,) = app.view_plan("v").shown.order  # type: ignore[attr-defined]
    name = sql.Identifier(f"icu_{database.rpartition('/')[2]}")
    with psycopg.connect(database, autocommit=True) as connection:
        create = "CREATE DATABASE {} TEMPLATE template0 LOCALE_PROVIDER icu ICU_LOCALE 'en'"
        connection.execute(sql.SQL(create).format(name))
        with psycopg.connect(database, dbname=name.as_string()[1:-1]) as english:
            rows = "SELECT n FROM (VALUES (9), (1)) AS kept (n) ORDER BY "
            assert english.execute((rows + order.sql).encode()).fetchall() == [(1,), (9,)]
            plain = (rows + order.sql.replace('COLLATE "C"', "")).encode()
            assert english.execute(plain).fetchall() == [(9,), (1,)]
        connection.execute(sql.SQL("DROP DATABASE {}").format(name))


def test_plan_changes_nothing(database: str, tmp_path: Path) -> None:
    config = load(tmp_path, store={"dsn": database}, log={"bootstrap_servers": "localhost:1"})
    app = App("orders")
    app.entity("ordr", key="order_id")(Order)
    _, plan = planned(config, app)
    assert plan.is_first
    assert [step.view for step in plan.views] == ["ordr_history"]
    with psycopg.connect(database) as connection:
        schemas = "SELECT count(*) FROM pg_namespace WHERE nspname = %s"
        assert connection.execute(schemas, (config.views.schema_name,)).fetchall() == [(0,)]


def test_plan_shows_the_views_of_an_entity_type_that_leaves_the_app(
    control: Control, database: str, tmp_path: Path
) -> None:
    whole, left = App("orders"), App("orders")
    whole.entity("ordr", key="order_id")(Order)
    left.entity("part", key="order_id")(Order)
    whole.view("v", sql="SELECT count(*) AS n FROM ordr")
    control.declares(control.begin_deployment("orders", "here"), "ordr")
    control.add_version(registered(whole.views["v"], 1, published=True))
    settings: dict[str, Any] = {"store": {"dsn": database}, "views": {"schema_name": "names"}}
    config = load(tmp_path, log={"bootstrap_servers": "localhost:1"}, **settings)
    _, plan = planned(config, left)
    assert [(each.view, each.what) for each in plan.views] == [
        ("part_history", "new"),
        ("v", "not declared"),
    ]
