"""How an entity on which source and log disagree is judged, without servers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import pyarrow as pa
import pytest
from pydantic import BaseModel
from pyspark import cloudpickle

from everstate import Formerly
from everstate.changes.drift import Drifted, Heard, Stored
from everstate.changes.entity import EntityType
from everstate.changes.keys import OwnKey
from everstate.pipeline.drift.tasks import (
    SIDES,
    decoding,
    fingerprint,
    judging,
    reading,
    repairing,
    state_fault,
)


class Guest(BaseModel):
    guest_id: str
    city: Annotated[str, Formerly("town")]


@dataclass
class Listed:
    """A source of truth that is a list."""

    entities: Mapping[str, Stored]
    waiting: frozenset[str] = frozenset()
    repaired: list[Drifted] = field(default_factory=list)

    def slices(self, count: int) -> Sequence[str]:
        return [str(n) for n in range(count)]

    def read(self, piece: str) -> Iterator[Stored]:
        del piece
        yield from self.entities.values()

    def look(self, logged: Mapping[str, Heard]) -> Mapping[str, tuple[Stored, bool]]:
        there = (key for key in logged if key in self.entities)
        return {key: (self.entities[key], key in self.waiting) for key in there}

    def repair(self, drifted: Sequence[Drifted]) -> int:
        self.repaired.extend(drifted)
        return len(drifted)


ID, OTHER = "0199c8a2-7c11-7d3e-9a55-0d8f2f6b1c77", "0199c8a2-7c11-7d3e-9a55-0d8f2f6b1c78"


def judge(
    then: int | None,
    now: Stored | None,
    logged: tuple[int, str, str | None] | None,
    *,
    waits: bool = False,
) -> str | None:
    """What the job says of key k."""
    side = (None, None, None) if logged is None else (*logged[:2], fingerprint(*logged))
    row = dict(zip(SIDES, ["k", then, None, None, *side, logged and logged[2]], strict=True))
    schema = pa.schema(
        {name: pa.int64() if name.endswith(("version", "hash")) else pa.string() for name in SIDES}
    )
    truth = Listed({} if now is None else {"k": now}, frozenset(["k"] if waits else []))
    batch = pa.RecordBatch.from_pylist([row], schema=schema)
    found = [
        each
        for out in judging(truth, OwnKey("a", "integer"), COLUMNS)([batch])
        for each in out.to_pylist()
    ]
    return found[0]["what"] if found else None


STATE = '{"a": 1}'
PART = pa.struct([pa.field("n", pa.int64(), nullable=False)])
COLUMNS = pa.schema([pa.field("a", pa.int64(), nullable=False), ("d", pa.date32()), ("p", PART)])


@pytest.mark.parametrize(
    ("then", "now", "logged", "what"),
    [
        (1, Stored("k", 1, ID, STATE), None, "missing"),
        (3, Stored("k", 3, ID, STATE), (1, ID, STATE), "stale"),
        (2, Stored("k", 2, ID, STATE), (2, OTHER, STATE), "different"),
        (2, Stored("k", 2, ID, STATE), (2, ID, '{"a":2}'), "different"),
        (2, Stored("k", 2, ID, STATE), (2, ID, '{"a":1}'), None),
        (2, Stored("k", 2, ID, STATE), (3, ID, STATE), "extra"),
        (None, None, (1, ID, STATE), "extra"),
        # The log has a record that cannot be read, of a key that the source never had.
        (None, None, (0, "", None), "extra"),
        (None, Stored("k", 1, ID, STATE), (0, "", None), None),
        (1, Stored("k", 1, ID, STATE), (0, "", None), "missing"),
        # It was written and published while the job ran.
        (1, Stored("k", 2, ID, STATE), (2, ID, STATE), None),
        (None, Stored("k", 1, ID, STATE), (1, ID, STATE), None),
        # It was written meanwhile, and its next change is on its way.
        (1, Stored("k", 3, ID, STATE), (2, ID, STATE), None),
        # It was written meanwhile, but what there was before never came.
        (2, Stored("k", 3, ID, STATE), (1, ID, STATE), "stale"),
        # A tombstone follows a grave, and nothing else.
        (2, Stored("k", 2, ID, None), (-1, "", None), None),
        (3, Stored("k", 3, ID, STATE), (-1, "", None), "missing"),
        (2, Stored("k", 2, ID, None), (2, ID, None), None),
    ],
)
def test_an_entity_is_judged(
    then: int | None,
    now: Stored | None,
    logged: tuple[int, str, str | None] | None,
    what: str | None,
) -> None:
    assert judge(then, now, logged) == what


def test_what_the_source_has_yet_to_publish_is_lag() -> None:
    stored = Stored("k", 2, ID, STATE)
    assert judge(2, stored, None, waits=True) == "pending"
    assert judge(2, stored, (1, ID, STATE), waits=True) == "pending"
    assert judge(2, stored, (3, ID, STATE), waits=True) == "extra"


@pytest.mark.parametrize(
    ("state", "fault"),
    [
        (None, None),
        ('{"a":1,"d":"2026-01-02","p":{"n":1},"unknown":[]}', None),
        ('{"a":1,"d":null,"p":null}', None),
        ("null", "missing:state"),
        ("[1]", "wrong_type:state"),
        ("{", "wrong_type:state"),
        ('{"a":"\\u0000"}', "nul_character"),
        ("{}", "missing:state.a"),
        ('{"a":null,"p":{}}', "missing:state.a"),
        ('{"a":1,"p":{}}', "missing:state.p.n"),
        ('{"d":"2026-01-02T00:00:00"}', "wrong_type:state.d"),
        ('{"a":1,"p":[1]}', "wrong_type:state.p"),
        ('{"a":1,"p":{"n":1.5}}', "wrong_type:state.p.n"),
    ],
)
def test_a_state_that_does_not_fit_its_columns_is_refused(
    state: str | None, fault: str | None
) -> None:
    assert state_fault(COLUMNS, state) == fault


def record(version: int = 7) -> bytes:
    """A record of `.state`."""
    return (
        b'{"id":"0199c8a2-7c11-7d3e-9a55-0d8f2f6b1c77","entity":"e","schemaVersion":1,"key":"k",'
        b'"version":%d,"kind":"created","occurredAt":"2026-01-01T00:00:00Z",'
        b'"recordedAt":"2026-01-01T00:00:00Z","event":null,"provenance":{"apiVersion":"v1",'
        b'"serviceName":"s","identifier":"i","transaction":null},'
        b'"currentEntityState":{"b":[1.50],"a":"\\u00e9"},"originalEntityState":null}' % version
    )


def test_both_sides_give_an_entity_the_same_fingerprint_and_range() -> None:
    records = pa.RecordBatch.from_pydict({"key": [b"k"], "value": [record()], "offset": [3]})
    logged: dict[str, Any] = next(iter(decoding(16, None)([records]))).to_pylist()[0]
    truth = Listed({"k": Stored("k", 7, ID, '{"a": "é", "b": [1.5]}')})
    numbers = pa.RecordBatch.from_pydict({"id": [0]})
    stored: dict[str, Any] = next(iter(reading(truth, ["all"], 16, None)([numbers]))).to_pylist()[0]
    assert {**stored, "offset": 3} == logged
    others = [number for number in range(16) if number != stored["number"]]
    assert next(iter(reading(truth, ["all"], 16, others)([numbers]))).num_rows == 0
    assert next(iter(decoding(16, others)([records]))).num_rows == 0


@pytest.mark.parametrize(
    "value", [b"{", *(record(version) for version in (2**63, 2**63 - 1, 2**64, 0, -1, -(2**63)))]
)
def test_a_record_that_cannot_be_read_is_older_than_anything(value: bytes) -> None:
    """A version that no store has ended each comparison; -1 was taken for a tombstone."""
    records = pa.RecordBatch.from_pydict({"key": [b"k"], "value": [value], "offset": [3]})
    (found,) = next(iter(decoding(16, None)([records]))).to_pylist()
    assert (found["version"], found["change_id"]) == (0, "")
    assert found["hash"] == fingerprint(0, "", None)


@pytest.mark.parametrize("key", ["a\x00b", "k" * 5_000, ".."])
def test_a_key_that_no_store_can_have_is_reported_and_not_asked_for(key: str) -> None:
    """One such record, of another writer, ended each comparison, or the repair of all others."""
    asked: list[str] = []

    class Strict(Listed):
        def look(self, logged: Mapping[str, Heard]) -> Mapping[str, tuple[Stored, bool]]:
            asked.extend(logged)
            return super().look(logged)

    rows = [dict.fromkeys(SIDES) | {"key": each, "logged_version": 1} for each in (key, "k")]
    schema = pa.schema({name: pa.string() if name == "key" else pa.int64() for name in SIDES})
    truth = Strict({})
    judge = judging(truth, None, COLUMNS)
    (judged,) = judge([pa.RecordBatch.from_pylist(rows, schema=schema)])
    assert [(row["key"], row["what"]) for row in judged.to_pylist()] == [
        (key, "extra"),
        ("k", "extra"),
    ]
    assert asked == ["k"]
    assert list(repairing(truth)([judged.select(["key", "what", "stored", "logged"])]))
    assert [each.key for each in truth.repaired] == ["k"]


def test_repairs_reach_the_source_as_they_were_found() -> None:
    truth = Listed({})
    rows = [
        {"key": "a", "what": "stale", "stored": 3, "logged": 1},
        {"key": "b", "what": "extra", "stored": 0, "logged": 1, "logged_state": STATE},
    ]
    batch = pa.RecordBatch.from_pylist(rows)
    (done,) = repairing(truth)([batch])
    assert json.loads(done["outcome"][0].as_py()) == {"done": 2}
    assert [each.what for each in truth.repaired] == ["stale", "extra"]


def test_a_state_that_has_another_key_is_refused() -> None:
    assert OwnKey("a", "integer").fault(STATE, "1") is None
    assert OwnKey("a", "integer").fault(STATE, "k") == "other_key:1"
    assert OwnKey("a", "decimal").fault('{"a": "1.50"}', "1.5") is None
    assert OwnKey("at", "timestamp").fault('{"at": "2026-01-01T01:00:00+01:00"}', "x") == (
        "other_key:2026-01-01T00:00:00Z"
    )
    assert OwnKey("a", "text").fault("[]", "k") is None
    assert OwnKey("a", "text").fault(None, "k") is None


def test_states_that_differ_in_a_digit_that_no_float_holds_are_told_apart() -> None:
    one, other = (f'{{"a": 12345678901234567890.{digits}}}' for digits in (1, 2))
    assert fingerprint(1, ID, one) != fingerprint(1, ID, other)
    assert fingerprint(1, ID, one) == fingerprint(1, ID, one.replace(" ", ""))


def test_a_task_has_nothing_of_the_projects_modules_which_a_worker_may_not_import() -> None:
    guest = EntityType("guest", Guest, "guest_id")
    task = judging(Listed({}), guest.own_key, guest.arrow_schema, guest.former)
    assert guest.former
    assert b"Guest" not in cloudpickle.dumps(task)  # type: ignore[no-untyped-call]
