"""The quick reader of rows: it reads what our connectors write, as the normal reader does."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Annotated, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from everstate.changes import EntityType
from everstate.declarations.captures import Capture, ProvenanceFrom, Table
from everstate.sources.cdc.columns import Rows, Slices
from everstate.sources.cdc.quick import QuickReader
from everstate.sources.cdc.reading import RawReader

STREAMED = (
    b'{"before":null,"after":{"id":11,"country":"AT","note":"x","grams":1.5,"price":"2.50"},'
    b'"source":{"version":"3.7.0.Final","connector":"postgresql","name":"everstate.raw.depot",'
    b'"ts_ms":1795828189616,"snapshot":null,'
    b'"db":"shop","sequence":"[\\"30565736\\",\\"30568976\\"]","ts_us":1795828189616748,'
    b'"ts_ns":1795828189616748000,"schema":"public","table":"parcels","txId":749,"lsn":30568976,'
    b'"xmin":null,"origin":null,"origin_lsn":null},"transaction":{"id":"749:30568976",'
    b'"total_order":10,"data_collection_order":10},"op":"c","ts_ms":1795828189632,'
    b'"ts_us":1795828189632784,"ts_ns":1795828189632784229}'
)
"""A row as Debezium 3.7.0 wrote it through the converters of a capture of ours."""


class Parcel(BaseModel):
    id: int
    country: str
    note: str | None = None
    grams: float | None = None
    price: Annotated[Decimal, Field(max_digits=12, decimal_places=2)] | None = None


def readers(kind: Any = "postgresql", **options: Any) -> tuple[QuickReader, RawReader]:
    schema = "public" if kind == "postgresql" else "shop"
    table = Table(entity="parcel", **options)
    dsn = "postgresql://x/y" if kind == "postgresql" else "mysql://x/y"
    capture = Capture(name="depot", kind=kind, tables={f"{schema}.parcels": table}, dsn=dsn)
    reader = RawReader(capture, {"parcel": EntityType("parcel", Parcel, "id")})
    quick = QuickReader.of(reader)
    assert quick is not None
    return quick, reader


def test_a_row_as_a_capture_of_ours_writes_it_is_read_quickly() -> None:
    quick, _ = readers()
    found = quick.read(b'{"id":11}', STREAMED)
    assert found is not None
    assert found[:6] == (
        "public.parcels", "c", "11",
        b'{"id":11,"country":"AT","note":"x","grams":1.5,"price":"2.50"}', None, "749",
    )  # fmt: skip


MARKS = ("__debezium_unavailable_value", "__everstate_unavailable_value", "NAN", "-5")


def mostly(*usual: Any, rarely: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    """One of the usual values nearly always, so that most rows can be read quickly."""
    return st.integers(1, 30).flatmap(lambda at: st.sampled_from(usual if at < 30 else rarely))


texts = st.one_of(st.none(), st.text(max_size=12), mostly("a", "", rarely=MARKS))
numbers = st.one_of(
    st.none(), st.integers(-(2**53), 2**53), st.floats(allow_nan=False, allow_infinity=False)
)
decimals = mostly("2.50", "-1", None, "0.10", rarely=("1e99", "x", 2**70, 1.25, "9" * 13))
whole = st.fixed_dictionaries(
    {"country": mostly("AT", "ü\n", rarely=(None, 5)), "note": texts, "grams": numbers}
    | {"price": decimals}
)
parts = st.tuples(whole, st.sampled_from(["country", "note", "grams", "price"])).map(
    lambda two: {name: value for name, value in two[0].items() if name != two[1]}
)
rows = st.integers(1, 9).flatmap(lambda at: whole if at < 9 else parts)
places = st.fixed_dictionaries(
    {
        "snapshot": mostly(None, "false", "true", rarely=("last", "incremental", "None")),
        "ts_us": mostly(1_795_828_189_616_748, rarely=(0, None, -5, 10**18, 2**80)),
        "sequence": mostly('["7","9"]', '[null,"9"]', None, rarely=('["x","y"]', "", '["7')),
        "lsn": mostly(9, 2**63, rarely=(None, 2**65, -(2**64) + 1)),
        "txId": mostly(749, 7, rarely=(None,)),
        "gtid": mostly("0-1-7", rarely=(None, "x")),
        "file": mostly("binlog.000007", rarely=(None, "binlog")),
        "pos": mostly(4, rarely=(None, -3)),
        "row": mostly(0, 3, rarely=(None,)),
    }
)
blocks = mostly({"id": "749:9", "total_order": 2}, {"id": "0-1-7"}, rarely=(None, {"id": ""}))
keys = mostly(b'{"id":1}', b'{"id": 1}', rarely=(b'{"ID":1}', b'{"id":"1"}', b"[1]", b"{", b"1"))


PLACE = {
    "snapshot": "false", "ts_us": 1_795_828_189_616_748, "sequence": '["7","9"]', "lsn": 9,
    "txId": 749, "gtid": "0-1-7", "file": "binlog.000007", "pos": 4, "row": 0,
}  # fmt: skip
LACKS_NOTE = {"country": "AT", "grams": 1.5, "price": "2.50"}


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
@example("c", None, LACKS_NOTE, PLACE, {"id": "749:9", "total_order": 2}, b'{"id":1}')
@given(
    op=st.sampled_from("cudr"),
    before=st.one_of(st.none(), rows),
    after=rows,
    place=places,
    block=blocks,
    key=keys,
)
def test_it_gives_the_columns_that_the_normal_reader_gives(
    kind: str, op: str, before: Any, after: Any, place: Any, block: Any, key: bytes
) -> None:
    _, reader = readers(kind, provenance=ProvenanceFrom(columns={"actor": "note"}))
    schema = {"schema": "public"} if kind == "postgresql" else {"db": "shop"}
    value = {
        "op": op, "before": before and {"id": 1, **before},
        "after": None if op == "d" else {"id": 1, **after}, "transaction": block,
        "source": {"connector": kind, "table": "parcels", **schema, **place},
    }  # fmt: skip
    (table,) = reader.capture.tables
    slices = Slices(reader, [""], {table: 0})
    record = (0, 5, key, json.dumps(value).encode(), (None, None), 0)
    quickly, normally = slices.begin(), slices.begin()
    normally._quick = None
    found, wanted = (Rows.of(each.columns([record])) for each in (quickly, normally))
    assert found == wanted
