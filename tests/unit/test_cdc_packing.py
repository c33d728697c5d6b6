"""Rows that go from task to driver, and into the held topic, keep whole numbers of any length."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field

from clean_cases import CONFIG, ITEM, Cleaner, Database, Numbered, capture_of
from everstate.changes import EntityType
from everstate.declarations.captures import Capture, Table
from everstate.sources.cdc.columns import REFUSED, Rows, Slices, decode_refusal
from everstate.sources.cdc.holding import HeldEntity
from everstate.sources.cdc.mapping import CleanRow
from everstate.sources.cdc.packing import packed, unpacker
from everstate.sources.cdc.reading import RawReader

WIDE = 12_345_678_901_234_567_890_123


class Account(BaseModel):
    id: int
    balance: Annotated[Decimal, Field(max_digits=38, decimal_places=0)]
    note: str | None = None


def test_a_row_of_changed_columns_has_a_number_of_more_than_64_bits() -> None:
    capture = Capture(
        name="bank", kind="mysql", form="canal", tables={"s.a": Table(entity="account")}
    )
    reader = RawReader(capture, {"account": EntityType("account", Account, "id")})
    (topic,) = capture.by_topic()
    numbered = Numbered(reader, CONFIG)

    def message(kind: str, place: int, data: dict[str, Any], old: Any = None) -> bytes:
        value = {"id": place, "database": "s", "table": "a", "type": kind, "isDdl": False}
        value |= {"pkNames": ["id"], "es": place, "data": [data], "old": old}
        return json.dumps(value).encode()

    new = {"id": 1, "balance": 5, "note": "a"}
    records = [
        (topic, None, message("INSERT", 1, new)),
        (topic, None, message("UPDATE", 2, {"id": 1, "balance": WIDE}, [{"balance": 5}])),
    ]
    numbered.run(numbered.read(*records))
    assert not numbered.batches[-1].refused, numbered.batches[-1].refused
    states = [json.loads(one.current or b"") for one in numbered.changes]
    assert [Decimal(one["balance"]) for one in states] == [5, WIDE]


def test_a_held_row_keeps_all_digits_within_documents_too() -> None:
    known = {"balance": -WIDE, "more": {"list": [1, WIDE, 1.5, b"x"]}, "small": 2**64 - 1}
    row = CleanRow(table="s.a", op="u", key="1", columns={"id": WIDE}, known=known)
    assert unpacker(CleanRow)(packed(row)) == row
    held = HeldEntity("s.a", "account", "1", {"id": 1}, "a reason", 0.0, [row])
    assert HeldEntity.decode(held.encode()).rows == [row]


def test_an_entry_of_a_deleted_entity_of_938d90e_ends_with_the_next_row_of_its_key() -> None:
    cleaner = Cleaner(capture_of("debezium"))
    reason = "deleted while its state was uncertain"
    held = HeldEntity("public.item", "item", "1", {"id": 1}, reason, 0.0, is_unsure=True)
    cleaner.held["item", "1"] = HeldEntity.decode(held.encode())
    database = Database("debezium, full")
    database.write(1, {"name": "a"})
    cleaner.take(database.log)
    assert [one.kind for one in cleaner.changes] == ["created"]
    assert cleaner.held == {}


@pytest.mark.parametrize(
    ("block", "said"),
    [({"lsn": 2**65}, "its position in the log has the number"), ({"ts_us": 2**80}, "its time is")],
)
def test_a_position_or_a_time_that_nothing_can_hold_is_one_refused_record(
    block: dict[str, int], said: str
) -> None:
    reader = RawReader(capture_of("debezium"), {"item": ITEM})
    source = {"connector": "postgresql", "snapshot": "true", "lsn": 7, "ts_us": 1, **block}
    source |= {"schema": "public", "table": "item"}
    value = {"op": "r", "source": source, "after": {"id": 1, "name": "a"}}
    slices = Slices(reader, ["item"], {"public.item": 0})
    record = (0, 5, b'{"id":1}', json.dumps(value).encode(), (None, None), 0)
    rows = Rows.of(slices.begin().columns([record]))
    assert rows.what == [REFUSED]
    refused, _, raw = decode_refusal(rows.rest[0] or b"")
    assert said in refused.reason
    assert raw == record[3], "the dead letter has the record"
