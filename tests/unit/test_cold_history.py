"""A key's history from the lake: what the core has accepted, and nothing that it has not judged."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from everstate.changes import ChangeCodec, EntityType, Provenance
from everstate.config import load
from everstate.log.record import Record
from everstate.serving.cold import cold_history
from everstate.serving.connection import ReadConnection
from hand_archive import HandArchive, Seat
from kit.changes import change_of

BEGIN = datetime(2026, 3, 1, tzinfo=UTC)


CLERK = Provenance(api_version="v1", service_name="s", identifier="i")


class Views:
    """Views whose core has accepted ``version`` of the key, and judged up to ``end``."""

    def __init__(self, version: int, end: int, dead: tuple[int, ...] = ()) -> None:
        self.newest, self.dead = (version, 1, 0, end), dead

    def standings(self, _schema: str) -> Views:
        return self

    def accepted(self, _entity: str, _key: str) -> tuple[int, ...]:
        return self.newest

    def dead_among(self, _entity: str, _generation: int, _partition: int, _: Any) -> set[int]:
        return set(self.dead)


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
        now, at = Seat(seat_id="k", price=offset + 1), BEGIN + timedelta(hours=offset)
        change = change_of("seat", "k", version, now, before, who=CLERK, at=at)
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
