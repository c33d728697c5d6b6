"""A key's history from the lake: what the core has accepted, and nothing that it has not judged."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from pydantic import BaseModel

from everstate.changes import Change, ChangeCodec, EntityType, Kind, Provenance, new_change_id
from everstate.config import load
from everstate.log.record import Record
from everstate.serving.cold import cold_history
from everstate.serving.connection import ReadConnection
from hand_archive import HandArchive

BEGIN = datetime(2026, 3, 1, tzinfo=UTC)


class Seat(BaseModel):
    seat_id: str
    price: int


class Views:
    """Views whose core has accepted ``version`` of the key, and judged up to ``end``."""

    def __init__(self, version: int, end: int, dead: tuple[int, ...] = ()) -> None:
        self.newest, self.dead = (version, 1, 0, end), dead

    def row(self, _query: Any, _parameters: Any) -> tuple[int, ...]:
        return self.newest

    def execute(self, _query: Any, _parameters: Any) -> list[tuple[int]]:
        return [(offset,) for offset in self.dead]


@pytest.mark.parametrize(
    ("views", "prices"),
    [
        (Views(4, 5), [1, 2, 3, 5]),
        (Views(2, 2), [1, 2]),
        (Views(2, 3), [1, 2]),
        (Views(3, 4, dead=(2,)), [1, 2, 4]),
    ],
    ids=["all", "ahead", "not accepted", "dead"],
)
def test_records_that_the_core_has_not_judged_or_not_accepted_are_no_versions(
    tmp_path: Path, views: Views, prices: list[int]
) -> None:
    config = load(tmp_path, archive={"path": str(tmp_path / "lake")})
    codec = ChangeCodec(EntityType("seat", Seat, "seat_id"))
    records: list[Record] = []
    before = None
    for offset, version in enumerate((1, 2, 3, 3, 4)):
        now = Seat(seat_id="k", price=offset + 1)
        change: Change[Any] = Change(
            id=new_change_id(),
            entity="seat",
            schema_version=1,
            key="k",
            version=version,
            kind=Kind.UPDATED if before else Kind.CREATED,
            occurred_at=BEGIN + timedelta(hours=offset),
            recorded_at=BEGIN + timedelta(hours=offset),
            provenance=Provenance(api_version="v1", service_name="s", identifier="i"),
            current=now,
            original=before,
        )
        key, value, headers = codec.encode(change)
        records.append(Record("t", 0, offset, 1_700_000_000_000, key, value, tuple(headers)))
        before = now
    archive = HandArchive(config, "seat")
    archive.begin({0: 0})
    archive.append(records, {0: 5})
    found = cold_history(config, cast("ReadConnection", views), "seat", "k")
    assert found is not None
    assert [row[3]["price"] for row in found.rows] == prices
    assert [row[1] for row in found.rows] == list(range(1, len(prices) + 1))
