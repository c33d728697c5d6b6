"""What differs between MySQL and MariaDB, of both of which a binlog is captured."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import create_model

from everstate.changes import EntityType
from everstate.config import load
from everstate.declarations.captures import Capture, Convert, Table
from everstate.errors import InvalidConfig
from everstate.sources.cdc.connectors import OwnTables, TableShape, connector_settings
from everstate.sources.cdc.inexact import inexact_in_mariadb
from everstate.sources.cdc.mariadb import BinlogEvent
from everstate.sources.cdc.mariadb_checks import MariaChecks
from everstate.sources.cdc.mariadb_unseen import judged
from everstate.sources.cdc.mysql import MySqlChecks, MySqlDatabase, mysql_address
from everstate.sources.cdc.names import CaptureNames
from everstate.sources.cdc.refusing import shape_findings
from everstate.sources.cdc.replaced import Mark

SERVER = "3e11fa47-71ca-11e1-9e33-c80aa9429562"
TABLE = "shop.orders"
CAPTURE = Capture(
    name="shop", kind="mysql", dsn="mysql://u:p@h/shop", tables={TABLE: Table(entity="order")}
)
XID = "X'78',X'',1"


@pytest.mark.parametrize(
    ("options", "mode", "of_debezium"),
    [
        ("", "trust", "required"),
        ("?ssl-mode=trust", "trust", "required"),
        ("?ssl-mode=verify-ca&ssl-ca=/ca.pem", "verify-ca", "verify_ca"),
        ("?ssl-mode=verify-full&ssl-ca=/ca.pem", "verify-full", "verify_identity"),
    ],
)
def test_a_connection_to_mysql_is_always_encrypted(
    tmp_path: Any, options: str, mode: str, of_debezium: str
) -> None:
    address, password = mysql_address(f"mysql://u:p@h/shop{options}")
    assert (address.options["ssl-mode"], password) == (mode, "p")
    made = connector_settings(
        load(tmp_path), CAPTURE, CaptureNames("es", "shop"), address, OwnTables("shop.s"),
        password="x", brokers="b:1",
    )  # fmt: skip
    assert made["database.ssl.mode"] == of_debezium
    assert made["connector.class"] == "io.debezium.connector.mysql.MySqlConnector"
    with pytest.raises(InvalidConfig, match="ssl-mode"):
        mysql_address("mysql://u:p@h/shop?ssl-mode=disable")


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("", {}),
        (f"{SERVER}:1-5", {SERVER: 5}),
        (f"{SERVER}:1-3:7:9-11,\nb:2", {SERVER: 11, "b": 2}),
        (f"{SERVER}:1-3:tag:1-4", {SERVER: 4}),
    ],
)
def test_the_last_transaction_of_each_server_is_read_from_its_gtids(
    text: str, numbers: dict[str, int]
) -> None:
    found = {name: number for name, number in MySqlDatabase.sequences(text).items() if name}
    assert found == numbers


def prepared(*tables: str) -> list[tuple[str, str]]:
    """A prepared transaction, as SHOW BINLOG EVENTS of MySQL 9.7 has it."""
    mapped = [("Table_map", f"table_id: 18 ({table})") for table in tables]
    gtid = ("Gtid", f"SET @@SESSION.GTID_NEXT= '{SERVER}:11'")
    return [gtid, ("Query", f"XA START {XID}"), *mapped, ("Query", f"XA END {XID}"),
            ("XA_prepare", f"XA PREPARE {XID}")]  # fmt: skip


def ended(how: str) -> list[tuple[str, str]]:
    gtid = ("Gtid", f"SET @@SESSION.GTID_NEXT= '{SERVER}:12'")
    return [gtid, ("Query", f"XA {how} {XID}")]


def unseen(*told: tuple[str, str]) -> dict[str, str]:
    events = [BinlogEvent(f"b.1:{at}", *each, f"b.1:{at + 1}") for at, each in enumerate(told)]
    return judged(CAPTURE, Mark("m", looked_at="b.1:4"), "b.1:4", events).unseen


def test_an_xa_transaction_that_was_rolled_back_is_reported() -> None:
    assert unseen(*prepared(TABLE), *ended("COMMIT")) == {}
    assert unseen(*prepared("shop.other"), *ended("ROLLBACK")) == {}
    found = unseen(*prepared("shop.other", TABLE), *ended("ROLLBACK"))
    assert "an XA transaction was rolled back (b.1:" in found["all tables"]
    assert "`everstate cdc snapshot shop --new-epoch`" in found["all tables"]
    one_phase = [*prepared(TABLE)[:-1], ("XA_prepare", f"XA COMMIT {XID} ONE PHASE")]
    assert unseen(*one_phase) == {}


def test_an_update_of_a_part_of_json_is_reported() -> None:
    mapped = ("Table_map", f"table_id: 18 ({TABLE})"), ("Table_map", "table_id: 19 (shop.other)")
    rows = [("Update_rows_partial", f"table_id: {each} flags: STMT_END_F") for each in (19, 18)]
    assert unseen(*mapped, rows[0]) == {}
    assert "changed parts of JSON (b.1:3" in unseen(*mapped, *rows)[TABLE]


def test_rows_after_an_xa_transaction_are_none_of_it() -> None:
    """Without GTIDs each transaction begins with an event of another kind."""
    later = [("Anonymous_Gtid", ""), ("Query", "BEGIN"), ("Table_map", f"table_id: 18 ({TABLE})")]
    assert unseen(*prepared("shop.other"), *later, *ended("ROLLBACK")) == {}


def checked(version: str = "9.7.4", **settings: str) -> dict[str, Any]:
    """Outcome → the doctor's findings of a server with these variables."""
    told: dict[str, list[dict[str, Any]]] = {
        "SHOW GLOBAL VARIABLES": [{"Variable_name": n, "Value": v} for n, v in settings.items()],
        "SELECT current_user": [{"name": "u@h"}],
        "SHOW GRANTS": [{"g": "GRANT ALL PRIVILEGES ON *.* TO `u`@`h`"}],
        "SELECT version": [{"v": version}],
        "SHOW CREATE TABLE": [{"Create Table": "CONSTRAINT `c` FOREIGN KEY (`p`) REFERENCES `p` "
                                               "(`id`) ON DELETE CASCADE"}],
        "SELECT column_name": [{"name": "id", "place": 1, "is_keyed": 1}],
    }  # fmt: skip

    def rows(query: str, *_arguments: object) -> list[dict[str, Any]]:
        return next((answer for begin, answer in told.items() if query.startswith(begin)), [])

    checks = MySqlChecks(rows, CAPTURE, OwnTables("shop.s"))
    return {each.name: each.outcome for each in checks.everything()}


def test_settings_of_mysql_by_which_rows_would_be_lost_are_failures() -> None:
    good = {"binlog_row_value_options": "", "binlog_transaction_compression": "OFF"}
    assert {checked(**good)[name] for name in good} == {"ok"}
    for name, value in (
        ("binlog_row_value_options", "PARTIAL_JSON"),
        ("binlog_transaction_compression", "ON"),
        ("binlog_row_image", "MINIMAL"),
        ("binlog_format", "MIXED"),
    ):
        assert checked(**good | {name: value})[name] == "fail"
    assert checked()["version"] == "ok"
    assert checked("11.4.2-MariaDB")["version"] == "fail"


@pytest.mark.parametrize(
    ("settings", "is_told"),
    [({}, True), ({"innodb_native_foreign_keys": "ON"}, True),
     ({"innodb_native_foreign_keys": "OFF"}, False)],
)  # fmt: skip
def test_rows_that_a_foreign_key_changes_are_in_the_binlog_of_a_newer_mysql(
    settings: dict[str, str], is_told: bool
) -> None:
    assert (f"foreign keys of {TABLE}" in checked(**settings)) == is_told


@pytest.mark.parametrize(
    ("annotation", "types", "is_refused"),
    [
        (str, {}, True),
        (dict[str, int], {}, False),
        (list[int], {}, False),
        (str, {"doc": "json"}, False),
    ],
)
def test_a_field_with_the_text_of_json_is_refused(
    annotation: Any, types: dict[str, Convert], is_refused: bool
) -> None:
    made = create_model("Order", id=(int, ...), doc=(annotation, ...))
    table = Table(entity="order", types=types)
    capture = Capture(name="shop", kind="mysql", tables={TABLE: table})
    columns = tuple(MySqlDatabase.column(*each) for each in (("id", "int"), ("doc", "json")))
    shapes = {TABLE: TableShape(columns, ("id",))}
    entities = {"order": EntityType("order", made, "id")}
    found = [each.found for each in shape_findings(capture, entities, shapes, {})]
    assert bool(found) == is_refused
    assert not found or "another text than a snapshot has" in found[0]


def test_a_check_in_the_form_of_mysql_keeps_a_year_0000_out() -> None:
    def run(query: str, *_: object) -> list[dict[str, Any]]:
        if "check_constraints" in query:
            assert query == MySqlChecks.kept_out != MariaChecks.kept_out
            return [{"text": "(`built` >= 1901)"}]
        if "information_schema" in query:
            column = {"name": "built", "type": "year", "may_be_null": 0, "has_default": 0}
            return [column] if "information_schema.columns" in query else []
        return [{"has": 0}] if "max(" in query else [{"mode": "STRICT_TRANS_TABLES"}]

    assert list(inexact_in_mariadb(run, [TABLE], MySqlChecks.kept_out)) == []
