"""Refused rows of the one raw log: each is a dead letter, and none holds or hides another row."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clean_cases import Cleaner, capture_of
from everstate.sources.cdc.columns import ENDED, REFUSED, SOURCE, WHOLE, Rows, Slices
from everstate.sources.cdc.stream import Stream, StreamStanding

Record = tuple[bytes | None, bytes, tuple[bytes | None, bytes | None]]


def cleaner_of() -> Cleaner:
    dsn = "postgresql://u@h/d"
    return Cleaner(capture_of("debezium", dsn=dsn, transactions=True), is_trusted=True)


def row(key: Any, **more: Any) -> dict[str, Any]:
    return {"after": {"id": key, "name": "a", "amount": None, "note": None, **more}}


def event(
    lsn: int, transaction: int, op: str = "c", *, written_ms: int = 0, **image: Any
) -> Record:
    """A row; ``written_ms``: when the connector wrote it."""
    source = {"connector": "postgresql", "schema": "public", "table": "item", "ts_us": lsn}
    source |= {"snapshot": "false", "lsn": lsn, "txId": transaction}
    source |= {"sequence": f'["{transaction * 100}","{lsn}"]'}
    block = {"id": f"{transaction}:{lsn}", "total_order": 1, "data_collection_order": 1}
    key = json.dumps({"id": image["after"]["id"]}).encode() if "after" in image else None
    value = {"op": op, "source": source, "transaction": block, "ts_ms": written_ms, **image}
    return key, json.dumps(value).encode(), (None, None)


def end(transaction: int) -> Record:
    said = {"status": "END", "id": f"{transaction}:999", "event_count": 3}
    return None, json.dumps(said).encode(), (b"transaction", None)


def read(cleaner: Cleaner, *records: Record) -> Rows:
    raw = [(0, at, key, value, headers, 0) for at, (key, value, headers) in enumerate(records)]
    slices = Slices(cleaner.reader, [""], {"public.item": 0})
    return Rows.of(slices.begin().columns(raw))


@pytest.mark.parametrize("refused", ["invalid", "unreadable", "truncated"])
def test_a_refused_row_counts_as_arrived_and_holds_no_other_row(refused: str) -> None:
    """As read of a raw log: the rows of its transaction, and the table's later ones, go on."""
    bad: Record = {
        "invalid": event(120, 1, **row(2, name=None)),
        "unreadable": (b'{"id":2}', b"{", (None, None)),
        "truncated": event(120, 1, "t"),
    }[refused]
    records = [event(110, 1, **row(1)), bad, event(130, 1, **row(3)), end(1)]
    now = Stream("shop", StreamStanding())
    now.scan(read(cleaner_of(), *records, event(210, 2, **row(4)), end(2)))
    assert not now.is_waiting
    rows = now.take()
    # Behind a truncation, the reader reports that what is known of the table no longer holds.
    rows = rows.where([what != SOURCE for what in rows.what])
    assert rows.what == [WHOLE, REFUSED, WHOLE, ENDED, WHOLE, ENDED]
    count = 2 if refused == "unreadable" else 3
    told = [(rows.index[at], block and block.count) for at, block in enumerate(rows.block)]
    assert [told[0], told[2], told[4]] == [(1, count), (count, count), (1, 1)]


@pytest.mark.parametrize("restarts", [False, True])
def test_rows_of_one_copy_that_have_no_readable_key_are_each_a_dead_letter(restarts: bool) -> None:
    cleaner = cleaner_of()
    keys = [1, "bad-a", "bad-b", "bad-c"]
    written = [event(100, 5, **row(key)) for key in keys]
    # The connector restarts within the transaction, and writes its rows once more.
    again = [event(100, 5, written_ms=9, **row(key)) for key in keys]
    now = Stream("shop", StreamStanding())
    now.scan(read(cleaner, *written[:3]))
    if restarts:
        now.release(None, {})
        cleaner.run(now.take())
        now = Stream("shop", now.standing())
    now.scan(read(cleaner, *again, end(5)))
    cleaner.run(now.take())
    assert sum(len(batch.refused) for batch in cleaner.batches) == 3
    assert sum(batch.skipped["read before"] for batch in cleaner.batches) == 3
    block = cleaner.changes[0].value["provenance"].get("transaction")
    assert block == (None if restarts else {"id": "pg:5", "index": 1, "count": 4})
