"""A message that is not what its form says is refused with a reason; it never stops clean."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from everstate.changes import EntityType
from everstate.declarations.captures import Capture, CaptureForm, Table
from everstate.sources.cdc.mapping import CleanRow
from everstate.sources.cdc.reading import RawFact, RawReader, RefusedRow
from everstate.sources.cdc.rows import TRANSACTION


class Item(BaseModel):
    id: int
    name: str | None = None


ROW, OLD = {"id": 1, "name": "a"}, {"id": 1, "name": "b"}
SAMPLES: dict[CaptureForm, dict[str, Any]] = {
    "debezium": {
        "op": "u", "before": OLD, "after": ROW, "ts_ms": 5,
        "source": {"connector": "postgresql", "lsn": 7, "txId": 3, "ts_us": 5, "snapshot": "false"},
        "transaction": {"id": "3:7", "total_order": 1, "data_collection_order": 1},
    },
    "maxwell": {
        "type": "update", "database": "shop", "table": "item", "ts": 5, "xid": 3, "xoffset": 0,
        "position": "binlog.1:44", "primary_key_columns": ["id"], "data": ROW, "old": {"name": "b"},
    },
    "canal": {
        "type": "UPDATE", "database": "shop", "table": "item", "isDdl": False, "es": 5, "id": 3,
        "pkNames": ["id"], "data": [{"id": "1", "name": "a"}], "old": [{"name": "b"}],
    },
    "goldengate": {
        "op_type": "U", "table": "SHOP.ITEM", "op_ts": "2026-11-21 08:00:00.000000", "pos": "0143",
        "primary_keys": ["id"], "before": OLD, "after": ROW,
    },
    "dms": {
        "data": ROW, "before-image": {"name": "b"},
        "metadata": {
            "record-type": "data", "operation": "update", "timestamp": "2026-11-21T08:00:00Z",
        },
    },
}  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)


def reader(form: CaptureForm) -> RawReader:
    kind = {"debezium": "postgresql", "goldengate": "oracle"}.get(form, "mysql")
    tables = {"shop.item": Table(entity="item", key_columns=("id",))}
    capture = Capture(name="shop", kind=kind, form=form, tables=tables)  # type: ignore[arg-type]
    return RawReader(capture, {"item": EntityType("item", Item, "id")})


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something is in a message, at any depth."""
    if isinstance(value, (dict, list)):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield (*at, name)
            yield from paths(inner, (*at, name))


def changed(message: Any, at: tuple[Any, ...], value: Any) -> bytes:
    made = inner = copy.deepcopy(message)
    for name in at[:-1]:
        inner = inner[name]
    inner[at[-1]] = value
    return json.dumps(made).encode()


@pytest.mark.parametrize("form", get_args(CaptureForm))
def test_the_samples_are_read(form: CaptureForm) -> None:
    (row,) = reader(form).read("item", b'{"id":1}', json.dumps(SAMPLES[form]).encode())
    assert isinstance(row, CleanRow), row


@pytest.mark.parametrize("form", get_args(CaptureForm))
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_message_with_any_other_value_is_read_or_refused(form: CaptureForm, data: Any) -> None:
    at = data.draw(st.sampled_from(list(paths(SAMPLES[form]))))
    body = changed(SAMPLES[form], at, data.draw(JSON))
    for one in reader(form).read("item", data.draw(st.sampled_from([None, b'{"id":1}'])), body):
        assert isinstance(one, CleanRow | RefusedRow)
        assert isinstance(one, CleanRow) or one.reason


@settings(max_examples=300)
@given(data=st.data())
def test_any_row_of_the_one_raw_log_is_read_or_refused_or_of_no_table(data: Any) -> None:
    sample = copy.deepcopy(SAMPLES["debezium"])
    sample["source"] |= {"schema": "shop", "table": "item", "sequence": '["3","7"]'}
    at = data.draw(st.sampled_from(list(paths(sample))))
    body = changed(sample, at, data.draw(JSON))
    for one in reader("debezium").read("", b'{"id":1}', body):
        assert isinstance(one, CleanRow | RefusedRow | RawFact)
        assert not isinstance(one, RefusedRow) or one.reason


@given(at=st.sampled_from(["status", "id"]), value=JSON)
def test_an_end_of_a_transaction_with_any_other_value_is_read_or_refused(
    at: str, value: Any
) -> None:
    end = {
        "status": "END", "id": "3:7", "event_count": 1,
        "data_collections": [{"data_collection": "shop.item", "event_count": 1}],
    }  # fmt: skip
    body = changed(end, (at,), value)
    found = reader("debezium").read("", None, body, (TRANSACTION, None))
    assert all(getattr(one, "reason", "ended") for one in found)


def test_what_is_misshapen_says_so() -> None:
    body = changed(SAMPLES["maxwell"], ("primary_key_columns",), 5)
    (row,) = reader("maxwell").read("item", None, body)
    assert isinstance(row, RefusedRow)
    assert row.reason.startswith("it is not as maxwell writes it: TypeError")


@pytest.mark.parametrize("form", get_args(CaptureForm))
def test_what_is_nested_too_deep_is_refused(form: CaptureForm) -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    body = json.dumps({**SAMPLES[form], "after": 0, "data": 0}).encode()
    (row,) = reader(form).read("item", b'{"id":1}', body.replace(b": 0", b": " + deep))
    assert isinstance(row, RefusedRow)
