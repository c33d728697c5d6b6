"""Captures without servers: names, settings of connectors, addresses, grants, states."""

from __future__ import annotations

import re
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from capture_cases import UNAVAILABLE, fold
from everstate.config import Config, expanded, load
from everstate.declarations.captures import Capture, DatabaseKind, ProvenanceFrom, Table
from everstate.errors import InvalidCapture, InvalidConfig
from everstate.sources.cdc.connectors import (
    Address,
    OwnTables,
    Peculiarities,
    connector_settings,
    writes_one_log,
)
from everstate.sources.cdc.database import key_values
from everstate.sources.cdc.mariadb import mariadb_address
from everstate.sources.cdc.mariadb_checks import _grants, checks
from everstate.sources.cdc.names import CaptureNames, former_topics, names_of
from everstate.sources.cdc.notifications import (
    INITIAL,
    Notification,
    ended_snapshots,
    first_of,
)
from everstate.sources.cdc.postgres import postgres_address
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
        names_of("p", capture),
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


def test_everything_goes_to_one_raw_log_and_what_is_no_row_says_so(tmp_path: Path) -> None:
    capture = declared()
    names = names_of("p", capture)
    assert names.raw_log == "p.raw.shop"
    made = settings(load(tmp_path), capture)
    assert made["transforms"].split(",")[-1] == "one"
    assert writes_one_log(made, names)
    assert not writes_one_log({"transforms.short.replacement": "p.raw.shop.$1"}, names)
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
    former = former_topics(names, capture)
    assert former == [
        "p.raw.shop.orders", "p.raw.shop.transaction", "p.raw.shop.message",
        "p.capture.heartbeats.p.raw.shop",
    ]  # fmt: skip


def test_settings_of_a_connector_hold_no_password(tmp_path: Path) -> None:
    made = settings(load(tmp_path), declared())
    assert made["database.password"] == "${file:x:password}"
    assert made["table.include.list"] == r"public\.orders"
    assert made["message.prefix.exclude.list"] == ".*"
    assert made["publication.autocreate.mode"] == "disabled"
    assert made["heartbeat.action.query"] == "BEAT"


def test_a_declarations_own_settings_win(tmp_path: Path) -> None:
    capture = declared(settings={"max.batch.size": "7"})
    assert settings(load(tmp_path), capture)["max.batch.size"] == "7"


def test_generated_columns_are_left_out_and_tables_without_a_key_get_the_declared_one(
    tmp_path: Path,
) -> None:
    peculiar = Peculiarities({"public.a": ("b",), "public.c": ()}, {"public.t": ("x", "y")})
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
        "SHOW CREATE TABLE": [{"Create Table": ""}],
        "SELECT sum(column_key": [{"keyed": 1}],
        "SELECT column_name": [{"name": "id"}],
    }

    def rows(query: str, *_arguments: object) -> list[dict[str, Any]]:
        return next(answer for begin, answer in told.items() if query.startswith(begin))

    capture = Capture(name="shop", kind="mariadb", tables={"shop.orders": Table(entity="order")})
    found = {each.name: each.outcome for each in checks(rows, capture, OwnTables("shop.s"))}
    assert found["log of shop"] == "fail"
    told["SHOW MASTER STATUS"] = [{"Binlog_Do_DB": "shop", "Binlog_Ignore_DB": ""}]
    assert "log of shop" not in {each.name for each in checks(rows, capture, OwnTables("shop.s"))}


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
        expanded("$NOT_SET_ANYWHERE", "dsn")


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
    assert states_of(told) == ("RUNNING", "FAILED", "org.Y: the reason")
    assert states_of({"connector": {"state": "PAUSED"}, "tasks": []}) == ("PAUSED", None, None)


def test_delay_is_the_age_of_what_is_stored_as_done() -> None:
    assert age_s({"ts_usec": 99_000_000}, 100.0) == 1.0
    assert age_s({"ts_sec": 98}, 100.0) == 2.0
    assert age_s({}, 100.0) is None
    assert age_s({"ts_sec": 101}, 100.0) == 0.0, "clocks may differ"


def told(kind: str, state: str, *tables: str) -> Notification:
    return Notification("1", kind, state, tables, None, None, None, None, 0, 0)


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


def scan(table: str, rows: int, status: str = "SUCCEEDED") -> Notification:
    return Notification("1", INITIAL, "TABLE_SCAN_COMPLETED", (), table, rows, None, status, 0, 0)


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
