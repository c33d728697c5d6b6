"""What the codec writes, the parser reads: any model's values survive the log."""

from __future__ import annotations

import random
import string
import uuid
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, Field, NaiveDatetime
from pyspark.sql import SparkSession

from everstate.changes import (
    Change,
    ChangeCodec,
    DomainEvent,
    EntityType,
    Kind,
    Provenance,
    SourceTransaction,
)
from everstate.pipeline.spark.parse import parse
from everstate.pipeline.spark.source import SOURCE_SCHEMA

COUNT = 300


class Grade(Enum):
    HIGH = "hi\n\"gh'"
    LOW = "low\\u0041"


class Part(BaseModel):
    label: str
    length: float | None = None


class Thing(BaseModel):
    thing_id: str
    grade: Grade | None
    mode: Literal["a", "b"]
    whole: int
    ratio: float
    price: Annotated[Decimal, Field(max_digits=18, decimal_places=4)]
    yes: bool | None
    day: date | None
    seen: AwareDatetime
    local: NaiveDatetime | None
    tags: list[str]
    part: Part | None
    parts: list[Part]
    notes: dict[str, int]
    ref: uuid.UUID


THING = EntityType("thing", Thing, "thing_id")
LETTERS = string.ascii_letters + "äß€𝄞 \t\n\"'\\/{}[]:,\x7f\u2028"


def text(rng: random.Random) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(rng.randrange(12)))


def moment(rng: random.Random) -> datetime:
    zone = timezone(timedelta(minutes=rng.choice([0, 60, -300, 345])))
    begin = datetime(1970, 1, 2, tzinfo=zone)
    return begin + timedelta(seconds=rng.randrange(2**31), microseconds=rng.randrange(10**6))


def part(rng: random.Random) -> Part:
    return Part(label=text(rng), length=rng.choice([None, rng.uniform(-1e9, 1e9)]))


def thing(rng: random.Random, key: str) -> Thing:
    return Thing(
        thing_id=key,
        grade=rng.choice([None, *Grade]),
        mode=rng.choice(["a", "b"]),
        whole=rng.randrange(-(2**63), 2**63),
        ratio=rng.choice([0.0, -0.0, 1e-300, 1e300, rng.random(), float(rng.randrange(10**9))]),
        price=Decimal(rng.randrange(-(10**17), 10**17)).scaleb(-4),
        yes=rng.choice([None, True, False]),
        day=rng.choice([None, date(1970, 1, 1) + timedelta(days=rng.randrange(30_000))]),
        seen=moment(rng),
        local=rng.choice([None, moment(rng).replace(tzinfo=None)]),
        tags=[text(rng) for _ in range(rng.randrange(3))],
        part=rng.choice([None, part(rng)]),
        parts=[part(rng) for _ in range(rng.randrange(3))],
        notes={text(rng): rng.randrange(10) for _ in range(rng.randrange(3))},
        ref=uuid.UUID(int=rng.getrandbits(128)),
    )


def change(rng: random.Random, at: int) -> Change[Thing]:
    kind = rng.choice(list(Kind))
    key = f"k{at} {text(rng)}"
    block = SourceTransaction(id=text(rng), index=1, count=rng.randrange(1, 9))
    return Change(
        id=uuid.UUID(int=rng.getrandbits(128)),
        entity="thing",
        schema_version=1,
        key=key,
        version=rng.randrange(1, 2**62),
        kind=kind,
        occurred_at=moment(rng),
        recorded_at=moment(rng),
        provenance=Provenance(
            api_version="v1", service_name="s" + text(rng), identifier="i", reason=text(rng)
        ),
        current=None if kind is Kind.DELETED else thing(rng, key),
        original=thing(rng, key) if kind in (Kind.UPDATED, Kind.DELETED) else None,
        event=rng.choice([None, DomainEvent(type="Moved", data={"by": [1, None, text(rng)]})]),
        transaction=rng.choice([None, block]),
        extra=rng.choice([{}, {"later": {"x": 1}}]),
    )


def state(row: dict[str, Any] | None) -> Thing | None:
    """The model of a parsed state; Arrow gives maps as pairs."""
    return None if row is None else Thing.model_validate({**row, "notes": dict(row["notes"])})


def test_every_value_of_every_change_survives(spark: SparkSession) -> None:
    rng = random.Random(7)
    changes = [change(rng, at) for at in range(COUNT)]
    codec = ChangeCodec(THING)
    rows = []
    for offset, made in enumerate(changes):
        key, value, _ = codec.encode(made)
        stamp = datetime(2026, 1, 1, tzinfo=UTC)
        place = ("p.thing.changes.g1", 0, offset, stamp, 0)
        rows.append((bytearray(key), bytearray(value), *place, None))
    source = spark.createDataFrame(rows, SOURCE_SCHEMA)
    table = parse(source, THING).orderBy("offset").toArrow()
    for made, row in zip(changes, table.to_pylist(), strict=True):
        assert row["reason"] is None
        assert (row["key"], row["version"], row["kind"]) == (made.key, made.version, made.kind)
        assert uuid.UUID(row["id"]) == made.id
        assert row["occurred_at"] == made.occurred_at
        assert row["recorded_at"] == made.recorded_at
        assert state(row["current"]) == made.current
        assert state(row["original"]) == made.original
        assert row["provenance"]["serviceName"] == made.provenance.service_name
        assert row["provenance"]["reason"] == made.provenance.reason
        block = row["transaction"]
        assert (block and SourceTransaction(**block)) == made.transaction
        again = codec.decode(bytes(row["raw_value"]))
        assert (again.event, again.extra) == (made.event, made.extra)
        assert (row["event"] is None) == (made.event is None)
