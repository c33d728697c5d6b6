"""Rules of cleaning, one by one: mapping, translations, transactions, parents, provenance."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field

from clean_cases import CONFIG, UNAVAILABLE, Made, Numbered, Person
from everstate.app import App
from everstate.changes import EntityType
from everstate.declarations.captures import Capture, ProvenanceFrom, Table, Translation
from everstate.errors import HeldOverflow, InvalidCapture, UnknownCapture
from everstate.sources.cdc.balance import NumberedBatch
from everstate.sources.cdc.columns import Rows
from everstate.sources.cdc.completion import WAITS_CODE, WAITS_PARENT
from everstate.sources.cdc.composing import RawPlace
from everstate.sources.cdc.gone import AbsentRows
from everstate.sources.cdc.holding import HeldEntity
from everstate.sources.cdc.mapping import CleanRow
from everstate.sources.cdc.reading import (
    RawFact,
    RawReader,
    RefusedRow,
    SourceIdentity,
)
from everstate.sources.cdc.rows import HEARTBEAT, SCHEMA, TRANSACTION, TransactionProvenance
from everstate.sources.cdc.states import States


class Customer(BaseModel):
    customer_id: int
    name: str


class Status(BaseModel):
    code: str
    name: str


class Order(BaseModel):
    order_key: str
    customer_id: int
    status: str | None
    price: Annotated[Decimal, Field(max_digits=12, decimal_places=2)]
    placed_at: datetime
    due: date
    tags: list[str] = []
    total: int | None = None


ENTITIES = {
    "person": EntityType("person", Person, "id"),
    "customer": EntityType("customer", Customer, "customer_id"),
    "status": EntityType("status", Status, "code"),
    "order": EntityType("order", Order, "order_key"),
}


def order_key(state: Any) -> str:
    return f"{state['region']}-{state['number']}"


def double(state: Any) -> int:
    return int(state["customer_id"]) * 2


ORDERS = Table(
    entity="order",
    key_columns=("REGION", "NUMBER"),
    columns={"CUST": "customer_id", "STATUS_CODE": "status"},
    translations={"STATUS_CODE": Translation(entity="status", field="name")},
    computed={"order_key": order_key, "total": double},
    parents={"customer_id": "customer"},
    drop=("SECRET",),
    types={"PLACED_AT": "ms"},
    provenance=ProvenanceFrom(columns={"actor": "CHANGED_BY"}, message_prefix="everstate"),
)
TABLES = {
    "s.customers": Table(entity="customer"),
    "s.statuses": Table(entity="status"),
    "s.orders": ORDERS,
}


def capture(**options: Any) -> Capture:
    settings = {"kind": "mariadb", "tables": TABLES, "parents_first": True, **options}
    return Capture(name="shop", **settings)


class Rig(Numbered):
    """Rows of a shop's tables, each numbered as cleaning has it done."""

    def __init__(self, **options: Any) -> None:
        super().__init__(RawReader(capture(**options), ENTITIES), CONFIG)

    def row(self, table: str, op: str, after: Any, before: Any = None, **more: Any) -> Rows:
        key = after or before
        names = {"customers": ["CUSTOMER_ID"], "statuses": ["CODE"], "people": ["ID"]}.get(table)
        names = names or ["REGION", "NUMBER"]
        message = {"op": op, "after": after, "before": before, "source": {}, **more}
        encoded = json.dumps({name: key[name] for name in names}).encode()
        return self.read((table, encoded, json.dumps(message).encode()))

    def take(self, *rows: Rows, now_s: float = 0.0, **options: Any) -> NumberedBatch:
        """One batch of all these rows; :attr:`changes` has what it made, and no more."""
        whole = Rows.none()
        for one in rows:
            whole.extend(one)
        self.changes = []
        return self.run(whole, now_s, **options)

    def made(self, *rows: Rows, now_s: float = 0.0, **options: Any) -> list[Made]:
        """The changes of one batch of all these rows."""
        self.take(*rows, now_s=now_s, **options)
        return self.changes

    @property
    def states(self) -> list[Any]:
        return [json.loads(one.current or b"null") for one in self.changes]

    def read_one(self, name: str, key: bytes | None, value: bytes, *headers: Any) -> Any:
        """What one record says."""
        (found,) = self.reader.read(name, key, value, *headers)
        return found


ORDER = {
    "REGION": "eu", "NUMBER": 7, "CUST": 5, "STATUS_CODE": "P", "PRICE": "1.50", "SECRET": "x",
    "PLACED_AT": 1_357_000_000_000, "DUE": 15706, "TAGS": '["a","b"]', "CHANGED_BY": "ann",
}  # fmt: skip


def test_columns_become_fields_and_codes_names_and_what_is_dropped_is_nowhere() -> None:
    rig = Rig(parents_first=False)
    paid = rig.row("statuses", "c", {"CODE": "P", "NAME": "paid"})
    order = rig.row("orders", "c", ORDER)
    rig.take(paid, order)
    assert rig.states[1] == {
        "order_key": "eu-7", "customer_id": 5, "status": "paid", "price": "1.50",
        "placed_at": "2013-01-01T00:26:40Z", "due": "2013-01-01", "tags": ["a", "b"], "total": 10,
    }  # fmt: skip
    said = rig.changes[1].value
    assert "SECRET" not in json.dumps(said)
    assert said["provenance"]["actor"] == "ann"


def test_a_code_without_a_name_waits_for_it_and_goes_as_it_is_when_it_is_late() -> None:
    rig = Rig(parents_first=False)
    assert rig.made(rig.row("orders", "c", ORDER)) == []
    assert rig.held["order", "eu-7"].reason == WAITS_CODE
    batch = rig.take(rig.row("statuses", "c", {"CODE": "P", "NAME": "paid"}))
    assert [one.entity for one in rig.changes] == ["status", "order"]
    assert not rig.held
    late = Rig(parents_first=False)
    late.take(late.row("orders", "c", ORDER))
    batch = late.take(now_s=31.0)
    assert (late.states[0]["status"], batch.overdue) == ("P", 1)


def test_two_messages_of_canal_with_one_id_are_two_changes() -> None:
    table = Table(entity="person", key_columns=("id",))
    declared = Capture(
        name="shop", kind="other", form="canal", tables={"s.people": table}, transactions=False
    )
    records = []
    for kind, boss in (("INSERT", 1), ("UPDATE", 2), ("UPDATE", 3)):
        row = {"id": 7, "boss_id": boss}
        message = {"id": 5, "es": 9_000, "table": "people", "type": kind, "data": [row]}
        records.append(("people", None, json.dumps(message).encode()))
    rig = Numbered(RawReader(declared, ENTITIES), CONFIG)
    rig.run(rig.read(*records))
    assert [one.value["currentEntityState"]["boss_id"] for one in rig.changes] == [1, 2, 3]
    assert len({one.value["id"] for one in rig.changes}) == 3


def test_two_rows_of_one_message_with_one_key_are_two_changes_with_ids_of_their_own() -> None:
    def ids(*bosses: int) -> list[str]:
        """Ids of the changes of one message of Canal with these rows of one key."""
        table = Table(entity="person", key_columns=("id",))
        declared = Capture(name="shop", kind="other", form="canal", tables={"s.people": table})
        rows = [{"id": 7, "boss_id": boss} for boss in bosses]
        rows.insert(1, {"id": 8, "boss_id": 1})
        message = {"es": 9_000, "table": "people", "type": "UPDATE", "data": rows}
        rig = Numbered(RawReader(declared, ENTITIES), CONFIG)
        rig.run(rig.read(("people", None, json.dumps(message).encode())))
        assert [one.version for one in rig.changes if one.key == "7"] == [*range(1, len(rows))]
        return [one.value["id"] for one in rig.changes]

    one, three = ids(1), ids(1, 2, 3)
    assert len(set(three)) == 4
    assert three[:2] == one, "as it was without the others"
    assert ids(1, 2, 3) == three


@pytest.mark.parametrize("name", ["people", ""])
def test_a_header_named_kind_of_somebody_else_means_nothing(name: str) -> None:
    dsn = None if name else "postgresql://u@h/s"
    tables = {"s.people": Table(entity="person", key_columns=("id",))}
    rig = Rig(kind="postgresql", tables=tables, dsn=dsn, parents_first=False)
    source = {"connector": "postgresql", "lsn": 5, "schema": "s", "table": "people"}
    row = {"op": "c", "after": {"id": 1, "boss_id": 2}, "source": source}
    body = json.dumps(row).encode()
    found = rig.read_one(name, b'{"id":1}', body, (b"person", None))
    assert isinstance(found, CleanRow)
    if name:
        for kind in (TRANSACTION, SCHEMA, b""):
            assert rig.read_one(name, b'{"id":1}', body, (kind, None)) == found
    else:
        assert rig.reader.read(name, None, b"{}", (HEARTBEAT, None)) == []


def test_a_fixed_translation_refuses_a_code_that_it_does_not_know() -> None:
    tables = {"s.customers": Table(entity="customer", translations={"NAME": {"A": "Ann"}})}
    rig = Rig(tables=tables)
    known = rig.row("customers", "c", {"CUSTOMER_ID": 1, "NAME": "A"})
    assert next(json.loads(one.current or b"null") for one in rig.made(known))["name"] == "Ann"
    (refused,) = rig.take(rig.row("customers", "c", {"CUSTOMER_ID": 2, "NAME": "B"})).refused
    assert refused.reason == "name: code 'B' has no name in the translation"


def test_a_child_waits_for_its_parent_over_batches_and_goes_behind_it() -> None:
    rig = Rig()
    rig.take(rig.row("statuses", "c", {"CODE": "P", "NAME": "paid"}))
    assert rig.made(rig.row("orders", "c", ORDER)) == []
    held = rig.held["order", "eu-7"]
    assert (held.reason, held.waits_for) == (WAITS_PARENT, ("customer", "5"))
    assert HeldEntity.decode(held.encode()).encode() == held.encode()
    later = rig.row("orders", "u", {**ORDER, "PRICE": "2.00"})
    assert rig.made(later) == []
    rig.take(rig.row("customers", "c", {"CUSTOMER_ID": 5, "NAME": "Ann"}))
    told = [(one.entity, one.version) for one in rig.changes]
    assert told == [("customer", 1), ("order", 1), ("order", 2)]
    assert not rig.held


def test_a_child_whose_parent_does_not_come_goes_when_its_time_is_up() -> None:
    rig = Rig()
    rig.take(rig.row("statuses", "c", {"CODE": "P", "NAME": "paid"}))
    rig.take(rig.row("orders", "c", ORDER), now_s=0.0)
    assert rig.made(now_s=29.0) == []
    batch = rig.take(now_s=31.0)
    assert ([one.entity for one in rig.changes], batch.overdue) == (["order"], 1)


def test_rows_of_a_snapshot_do_not_wait_for_parents() -> None:
    rig = Rig()
    rig.take(rig.row("statuses", "c", {"CODE": "P", "NAME": "paid"}))
    assert len(rig.made(rig.row("orders", "r", ORDER))) == 1


def test_of_more_rows_than_may_wait_for_parents_the_oldest_go_on() -> None:
    rig = Rig()
    rig.take(rig.row("statuses", "c", {"CODE": "P", "NAME": "paid"}))
    rows = [rig.row("orders", "c", {**ORDER, "NUMBER": n}) for n in range(5)]
    batch = rig.take(*rows, held_max=3)
    assert [one.key for one in rig.changes] == ["eu-0", "eu-1"]
    assert (batch.overdue, len(rig.held)) == (2, 3)


def test_more_rows_of_unknown_state_than_may_wait_stop_the_capture() -> None:
    rig = Rig(parents_first=False)
    told = {**ORDER, "TAGS": UNAVAILABLE}
    rows = [rig.row("orders", "u", {**told, "NUMBER": n}) for n in range(4)]
    with pytest.raises(HeldOverflow, match="4 changes wait because the state before is unknown"):
        rig.take(*rows, held_max=3)


def people() -> Rig:
    """Persons who wait for their boss."""
    return Rig(tables={"s.people": Table(entity="person", parents={"boss_id": "person"})})


def told(rig: Rig, *persons: tuple[int, int]) -> list[int]:
    """Whom one batch with a new row of each person and boss publishes, in order."""
    rows = [rig.row("people", "c", {"ID": person, "BOSS_ID": boss}) for person, boss in persons]
    return [int(one.key) for one in rig.made(*rows)]


def test_a_tree_that_comes_leaves_first_goes_on_however_deep_it_is() -> None:
    rig = people()
    assert told(rig, *((n, n - 1) for n in range(3000, 1, -1))) == []
    assert len(rig.held) == 2999
    assert told(rig, (1, 1)) == [*range(1, 3001)]
    assert not rig.held


def test_those_who_waited_for_one_come_directly_behind_and_in_the_order_of_their_keys() -> None:
    rig = people()
    assert told(rig, (7, 4), (5, 4), (6, 5), (4, 2), (3, 2)) == []
    assert told(rig, (2, 1), (8, 8)) == [8]
    assert told(rig, (1, 1)) == [1, 2, 3, 4, 5, 6, 7]


def test_rows_above_which_there_is_a_cycle_go_on_with_it() -> None:
    rig = people()
    assert told(rig, (3, 2), (2, 1)) == []
    assert told(rig, (1, 3)) == [1, 2, 3]
    assert not rig.held


def test_a_truncation_deletes_what_is_known_and_older_where_that_is_declared() -> None:
    tables = {"s.customers": Table(entity="customer", truncate="delete")}
    rig = Rig(tables=tables)
    for number in (1, 2):
        row = {"CUSTOMER_ID": number, "NAME": "a"}
        place = {"file": "b.1", "pos": number * 10}
        rig.take(rig.row("customers", "c", row, source=place))
    said = json.dumps({"op": "t", "source": {"file": "b.1", "pos": 15}}).encode()
    batch = rig.take(rig.read(("customers", None, said)))
    assert [(one.key, one.kind) for one in rig.changes] == [("1", "deleted")]
    assert (batch.read.total(), batch.added.total()) == (1, 1), "one record was read"


@pytest.mark.parametrize("dsn", [None, "mariadb://u@h/s"])
def test_a_truncation_that_is_refused_says_what_deletes_the_entities(dsn: str | None) -> None:
    rig = Rig(dsn=dsn)
    said = json.dumps({"op": "t", "source": {"db": "s", "table": "customers"}}).encode()
    refused, *told = rig.reader.read("" if dsn else "customers", None, said)
    assert isinstance(refused, RefusedRow)
    assert [one.tables for one in told if isinstance(one, SourceIdentity)] == (
        [{"s.customers": None}] if dsn else []
    )
    assert "with truncate='delete' of its Table the next TRUNCATE deletes them" in refused.reason
    assert ("`everstate cdc snapshot shop --new-epoch`" in refused.reason) == (dsn is not None)
    shared = RawReader(
        capture(tables={t: Table(entity="customer") for t in ("s.a", "s.b")}), ENTITIES
    )
    (refused,) = shared.read("a", None, said)
    assert isinstance(refused, RefusedRow)
    assert "truncate=" not in refused.reason
    assert "since s.b has the same entity type 'customer': use DELETE" in refused.reason


def test_a_restored_database_is_a_new_epoch_whose_places_are_newer() -> None:
    rig = Rig()
    old = rig.row(
        "customers", "c", {"CUSTOMER_ID": 1, "NAME": "a"}, source={"file": "b.9", "pos": 900}
    )
    assert len(rig.made(old)) == 1
    restarted = {"source": {"file": "b.1", "pos": 4}}
    new = {"CUSTOMER_ID": 1, "NAME": "b"}
    assert rig.made(rig.row("customers", "u", new, **restarted)) == []
    assert len(rig.made(rig.row("customers", "u", new, **restarted), epoch=2)) == 1


def test_what_a_first_snapshot_that_is_taken_again_changes_says_why() -> None:
    rig = Rig(tables={"s.customers": Table(entity="customer")})
    rows = [{"CUSTOMER_ID": number, "NAME": "a"} for number in (1, 2)]
    rig.take(*(rig.row("customers", "c", row, source={"file": "b.9", "pos": 9}) for row in rows))
    renamed = rig.row("customers", "r", rows[0] | {"NAME": "b"}, source={"file": "b.1", "pos": 4})
    (again,) = rig.made(renamed, epoch=2)
    assert again.value["provenance"]["reason"] == "a snapshot read the row again"
    there = {"customer": {"1"}}
    place = RawPlace("raw", 0, 9)
    absent = AbsentRows({"s.customers": "customer"}, there, b'{"binlog":[1,4,0]}', place, 5)
    rig.composer.begin(0.0)
    assert rig.numbering is not None
    assert rig.numbering.delete_absent(absent, States(rig.copy), 0.0).changes == 1
    (deleted,) = {one.value: Made.of(one) for one in rig.composer.records()}.values()
    assert (deleted.key, deleted.kind) == ("2", "deleted")
    assert "a first snapshot that was taken again" in deleted.value["provenance"]["reason"]
    assert rig.composer.with_provenance == 0, "none of it says who wrote the row"


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("k" * 2049, "key id: it has 2,049 bytes, and 2,048 are the most that can be kept"),
        ("..", "key id: '.' and '..' cannot be part of a URL"),
        ("a\x00b", "key id: NUL characters are refused"),
    ],
)
def test_a_key_that_no_view_holds_or_no_address_names_is_refused(key: str, reason: str) -> None:
    """As by the other ways in: a change of it could be published, and never be read."""

    def read(op: str, now: str, before: str | None = None) -> list[Any]:
        body = {"op": op, "source": {"connector": "postgresql"}}
        body |= {"before" if op == "d" else "after": {"id": now}}
        headers = (None, None if before is None else json.dumps({"id": before}).encode())
        name, value = json.dumps({"id": now}).encode(), json.dumps(body).encode()
        return reader.read("labels", name, value, headers)

    labels = Capture(
        name="shop", kind="postgresql", tables={"public.labels": Table(entity="label")}
    )
    reader = RawReader(labels, {"label": EntityType("label", _Label, "id")})
    assert [type(each) for each in read("c", "k" * 2048)] == [CleanRow]
    for op in ("c", "d"):
        (refused,) = read(op, key)
        assert isinstance(refused, RefusedRow)
        assert (refused.reason, refused.key) == (reason, None)
    # It gets a key that will do: nothing was ever published under the old one.
    (moved,) = read("c", "good", before=key)
    assert isinstance(moved, CleanRow)
    assert (moved.key, moved.moved_from) == ("good", None)


class _Label(BaseModel):
    id: str


def test_a_row_whose_key_changed_waits_for_the_end_of_its_old_one() -> None:
    rig = Rig(tables={"s.customers": Table(entity="customer")}, kind="postgresql")
    rows = [{"CUSTOMER_ID": 1, "NAME": name} for name in ("old", "new")]
    rig.take(rig.row("customers", "c", rows[0], source={"lsn": 10}))
    after = {"CUSTOMER_ID": 2, "NAME": "__debezium_unavailable_value"}
    body = json.dumps({"op": "c", "after": after, "source": {"lsn": 30}}).encode()
    headers = (None, b'{"CUSTOMER_ID":1}')
    moved = rig.read(("customers", b'{"CUSTOMER_ID":2}', body), headers=headers)
    assert rig.made(moved) == []
    rig.take(rig.row("customers", "u", rows[1], source={"lsn": 20}))
    rig.take(rig.row("customers", "d", None, rows[1], source={"lsn": 30}))
    assert rig.states == [None, {"customer_id": 2, "name": "new"}]
    assert not rig.held


def test_provenance_messages_have_snake_or_camel_case() -> None:
    reader = RawReader(capture(), ENTITIES)
    content = b64encode(b'{"serviceName":"a","actor":"b"}').decode()
    body = {
        "op": "m", "source": {"txId": 9},
        "message": {"prefix": "everstate", "content": content},
    }  # fmt: skip
    (noted,) = reader.read("", None, json.dumps(body).encode(), (b"message", None))
    assert noted == TransactionProvenance(
        transaction="9", prefix="everstate", fields={"service_name": "a", "actor": "b"}
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tables": {}}, "no table"),
        ({"tables": {"a.t": Table(entity="customer"), "b.t": Table(entity="order")}}, "one raw"),
        ({"tables": {"a.held": Table(entity="customer")}}, "topic of its own"),
        ({"tables": {"a.t": Table(entity="guest")}}, "not registered"),
        (
            {"tables": {"a.t": Table(entity="customer", key_columns=("x",), drop=("x",))}},
            "is dropped",
        ),
        ({"tables": {"a.t": Table(entity="customer", columns={"x": "y"})}}, "no field 'y'"),
        ({"tables": {"a.t": Table(entity="customer", parents={"name": "order"})}}, "of this cap"),
        ({"tables": {"a.t": ORDERS}, "transactions": False}, "needs transactions"),
        (
            {
                "tables": {
                    "a.t": Table(entity="customer", truncate="delete"),
                    "a.u": Table(entity="customer"),
                }
            },
            "would also delete those of a.u",
        ),
    ],
)
def test_a_declaration_that_does_not_fit_is_refused(change: Any, reason: str) -> None:
    app = App("shop")
    app.entity("customer", key="customer_id", source="capture")(Customer)
    app.entity("order", key="order_key", source="capture")(Order)
    with pytest.raises(InvalidCapture, match=reason):
        app.capture("shop", kind="postgresql", **change)


def test_an_entity_type_has_one_capture_and_a_capture_its_name() -> None:
    app = App("shop")
    app.entity("customer", key="customer_id", source="capture")(Customer)
    made = app.capture("a", kind="mariadb", tables={"s.customers": Table(entity="customer")})
    assert app.capture_of("a") is made
    with pytest.raises(InvalidCapture, match="another capture"):
        app.capture("b", kind="mariadb", tables={"s.customers": Table(entity="customer")})
    with pytest.raises(UnknownCapture):
        app.capture_of("b")
    app.entity("status", key="code")(Status)
    with pytest.raises(InvalidCapture, match="source of truth of status is 'store'"):
        app.capture("b", kind="mariadb", tables={"s.statuses": Table(entity="status")})


@pytest.mark.parametrize(
    ("ddl", "known", "said"),
    [
        ("RENAME TABLE fresh TO customers", (), ["s.customers"]),
        ("rename table `s`.`a b` to `s` . `customers`", (), ["s.customers"]),
        ("RENAME TABLE customers TO older, fresh TO customers", ("older",), ["s.customers"]),
        ("RENAME TABLE fresh TO customers", ("customers",), []),
        ("RENAME TABLE fresh TO other", (), []),
        ("RENAME TABLE s.fresh TO t.customers", (), []),
        ("ALTER TABLE customers ADD COLUMN rename_to int", ("customers",), []),
    ],
)
def test_rows_of_a_table_that_the_connector_does_not_know_are_not_read(
    ddl: str, known: Sequence[str], said: list[str]
) -> None:
    rig = Rig(dsn="mariadb://u@h/s")
    # As Debezium's raw log has a column that is no ENUM.
    column = {"name": "k", "typeName": "INT", "position": 1, "charsetName": None}
    table = {"columns": [{**column, "length": None, "scale": None, "enumValues": None}]}
    changes = [{"type": "ALTER", "id": f'"s"."{name}"', "table": table} for name in known]
    source = {"connector": "mariadb", "db": "s", "snapshot": "false", "file": "b.1"}
    value = {"source": source, "ddl": ddl, "tableChanges": changes}
    found = rig.reader.read("", None, json.dumps(value).encode(), (SCHEMA, None))
    assert [each.name for each in found if isinstance(each, RawFact)] == said
