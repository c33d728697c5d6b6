"""No value that is nested deeply stops a writer, a relay or a reader."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec
import pytest
from pydantic import BaseModel

from clean_cases import CONFIG
from everstate.changes import ChangeCodec, DomainEvent, EntityType
from everstate.changes.depth import DEPTH_MAX, bounded, is_too_deep
from everstate.changes.values import model_json
from everstate.errors import InvalidChange
from everstate.sources.commands.wire import decode_answer, decode_command
from everstate.sources.outbox.compose import Composer, OutboxRow, Unsendable
from everstate.sources.outbox.pending import Pending, Transaction
from everstate.sources.stores.rows import event_text


class Box(BaseModel, extra="allow"):
    """An entity that takes any field."""

    id: str


BOX = EntityType("box", Box, "id")


def box(data: Any) -> Box:
    return Box.model_validate({"id": "a", "data": data})


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (nested(DEPTH_MAX), False),
        (nested(DEPTH_MAX + 1), True),
        (nested(5_000), True),
        ('{"a":' * 101 + "1" + "}" * 101, True),
        ("[" + ",".join(["[{}]"] * 500) + "]", False),
        (json.dumps("[" * 500), False),
        (json.dumps(['\\"[', "[" * 500, {'"': "\\"}]), False),
        (f'["\\\\", {nested(DEPTH_MAX)}]', True),
    ],
)
def test_the_depth_of_json_text_is_found_without_its_strings(text: str, wrong: bool) -> None:
    assert is_too_deep(text.encode()) is wrong


def test_no_writer_takes_a_value_that_is_nested_too_deeply() -> None:
    data: Any = json.loads(nested(DEPTH_MAX))
    deeper: Any = json.loads(nested(900))
    BOX.encode(box(data[0]))
    event_text("box", "a", DomainEvent(type="Filled", data=data[0]), "shop")
    model_json(box(data[0]))
    for value in (data, deeper):
        with pytest.raises(InvalidChange, match=r"nested|depth"):
            BOX.encode(box(value))
        with pytest.raises(InvalidChange, match="nested"):
            event_text("box", "a", DomainEvent(type="Filled", data=value), "shop")
    with pytest.raises(ValueError, match="nested"):
        model_json(box(data))


def test_an_event_type_that_no_header_takes_is_refused_before_it_is_stored() -> None:
    with pytest.raises(InvalidChange, match="16,384"):
        event_text("box", "a", DomainEvent(type="x" * 20_000), "shop")


def row_of(number: int, **fields: Any) -> OutboxRow:
    values = {
        "key": f"k{number}",
        "version": 1,
        "kind": "created",
        "schema_version": 1,
        "occurred_at": "2026-01-01T00:00:00+00:00",
        "recorded_at": datetime(2026, 1, 1, tzinfo=UTC),
        "provenance": '{"api_version":"v1","service_name":"shop","identifier":"x"}',
        "event": None,
        "before": None,
        "after": '{"id":"a"}',
    }
    change_id = UUID(int=number)
    return OutboxRow(
        id=number, xid=str(number), entity="box", change_id=change_id, **{**values, **fields}
    )


@pytest.mark.parametrize("depth", [985, 1_200, 100_000])
def test_the_relay_refuses_a_deep_event_and_goes_on(depth: int) -> None:
    """An outbox of an earlier release may have one: it blocks only its own transaction."""
    event = f'{{"type":"t","data":{nested(depth)}}}'
    rows = {1: row_of(1, event=event), 2: row_of(2)}
    transactions = [Transaction(str(n), [Pending(n, str(n), "box", f"k{n}", 9)]) for n in rows]
    composer = Composer(CONFIG, [BOX])
    with suppress(Unsendable):
        composer.compose(transactions, rows)
    assert len(composer.compose(transactions[1:], rows)) == 2


def test_no_reader_of_the_log_is_stopped_by_a_deep_value() -> None:
    deep = nested(50_000)
    state = f'{{"id":"a","data":{deep}}}'
    message = (
        '{"id":"00000000-0000-0000-0000-000000000001","entity":"box","schemaVersion":1,"key":"a",'
        '"version":1,"kind":"created","occurredAt":"2026-01-01T00:00:00Z",'
        '"recordedAt":"2026-01-01T00:00:00Z","event":%s,"provenance":{"apiVersion":"v1",'
        '"serviceName":"s","identifier":"i"},"currentEntityState":%s,"originalEntityState":null%s}'
    )
    for parts in (("null", state, ""), (deep, "{}", ""), ("null", "{}", f',"new":{deep}')):
        with pytest.raises(InvalidChange, match="nested"):
            ChangeCodec(BOX).decode((message % parts).encode())
    for decode in (decode_command, decode_answer, bounded(msgspec.json.Decoder().decode)):
        with pytest.raises(msgspec.DecodeError, match="nested"):
            decode(f'{{"new":{deep}}}'.encode())
