"""Captures without servers: names, settings of connectors, addresses, grants, states."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable
from dataclasses import replace
from datetime import date, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from capture_cases import UNAVAILABLE, fold
from everstate.changes import EntityType
from everstate.config import Config, expanded, load
from everstate.declarations.captures import (
    Aggregate,
    Capture,
    DatabaseKind,
    Outbox,
    ProvenanceFrom,
    Table,
)
from everstate.errors import InvalidCapture, InvalidConfig
from everstate.findings import Finding
from everstate.sources.cdc.connectors import (
    Address,
    OwnTables,
    Peculiarities,
    connector_settings,
    is_current,
)
from everstate.sources.cdc.database import key_values
from everstate.sources.cdc.inexact import (
    check_values,
    inexact_in_mariadb,
    inexact_in_outbox,
    inexact_in_postgres,
)
from everstate.sources.cdc.mariadb import mariadb_address
from everstate.sources.cdc.mariadb_checks import MariaChecks, _grants
from everstate.sources.cdc.names import CaptureNames
from everstate.sources.cdc.notifications import (
    INITIAL,
    Notification,
    ended_snapshots,
    first_of,
)
from everstate.sources.cdc.postgres import postgres_address
from everstate.sources.cdc.postgres_checks import lost_slot
from everstate.sources.cdc.postgres_tables import COLUMNS
from everstate.sources.cdc.secrets import password_reference
from everstate.sources.cdc.status import age_s, states_of


def declared(kind: DatabaseKind = "postgresql", **options: Any) -> Capture:
    tables = {"public.orders": Table(entity="order")}
    return Capture(name="shop", kind=kind, tables=tables, **options)


def settings(
    config: Config, capture: Capture, peculiar: Peculiarities | None = None
) -> dict[str, str]:
    return connector_settings(
        config,
        capture,
        CaptureNames("p", capture.name),
        Address("db", 5432, "u", "shop", {}),
        OwnTables("everstate_capture.signals_p_shop", "everstate_capture.beats_p_shop", "BEAT"),
        password="${file:x:password}",
        brokers="kafka:9092",
        peculiar=peculiar,
    )


def test_names_stay_within_what_databases_take() -> None:
    short = CaptureNames("everstate", "shop")
    assert (short.identifier, short.connector) == ("everstate_shop", "everstate.shop")
    long = CaptureNames("A-very-long-prefix-for-the-log-of-a-large-company", "warehouse_of_orders")
    assert len(long.identifier) <= 44
    assert long.identifier != CaptureNames(long.prefix, "warehouse_of_orderz").identifier
    assert long.identifier.replace("_", "a").isalnum()
    assert 1 <= long.server_id < 2**31


def test_sessions_of_postgres_have_settings_of_their_own_after_those_that_are_declared(
    tmp_path: Path,
) -> None:
    config, options = load(tmp_path), "driver.options"
    plain = settings(config, declared())
    assert "-c bytea_output=hex" in plain[options]
    assert plain[options].endswith("-c row_security=off")
    own = declared(settings={options: "-c bytea_output=escape -c work_mem=8MB"})
    made = settings(config, own)[options]
    assert made == f"-c bytea_output=escape -c work_mem=8MB {plain[options]}", "the last one holds"
    assert is_current(plain, declared())
    former = {name: value for name, value in plain.items() if name != options}
    assert not is_current(former, declared())
    assert is_current(former, declared("mariadb"))


@pytest.mark.parametrize(
    ("slot", "position", "is_behind_hole"),
    [
        ({"end": 90}, {"lsn": 90}, False),
        ({"end": 91}, {"lsn": 90}, True),
        ({"end": 91}, {"lsn": 80, "lsn_proc": 90, "lsn_commit": 91}, False),
        ({"end": 91, "active": True}, {"lsn": 90}, False),
        ({"end": 91}, {}, False),
        ({"end": None}, {"lsn": 90}, False),
        ({"end": 90, "wal_status": "lost"}, {"lsn": 90}, True),
    ],
)
def test_a_slot_that_is_ahead_of_the_position_has_a_hole_behind_it(
    slot: dict[str, Any], position: dict[str, Any], is_behind_hole: bool
) -> None:
    row = {"active": False, "wal_status": "reserved", "reason": "", **slot}
    assert (lost_slot(row, position) is not None) is is_behind_hole


def test_a_trace_of_a_position_that_the_server_no_longer_has_is_one_sentence() -> None:
    trace = (
        "org.apache.kafka.connect.errors.ConnectException: The connector is trying to read change "
        "stream starting at PostgresOffsetContext [sourceInfo=...], but this is no longer "
        "available on the server. Reconfigure the connector to use a snapshot."
    )
    task = {"state": "FAILED", "trace": trace}
    _, _, reason = states_of({"connector": {"state": "RUNNING"}, "tasks": [task]}, "shop")
    assert reason is not None
    assert reason.startswith("the server no longer has the log after the stored position; ")
    assert "`everstate cdc snapshot shop --new-epoch`" in reason


def test_everything_goes_to_one_raw_log_and_what_is_no_row_says_so(tmp_path: Path) -> None:
    capture = declared()
    names = CaptureNames("p", capture.name)
    assert names.raw_log == "p.raw.shop"
    made = settings(load(tmp_path), capture)
    assert made["transforms"].split(",")[-1] == "one"
    assert made["transforms.one.replacement"] == names.raw_log
    topics = {
        "p.raw.shop.transaction": "transaction",
        "p.raw.shop.message": "message",
        "p.capture.heartbeats.p.raw.shop": "heartbeat",
        "p.raw.shop": "schema",
    }
    for topic, kind in topics.items():
        assert re.fullmatch(made[f"predicates.{kind}.pattern"], topic)
        assert made[f"transforms.{kind}.value.literal"] == kind
        assert not re.fullmatch(made[f"predicates.{kind}.pattern"], "p.raw.shop.public.orders")
    routed = [*topics, "p.raw.shop.public.orders"]
    assert all(re.fullmatch(made["transforms.one.regex"], topic) for topic in routed)
    assert not re.fullmatch(made["transforms.one.regex"], names.notifications)


def test_settings_of_a_connector_hold_no_password(tmp_path: Path) -> None:
    made = settings(load(tmp_path), declared())
    assert made["database.password"] == "${file:x:password}"
    assert made["table.include.list"] == r"public\.orders"
    assert made["message.prefix.exclude.list"] == ".*"
    assert made["publication.autocreate.mode"] == "disabled"
    assert made["heartbeat.action.query"] == "BEAT"


def test_a_null_stays_null_and_a_number_keeps_its_digits_on_the_way_to_the_log(
    tmp_path: Path,
) -> None:
    kinds: tuple[DatabaseKind, ...] = ("postgresql", "mariadb")
    for kind in kinds:
        made = settings(load(tmp_path), declared(kind))
        for side in ("key", "value"):
            assert made[f"{side}.converter.replace.null.with.default"] == "false"
            assert made[f"{side}.converter.decimal.format"] == "NUMERIC"
        assert made["event.converting.failure.handling.mode"] == "fail", "it would be null"
    assert made["bigint.unsigned.handling.mode"] == "precise"
    assert made["enable.time.adjuster"] == "false", "it would move the year 1 to 2001"


PLAIN = {"may_be_null": 0, "has_default": 0, "default_is_now": 0}
"""A column of MariaDB that is NOT NULL and has no default."""
CHECKED = "CHECK (('0001-01-01'::date <= ALL (days)))"


def found_in(capture: Capture, entities: Any, inexact: Iterable[Any]) -> list[Finding]:
    """What is found of these columns of a captured database."""
    database: Any = SimpleNamespace(inexact_columns=lambda: inexact)
    return check_values(capture, entities, database)


def test_columns_whose_values_would_be_changed_are_refused_where_a_field_has_them() -> None:
    def column(name: str, kind: str, *checks: str, **more: bool) -> dict[str, Any]:
        known: dict[str, Any] = {"text": kind, "name": kind.removesuffix("[]"), "kind": "b"}
        known |= {"is_array": kind.endswith("[]"), "is_domain": False, "is_domain_inside": False}
        known |= {"dimensions": 1, "size": -1, **more}
        return {"table": "public.orders", "name": name, "checks": checks, "kind": known}

    rows = [
        column("at", "timetz"),
        column("unused", "timetz[]"),
        column("hours", "time[]"),
        column("day", "date"),
        column("due", "date"),
        column("days", "date[]", CHECKED + " x"),
        column("paid", "date[]", "x", CHECKED),
        column("bits", "varbit"),
        # No record has its values, and that is told elsewhere.
        column("untold", "timetz[]", is_domain_inside=True),
    ]

    def run(query: str, *_: object) -> list[dict[str, Any]]:
        if query == COLUMNS:
            return rows
        assert query.endswith('FROM "public"."orders"')
        return [{"day": False, "due": True}]

    class Order(BaseModel):
        id: int
        at: str
        hours: list[int]
        day: date
        due: date
        days: list[date]
        paid: list[date]
        bits: str
        untold: list[str]

    order = {"order": EntityType("order", Order, "id")}
    inexact = list(inexact_in_postgres(run, ["public.orders"]))
    found = found_in(declared(), order, inexact)
    assert {each.outcome for each in found} == {"fail"}
    names = ["at", "hours", "days", "bits", "due"]
    assert [each.name for each in found] == [f"values of public.orders.{name}" for name in names]
    (statement,) = found[2].sql
    wanted = """ALTER TABLE "public"."orders" ADD CHECK (DATE '0001-01-01' <= ALL ("days"));"""
    assert statement == wanted
    assert "loses its own offset, so field at would have other values" in found[0].found
    without = replace(declared(), tables={"public.orders": Table(entity="order", drop=("at",))})
    assert len(found_in(without, order, inexact)) == 4


@pytest.mark.parametrize(
    ("mode", "types", "refused"),
    [
        ("STRICT_TRANS_TABLES", {}, ["due", "due_at"]),
        ("STRICT_TRANS_TABLES", {"due": "days", "DUE_AT": "us"}, []),
        ("STRICT_TRANS_TABLES,NO_ZERO_DATE,NO_ZERO_IN_DATE", {}, []),
        ("NO_ZERO_DATE,NO_ZERO_IN_DATE", {}, ["due", "due_at"]),
    ],
)
def test_a_date_of_no_calendar_that_would_arrive_as_null_is_refused_before(
    mode: str, types: dict[str, Any], refused: list[str]
) -> None:
    columns = [
        {**PLAIN, "name": "day", "type": "date"},
        {**PLAIN, "name": "due", "type": "date", "may_be_null": 1},
        {**PLAIN, "name": "due_at", "type": "datetime", "has_default": 1},
        {**PLAIN, "name": "made", "type": "datetime", "has_default": 1, "default_is_now": 1},
        {**PLAIN, "name": "weight", "type": "float", "may_be_null": 1},
        {**PLAIN, "name": "word", "type": "text", "may_be_null": 1},
    ]

    def run(query: str, *_: object) -> list[dict[str, Any]]:
        if "@@GLOBAL.sql_mode AS mode" in query:
            return [{"mode": mode}]
        if "information_schema" in query:
            return columns if "information_schema.columns" in query else []
        return [{"a": 0, "b": None, "c": 0, "d": 0}]

    class Order(BaseModel):
        id: int
        day: date
        due: date | None
        due_at: datetime | None
        made: datetime
        weight: float

    inexact = inexact_in_mariadb(run, ["shop.orders"])
    table = Table(entity="order", types=types)
    capture = Capture(name="shop", kind="mariadb", tables={"shop.orders": table})
    found = found_in(capture, {"order": EntityType("order", Order, "id")}, inexact)
    assert found[0].name == "values of shop.orders.weight"
    assert "snapshots round a float to six digits" in found[0].found
    assert [each.name for each in found[1:]] == [
        f"values of shop.orders.{name}" for name in refused
    ]
    for each in found[1:]:
        assert (each.outcome, len(each.sql)) == ("fail", 1)
        assert "as null or as the column's default" in each.found


@pytest.mark.parametrize(
    ("has_zero", "checks", "types", "reason"),
    [
        (0, [], {}, "no CHECK of the table keeps it out"),
        (0, ["`built` >= 1901"], {}, None),
        (None, ["`other` >= 1901", "`built` > 0"], {}, "no CHECK of the table keeps it out"),
        (0, [], {"built": int}, None),
        (1, ["`built` >= 1901"], {"built": int}, "a row has the year 0000"),
    ],
)
def test_a_year_0000_that_would_arrive_as_another_year_is_refused_before(
    has_zero: int | None, checks: list[str], types: dict[str, Any], reason: str | None
) -> None:
    def run(query: str, *_: object) -> list[dict[str, Any]]:
        if "check_constraints" in query:
            return [{"text": text} for text in checks]
        if "information_schema" in query:
            column = {**PLAIN, "name": "built", "type": "year"}
            return [column] if "information_schema.columns" in query else []
        return [{"has": has_zero}] if "max(" in query else [{"mode": "STRICT_TRANS_TABLES"}]

    class House(BaseModel):
        id: int
        built: int

    table = Table(entity="house", types=types)
    capture = Capture(name="shop", kind="mariadb", tables={"shop.houses": table})
    inexact = inexact_in_mariadb(run, ["shop.houses"])
    found = found_in(capture, {"house": EntityType("house", House, "id")}, inexact)
    told = " ".join(each.found for each in found)
    assert len(found) == (reason is not None)
    assert (reason or "") in told


def test_a_null_of_an_outbox_that_would_be_its_default_is_refused() -> None:
    outbox = Outbox(table="shop.outbox", aggregates={"order": Aggregate(entity="order")})
    capture = Capture(name="shop", kind="mariadb", outbox=outbox)
    payload: dict[str, Any] = {**PLAIN, "name": "payload", "may_be_null": 1, "has_default": 1}
    others = [{**payload, "name": "type", "may_be_null": 0}, {**payload, "has_default": 0}]

    def run(query: str, *_: object) -> list[dict[str, Any]]:
        return [payload, *others] if "information_schema.columns" in query else []

    inexact = inexact_in_outbox(run, "shop.outbox")
    (found,) = found_in(capture, {}, inexact)
    assert (found.name, found.outcome) == ("values of shop.outbox.payload", "fail")
    assert found.found == "a null in it would be read as its default"
    assert inexact_in_outbox(lambda *_: [], "shop.outbox") == []


def test_a_declarations_own_settings_win(tmp_path: Path) -> None:
    capture = declared(settings={"max.batch.size": "7"})
    assert settings(load(tmp_path), capture)["max.batch.size"] == "7"


def test_columns_are_left_out_and_tables_without_a_key_get_the_declared_one(
    tmp_path: Path,
) -> None:
    peculiar = Peculiarities({"public.a": {"b": "why"}, "public.c": {}}, {"public.t": ("x", "y")})
    made = settings(load(tmp_path), declared(), peculiar)
    assert made["column.exclude.list"] == r"public\.a\.b"
    assert made["message.key.columns"] == r"public\.t:x,y"
    assert settings(load(tmp_path), declared())["column.exclude.list"].endswith(r"\.none")
    own = declared(settings={"column.exclude.list": "public.a.secret"})
    made = settings(load(tmp_path), own, peculiar)
    assert made["column.exclude.list"] == r"public.a.secret,public\.a\.b"
    own = declared(settings={"column.include.list": "public.a.id"})
    assert "column.exclude.list" not in settings(load(tmp_path), own, peculiar)


def test_a_database_that_the_binlog_leaves_out_is_a_failure() -> None:
    told: dict[str, list[dict[str, Any]]] = {
        "SHOW GLOBAL VARIABLES": [{"Variable_name": "log_bin", "Value": "ON"}],
        "SELECT current_user": [{"name": "u@h"}],
        "SHOW GRANTS": [{"g": "GRANT ALL PRIVILEGES ON *.* TO `u`@`h`"}],
        "SELECT version": [{"v": "11-MariaDB"}],
        "SHOW MASTER STATUS": [{"Binlog_Do_DB": "", "Binlog_Ignore_DB": "other,shop"}],
        "SET character_set_results": [],
        "SHOW CREATE TABLE": [{"Create Table": ""}],
        "SELECT column_name": [{"name": "id", "place": 1, "is_keyed": 1}],
        "SELECT index_name": [{"name": "by_hash"}],
    }

    def rows(query: str, *_arguments: object) -> list[dict[str, Any]]:
        return next(answer for begin, answer in told.items() if query.startswith(begin))

    capture = Capture(name="shop", kind="mariadb", tables={"shop.orders": Table(entity="order")})
    own = OwnTables("shop.s")
    found = {each.name: each.outcome for each in MariaChecks(rows, capture, own).everything()}
    assert found["log of shop"] == "fail"
    assert found["key by_hash of shop.orders"] == "fail"
    told["SHOW MASTER STATUS"] = [{"Binlog_Do_DB": "shop", "Binlog_Ignore_DB": ""}]
    assert "log of shop" not in {each.name for each in MariaChecks(rows, capture, own).everything()}


@pytest.mark.parametrize(
    ("mode", "missing"),
    [
        ("STRICT_TRANS_TABLES,NO_ZERO_DATE,NO_ZERO_IN_DATE", None),
        ("STRICT_ALL_TABLES,NO_ZERO_IN_DATE", ",NO_ZERO_DATE"),
        ("", ",NO_ZERO_DATE,NO_ZERO_IN_DATE,STRICT_TRANS_TABLES"),
    ],
)
def test_a_server_that_takes_dates_of_no_calendar_is_found(mode: str, missing: str | None) -> None:
    told: dict[str, list[dict[str, Any]]] = {
        "SHOW GLOBAL VARIABLES": [{"Variable_name": "sql_mode", "Value": mode}],
        "SELECT current_user": [{"name": "u@h"}],
        "SHOW GRANTS": [],
        "SELECT version": [{"v": "11-MariaDB"}],
    }

    def rows(query: str, *_arguments: object) -> list[dict[str, Any]]:
        return next((answer for begin, answer in told.items() if query.startswith(begin)), [])

    capture = Capture(name="shop", kind="mariadb", tables={"shop.orders": Table(entity="order")})
    own = OwnTables("shop.s")
    (found,) = [f for f in MariaChecks(rows, capture, own).everything() if f.name == "sql_mode"]
    if missing is None:
        assert found.outcome == "ok"
    else:
        assert found.outcome == "warn"
        assert found.sql == (f"SET GLOBAL sql_mode = concat(@@GLOBAL.sql_mode, '{missing}');",)


def test_messages_that_carry_provenance_are_captured(tmp_path: Path) -> None:
    table = Table(entity="order", provenance=ProvenanceFrom(message_prefix="who"))
    capture = Capture(name="shop", kind="postgresql", tables={"public.orders": table})
    made = settings(load(tmp_path), capture)
    assert made["message.prefix.include.list"] == "who"
    assert "message.prefix.exclude.list" not in made


def test_security_of_the_brokers_reaches_the_schema_history(tmp_path: Path) -> None:
    options = {"security.protocol": "SSL", "offset.flush.interval.ms": "5"}
    config = load(tmp_path, capture={"worker_options": options})
    made = settings(config, declared("mariadb"))
    assert made["schema.history.internal.producer.security.protocol"] == "SSL"
    assert "schema.history.internal.producer.offset.flush.interval.ms" not in made


def test_addresses_are_read_with_their_password_apart() -> None:
    address, password = postgres_address("postgresql://u:p%40ss@db:6000/shop?sslmode=require")
    assert (address.host, address.port, address.user) == ("db", 6000, "u")
    assert (address.database, address.options, password) == ("shop", {"sslmode": "require"}, "p@ss")
    maria, secret = mariadb_address("mariadb://u:p%40ss@db/shop")
    assert (maria.port, maria.database, secret) == (3306, "shop", "p@ss")


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://u:hunter2@db/shop",
        "mariadb://u:a/hunter2@db/shop",
        "mariadb://u:a@b:2024/hunter2@db/shop",
        "mariadb://u:a[hunter2@db/shop",
        "mariadb://u:a#hunter2@db/shop",
        "mariadb://u@db:hunter2/shop",
        "mariadb://u:\u2100hunter2@db/shop",
        "mariadb://u:hunter2@db/shop?ssl=true",
        "mariadb://u:hunter2@db/shop?ssl-mode=required",
        "mariadb://u:hunter2@db/shop?ssl-mode=verify-full",
        "mariadb://u:hunter2@db/shop?ssl-mode=trust&ssl-ca=/etc/ca.pem",
    ],
)
def test_an_address_that_is_none_is_refused_without_its_password(dsn: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        mariadb_address(dsn)
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


def test_secrets_come_in_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_PASSWORD", "s3cret")
    assert expanded("postgresql://u:${SHOP_PASSWORD}@db/x", "dsn") == "postgresql://u:s3cret@db/x"
    assert expanded("mariadb://u:$SHOP_PASSWORD@db/x", "dsn") == "mariadb://u:s3cret@db/x"
    with pytest.raises(InvalidConfig, match="NOT_SET_ANYWHERE"):
        expanded("${NOT_SET_ANYWHERE}", "dsn")


def test_the_end_of_a_password_that_has_a_dollar_is_not_shown() -> None:
    with pytest.raises(InvalidConfig, match="%24") as caught:
        expanded("mariadb://u:pa$hunter2@db/x", "dsn of capture shop")
    assert "hunter2" not in str(caught.value)


def test_the_local_workers_secret_is_a_file_of_ours(tmp_path: Path) -> None:
    config = load(tmp_path)
    reference = password_reference(config, "shop", "pa\\s s", local=True)
    path = tmp_path / ".everstate" / "connect" / "secrets" / "shop.properties"
    assert reference == f"${{file:{path}:password}}"
    assert path.read_text() == "password=pa\\\\s\\ s\n"
    assert path.stat().st_mode & 0o077 == 0


def test_a_cluster_of_your_own_has_its_own_reference(tmp_path: Path) -> None:
    reference = "${file:/etc/secrets/{source}:password}"
    config = load(tmp_path, capture={"password_reference": reference})
    found = password_reference(config, "shop", "x", local=False)
    assert found == "${file:/etc/secrets/shop:password}"
    with pytest.raises(InvalidConfig, match="password_reference"):
        password_reference(load(tmp_path), "shop", "x", local=False)


def test_grants_are_read_by_scope() -> None:
    found = _grants(
        [
            "GRANT RELOAD, BINLOG MONITOR ON *.* TO `u`@`%` IDENTIFIED BY PASSWORD '*A'",
            "GRANT SELECT ON `shop`.`orders` TO `u`@`%`",
            "GRANT `some_role` TO `u`@`%`",
            "GRANT ALL PRIVILEGES ON `shop`.* TO `u`@`%`",
        ]
    )
    assert found == {
        "*.*": {"RELOAD", "BINLOG MONITOR"},
        "shop.orders": {"SELECT"},
        "shop.*": {"ALL PRIVILEGES"},
    }


def test_a_key_must_have_each_of_its_columns() -> None:
    assert key_values("shop", "t", ["a", "b"], {"b": "2", "a": "1"}) == ["1", "2"]
    assert key_values("shop", "t", ["a"], ["1"]) == ["1"]
    assert key_values("shop", "t", ["a"], ["a=1"]) == ["1"]
    assert key_values("shop", "t", ["a"], ["a=a=1"]) == ["a=1"]
    assert key_values("shop", "t", ["a"], ["b=1"]) == ["b=1"]
    assert key_values("shop", "t", ["a"], {"a": "a=1"}) == ["a=1"]
    for columns, key in (
        (["a", "b"], ["1"]),
        (["a"], {"b": "1"}),
        ([], ["1"]),
        (["a"], ["1", "2"]),
    ):
        with pytest.raises(InvalidCapture):
            key_values("shop", "t", columns, key)


def test_what_connect_says_of_a_failed_task_is_one_line() -> None:
    trace = "org.X: outer\n\tat a.b\nCaused by: org.Y: the reason\n\t... 3 more"
    told = {"connector": {"state": "RUNNING"}, "tasks": [{"state": "FAILED", "trace": trace}]}
    assert states_of(told, "shop") == ("RUNNING", "FAILED", "org.Y: the reason")
    paused = {"connector": {"state": "PAUSED"}, "tasks": []}
    assert states_of(paused, "shop") == ("PAUSED", None, None)


def test_delay_is_the_age_of_what_is_stored_as_done() -> None:
    assert age_s({"ts_usec": 99_000_000}, 100.0) == 1.0
    assert age_s({"ts_sec": 98}, 100.0) == 2.0
    assert age_s({}, 100.0) is None
    assert age_s({"ts_sec": 101}, 100.0) == 0.0, "clocks may differ"


def told(kind: str, state: str, *tables: str) -> Notification:
    return Notification("1", kind, state, tables, None, None, None, 0)


def test_a_first_snapshot_that_was_begun_twice_is_told_until_all_rows_are_read_again() -> None:
    begun = [told(INITIAL, "STARTED")]
    assert first_of(begun, 2).under_way
    done = [*begun, told(INITIAL, "COMPLETED")]
    assert (first_of(done, 2).under_way, first_of(done, 2).interrupted) == (False, False)
    twice = [*begun, *done]
    assert first_of(twice, 2).interrupted
    one = [told("Incremental Snapshot", "STARTED", "a"), told("Incremental Snapshot", "COMPLETED")]
    assert first_of([*twice, *one], 2).interrupted, "one table is not all"
    every = [told("Incremental Snapshot", "STARTED", "a", "b"), one[1]]
    assert not first_of([*twice, *every], 2).interrupted
    assert not first_of([*twice, *one], 1).interrupted, "the capture has one table"
    assert first_of([], 2).state is None
    for before in done, twice:
        anew = first_of([*before, *done], 2)
        assert (anew.state, anew.interrupted) == ("COMPLETED", False), "it has a slot of its own"
        assert first_of([*before, *twice], 2).interrupted


def scan(table: str, rows: int, status: str = "SUCCEEDED") -> Notification:
    return Notification("1", INITIAL, "TABLE_SCAN_COMPLETED", (), table, rows, status, 0)


def test_a_first_snapshot_is_empty_when_every_table_was_read_and_had_no_row() -> None:
    began, ended = told(INITIAL, "STARTED"), replace(told(INITIAL, "COMPLETED"), sent_ms=7)
    read = [began, scan("a", 0), scan("signals", 3), scan("b", 0, "EMPTY"), ended]
    assert ended_snapshots(read, ["a", "b"]) == [(7, True)]
    assert ended_snapshots([*read, *read], ["a", "b"]) == [(7, True)] * 2
    assert ended_snapshots([began, scan("a", 0), scan("b", 1), ended], ["a", "b"]) == [(7, False)]
    assert ended_snapshots([began, scan("a", 0), ended], ["a", "b"]) == [(7, False)], "b is unread"
    assert ended_snapshots([began, ended], ["a"]) == [(7, False)], "a capture without a snapshot"
    failed = [began, scan("a", 0, "SQL_EXCEPTION"), ended]
    assert ended_snapshots(failed, ["a"]) == [(7, False)]
    halted = [began, scan("a", 0), began, scan("b", 0), ended]
    assert ended_snapshots(halted, ["a", "b"]) == [(7, False)], "the first one was stopped"
    assert ended_snapshots([began, scan("a", 0)], ["a"]) == []


def test_the_oracle_of_raw_topics_sees_what_is_lost() -> None:
    created = {"op": "c", "before": None, "after": {"id": 1, "name": "a", "note": "long"}}
    updated = {"op": "u", "before": None, "after": {"id": 1, "name": "b", "note": UNAVAILABLE}}
    deleted = {"op": "d", "before": {"id": 1}, "after": None}
    rows: dict[str, dict[str, Any]] = {}
    fold(rows, created)
    fold(rows, updated)
    assert rows == {"1": {"id": 1, "name": "b", "note": "long"}}
    lost: dict[str, dict[str, Any]] = {}
    fold(lost, created)
    assert lost != rows
    fold(rows, deleted)
    assert rows == {}
