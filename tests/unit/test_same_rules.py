"""Rules that every way in keeps: keys, sizes, depth, numbers, and times that are ahead."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from pydantic import BaseModel, computed_field

import command_cases as bank
from clean_cases import CONFIG, ITEM, Numbered
from everstate.app import App
from everstate.changes import Change, ChangeCodec, DomainEvent, EntityType, Kind, Provenance
from everstate.changes.values import model_json
from everstate.declarations.captures import Aggregate, Capture, Outbox, Table
from everstate.declarations.processes import Effect
from everstate.errors import InvalidChange, ProcessFailed
from everstate.log.dead_letters import _letter
from everstate.log.record import Record
from everstate.log.state_copy import open_copy
from everstate.log.topics import TopicIdentity, TopicNames
from everstate.sources.cdc.kinds import kind_of
from everstate.sources.cdc.mapping import CleanRow
from everstate.sources.cdc.reading import RawReader, RefusedRow
from everstate.sources.cdc.restoring import Restoring
from everstate.sources.commands.process import ProcessWork
from everstate.sources.commands.seen import Seen, _rows_of, position_row
from everstate.telemetry import RateLimitedLogger
from everstate.testing.store_contract import ORDER, StoredOrder
from kit.changes import change_of
from kit.models import Visit

TELLER = Provenance(api_version="v1", service_name="shop", identifier="x")
NOW = datetime(2026, 11, 26, tzinfo=UTC)
AHEAD_HOURS = CONFIG.log.occurred_ahead_hours
LATE = NOW + timedelta(hours=AHEAD_HOURS, seconds=1)
DEEP: Any = json.loads("[" * 600 + "]" * 600)
EVEN_DEEPER: list[Any] = []
for _ in range(5_000):
    EVEN_DEEPER = [EVEN_DEEPER]


def change(**fields: Any) -> Change[Any]:
    state = StoredOrder(order_id="a", note="n")
    given = {"entity": ORDER.name, "key": "a", "version": 1, "current": state}
    known = {"id": UUID(int=1), "who": TELLER, "at": NOW, "kind": Kind.CREATED}
    return change_of(**{**given, **known, **fields})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"key": "k" * 2_049}, "2,049 bytes"),
        ({"key": ".."}, "cannot be part of a URL"),
        ({"key": "a\0"}, "NUL"),
        ({"event": DomainEvent(type="t", data=DEEP)}, "nested"),
        ({"event": DomainEvent(type="t", data=EVEN_DEEPER)}, "nested"),
        ({"event": DomainEvent(type="t\0")}, "NUL"),
        ({"event": DomainEvent(type=7)}, "its type is no text"),  # type: ignore[arg-type]
        ({"event": DomainEvent(type="t", data={"a": "\0"})}, "NUL"),
        ({"provenance": Provenance(api_version="v1", service_name="a\0", identifier="x")}, "NUL"),
        ({"occurred_at": LATE}, "24 hours ahead"),
    ],
)
def test_no_message_breaks_a_rule_whoever_makes_it(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidChange, match=reason):
        ChangeCodec(ORDER, ahead_hours=AHEAD_HOURS).encode(change(**fields))


def test_an_event_has_any_number_that_sql_may_emit() -> None:
    """The relay must send what was committed."""
    event = DomainEvent(type="t", data=[10**30, 1e308])
    assert b"1" + b"0" * 30 in ChangeCodec(ORDER).encode(change(event=event))[1]


class Weighed(BaseModel):
    """Its computed fields may be numbers that no column holds."""

    id: str
    grams: float = 0.0

    @computed_field  # type: ignore[prop-decorator]
    @property
    def share(self) -> float | None:
        return float("nan") if self.grams < 0 else None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def exact(self) -> int:
        return 2**63 if self.grams > 9 else 1


class Pile(BaseModel):
    id: str
    top: Weighed


@pytest.mark.parametrize("grams", [-1.0, 10.0])
def test_a_computed_field_has_only_numbers_that_json_can_write(grams: float) -> None:
    """A NaN would be written as null, which is another value."""
    bad = Weighed(id="a", grams=grams)
    entity_type = EntityType("weighed", Weighed, "id")
    with pytest.raises(InvalidChange, match="NaN") as refused:
        entity_type.encode(bad)
    assert refused.value.field == ("share" if grams < 0 else "exact")
    with pytest.raises(InvalidChange, match="NaN"):
        EntityType("pile", Pile, "id").encode(Pile(id="a", top=bad))
    with pytest.raises(ValueError, match="NaN"):
        model_json(bad)
    assert b'"share":null' in entity_type.encode(Weighed(id="a"))


def captured(**table: Any) -> Numbered:
    """Rows of a captured table of items."""
    tables = {"public.item": Table(entity="item", key_columns=("id",), **table)}
    capture = Capture(name="shop", kind="postgresql", tables=tables, transactions=False)
    return Numbered(RawReader(capture, {"item": ITEM}), CONFIG)


def row(key: int, note: str = "", at: datetime = NOW) -> tuple[str, bytes, bytes]:
    after = {"id": key, "name": "a", "amount": 1, "note": note}
    source = {"connector": "postgresql", "lsn": key, "ts_ms": int(at.timestamp() * 1000)}
    source |= {"schema": "public", "table": "item", "snapshot": "false"}
    value = {"op": "c", "before": None, "after": after, "source": source}
    return "item", json.dumps({"id": key}).encode(), json.dumps(value).encode()


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (DomainEvent(type="Named", data=DEEP), "nested"),
        (DomainEvent(type="Named", data={"a": float("inf")}), "NaN"),
        (DomainEvent(type="Na\0med"), "NUL"),
        (DomainEvent(type=7), "its type is no text"),  # type: ignore[arg-type]
        ("Named", "returned str"),
    ],
)
def test_an_event_function_of_a_capture_refuses_its_row_and_no_other(
    event: Any, reason: str
) -> None:
    good = DomainEvent(type="Named")
    rig = captured(event=lambda before, after: event if after["id"] == 1 else good)
    batch = rig.run(rig.read(row(1), row(2)), NOW.timestamp())
    assert [one.key for one in rig.changes] == ["2"]
    assert [reason in one.reason for one in batch.refused] == [True]


@pytest.mark.parametrize("table", [{}, {"occurred_at": "note"}])
def test_a_captured_change_that_is_too_far_ahead_is_refused(table: dict[str, Any]) -> None:
    near = NOW + timedelta(hours=AHEAD_HOURS)
    rig = captured(**table)
    if table:
        rows = [row(1, near.isoformat()), row(2, LATE.isoformat()), row(3, "no time")]
    else:
        rows = [row(1, at=near), row(2, at=LATE), row(3)]
    batch = rig.run(rig.read(*rows), NOW.timestamp())
    assert [one.key for one in rig.changes] == ["1", "3"]
    assert ["24 hours ahead" in one.reason for one in batch.refused] == [True]


KEYS = {"k" * 2_049: "2,049 bytes", "..": "cannot be part of a URL", "": "empty"}


@pytest.mark.parametrize(("key", "reason"), KEYS.items())
def test_a_captured_row_has_a_key_that_every_reader_can_hold(key: str, reason: str) -> None:
    thing = EntityType("thing", Visit, "id")
    tables = {"public.thing": Table(entity="thing", key_columns=("id",))}
    capture = Capture(name="shop", kind="postgresql", tables=tables, transactions=False)
    rig = Numbered(RawReader(capture, {"thing": thing}), CONFIG)
    source = {"connector": "postgresql", "schema": "public", "table": "thing", "snapshot": "false"}

    def row(lsn: int, key: str) -> tuple[str, bytes, bytes]:
        value = {"op": "c", "before": None, "after": {"id": key}, "source": {**source, "lsn": lsn}}
        return "thing", json.dumps({"id": key}).encode(), json.dumps(value).encode()

    batch = rig.run(rig.read(row(1, key), row(2, "b")), NOW.timestamp())
    assert [one.key for one in rig.changes] == ["b"]
    assert [reason in one.reason for one in batch.refused] == [True]


@pytest.mark.parametrize(("key", "reason"), KEYS.items())
def test_an_effect_of_a_process_manager_has_such_a_key(
    tmp_path: Path, key: str, reason: str
) -> None:
    app = App("bank")
    app.entity(bank.ENTITY, key="account_id", source="commands")(bank.Account)
    app.commands(bank.ENTITY, decide=bank.decide, evolve=bank.evolve, commands=[bank.Deposit])
    effect = Effect(entity=bank.ENTITY, key=key, command=bank.Deposit(amount=1))
    app.process("greet", on=[bank.ENTITY], react=lambda change: [effect])
    work = ProcessWork(CONFIG, app, app.processes["greet"], tmp_path)
    with pytest.raises(ProcessFailed, match=reason):
        work._followed(change(entity=bank.ENTITY, current={}))


def routed(
    event_type: str, *, is_wrapped: bool = False, key: str = "a", **fields: Any
) -> CleanRow | RefusedRow:
    """What is read of one row of an outbox in MariaDB."""
    outbox = Outbox(table="shop.outbox", aggregates={"Order": Aggregate(entity=ORDER.name)})
    capture = Capture(name="shop", kind="mariadb", outbox=outbox)
    reader = kind_of(CONFIG, capture, {ORDER.name: ORDER}).reader
    payload = {
        "version": 1,
        "originalEntityState": None,
        "currentEntityState": {"order_id": key, "note": "n"},
        "provenance": {"apiVersion": "v1", "serviceName": "shop", "identifier": "x"},
        **fields,
    }
    text = json.dumps(payload)
    value = (json.dumps(text) if is_wrapped else text).encode()
    headers = (None, b"Order", b"1", json.dumps(event_type).encode())
    (found,) = reader.read(
        "", json.dumps(key).encode(), value, headers, int(NOW.timestamp() * 1000)
    )
    assert isinstance(found, CleanRow | RefusedRow)
    return found


@pytest.mark.parametrize(
    ("event_type", "given", "reason"),
    [
        ("t", {"occurredAt": LATE.isoformat()}, "24 hours ahead"),
        ("t", {"event": {"data": DEEP}}, "nested"),
        ("a\0b", {}, "NUL"),
        ("t", {"event": {"data": "a\0b"}, "is_wrapped": True}, "NUL"),
        ("t" * 17_000, {}, "16,384"),
        *(("t", {"key": key}, reason) for key, reason in KEYS.items()),
    ],
)
def test_an_outbox_in_mariadb_keeps_the_rules_of_every_way_in(
    event_type: str, given: dict[str, Any], reason: str
) -> None:
    taken = routed("t", occurredAt=NOW.isoformat(), event={"data": DEEP[0][:0]}, is_wrapped=True)
    assert isinstance(taken, CleanRow)
    refused = routed(event_type, **given)
    assert isinstance(refused, RefusedRow)
    assert reason in refused.reason


def test_an_event_that_is_written_again_has_no_second_effect_however_late(tmp_path: Path) -> None:
    """A client may repeat a request at any time; the answers to commands are forgotten."""
    event = change(kind=Kind.EVENT)
    for is_first in (True, False):
        seen = Seen(open_copy(tmp_path / "seen", "form", {"t": "1"}))
        assert seen.takes(event) is is_first
        assert seen.takes(event) is False
        assert seen.takes(change(kind=Kind.EVENT, key="b")) is is_first
        seen.settle()
        seen.close()


def test_a_record_of_seen_versions_that_is_none_is_skipped() -> None:
    """Whoever may write to Kafka may write one; the process manager starts nevertheless."""

    def rows(key: bytes | None, value: bytes | None) -> list[tuple[bytes, bytes]]:
        return _rows_of(Record("seen", 0, 7, 0, key, value, ()))

    assert rows(b"visit\0a", b"[1,[]]") == [(b"visit\0a", b"[1,[]]")]
    place = position_row("topic", 7, TopicIdentity("cluster", "id", 1))
    assert rows(*place) == [place]
    for value in (None, b"", b"\xff", b"7", b"[1]", b'{"a":1}'):
        assert rows(b"visit\0a", value) == []
    assert rows(None, b"x") == rows(b"\0topic", b"[]") == []


def test_a_dead_letter_that_somebody_else_wrote_is_shown() -> None:
    for wrong in (b"x", b"-1", b"\xff", b"9" * 5_000, None):
        headers = (("everstate_partition", wrong), ("everstate_offset", wrong))
        letter = _letter("order", Record("dead", 0, 7, 0, None, None, headers))
        assert (letter.from_partition, letter.from_offset, letter.offset) == (0, 0, 7)


def test_a_state_that_no_capture_wrote_stops_no_capture(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is skipped when the newest states are read from the log."""
    # Other tests of this process may have used up the ten lines of this minute.
    fresh = RateLimitedLogger(logging.getLogger("everstate.sources.cdc"), logging.ERROR)
    monkeypatch.setattr("everstate.sources.cdc.restoring._unreadable", fresh)
    tables = {"public.item": Table(entity="item", key_columns=("id",))}
    capture = Capture(name="shop", kind="postgresql", tables=tables)
    topics: Any = SimpleNamespace(names=TopicNames("p"))
    rows_of = Restoring(CONFIG, capture, topics)._rows_of

    def read(value: bytes) -> list[Any]:
        return list(rows_of(Record(TopicNames("p").state("item"), 0, 7, 0, b"a", value, ())))

    state = b'{"key":"a","version":%b,"kind":"created","currentEntityState":{"id":1}}'
    assert len(read(state % b"1")) == 1
    versions = [state % version for version in (b"0", b"-1", b"1e3", b"9" * 30, b'"1"')]
    for value in (b"", b"{", b"[" * 9_000, b"{}", b"\xff", state[:40], *versions):
        assert read(value) == []
    assert "p.item.state.g1[0]@7 is no change" in caplog.text
