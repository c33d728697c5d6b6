"""Rows of a table that the capture does not declare are counted, and take no part."""

from __future__ import annotations

import json

from clean_cases import ITEM, capture_of
from everstate.sources.cdc.columns import WHOLE, Rows, Slices
from everstate.sources.cdc.reading import RawReader
from everstate.sources.cdc.stream import Stream


def test_rows_of_a_table_that_is_not_declared_are_counted_and_take_no_part() -> None:
    def message(table: str, key: int, lsn: int) -> bytes:
        source = {
            "connector": "postgresql", "snapshot": "false", "schema": "public", "table": table,
            "lsn": lsn, "txId": 1, "sequence": f'[null,"{lsn}"]', "ts_us": lsn, "ts_ms": 1,
        }  # fmt: skip
        after = {"id": key, "name": "a", "amount": 1, "note": None}
        rest = {"after": after, "source": source, "transaction": {"id": "1", "total_order": 1}}
        return json.dumps({"op": "c", "before": None, **rest}).encode()

    reader = RawReader(
        capture_of("debezium", dsn="postgresql://nobody@localhost/shop"), {"item": ITEM}
    )
    records = [
        (0, at, json.dumps({"id": at}).encode(), message(table, at, 10 + at), (None, None), 0)
        for at, table in enumerate(["item", "gone", "item", "gone", "other"])
    ]
    slices = Slices(reader, [""], {"public.item": 0})
    read = Stream("shop")
    read.scan(Rows.of(slices.begin().columns(records)))
    assert read.rows.what.count(WHOLE) == 2
    assert read.rows.undeclared() == {"public.gone": 2, "public.other": 1}
    assert read.count == 2, "rows of the open transaction"
