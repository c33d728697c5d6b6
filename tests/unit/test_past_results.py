"""A stored result of a past view: only for the archive that it is from, and while it is true."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest

from everstate import App
from everstate.analysis import read, read_changes
from everstate.config import Config, load
from everstate.errors import InvalidQuery
from everstate.log.record import Record
from everstate.pipeline.requests.moment import Moment
from everstate.pipeline.requests.query import Queries, QueryResult
from hand_archive import HandArchive, Seat

BEGIN = datetime(2026, 3, 1, tzinfo=UTC)
ROWS = pa.table({"seat_id": ["k"], "price": [3]})


def at(hours: float) -> datetime:
    return BEGIN + timedelta(hours=hours)


def record(offset: int, recorded: float) -> Record:
    times = {"recordedAt": at(recorded).isoformat(), "occurredAt": at(recorded).isoformat()}
    value = json.dumps({"key": "k", **times}).encode()
    return Record("t", 0, offset, 1_700_000_000_000, b"k", value, ())


def archived(config: Config, topic: tuple[str, str] = ("cluster", "topic")) -> HandArchive:
    """Three changes, recorded at the hours 0 to 2."""
    archive = HandArchive(config, "seat", topic)
    archive.begin({0: 0})
    archive.append([record(offset, offset) for offset in range(3)], {0: 3})
    return archive


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load(tmp_path, archive={"path": str(tmp_path / "lake")})


def queries(config: Config) -> Queries:
    app = App("seats")
    app.entity("seat", key="seat_id")(Seat)
    return Queries(config, app)


def compute(
    config: Config,
    moment: Moment,
    monkeypatch: pytest.MonkeyPatch,
    held: list[tuple[int, int]] | None = None,
) -> QueryResult:
    """Store a result without Spark: what it would compute is given."""
    past = SimpleNamespace(
        positions=lambda _entity: {(1, 0): 3},
        holding=lambda _entity: held or [],
        in_order=lambda _view: SimpleNamespace(toArrow=lambda: ROWS),
    )
    monkeypatch.setattr("everstate.pipeline.requests.past.Past", lambda *_: past)
    monkeypatch.setattr("everstate.pipeline.spark.progress.watched", lambda *_, **__: nullcontext())
    return queries(config).compute(cast("Any", None), "seat", moment)


def test_a_result_is_of_one_archive_one_log_and_one_schema(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archived(config)
    other = load(tmp_path, archive={"path": str(tmp_path / "other")})
    archived(other)
    elsewhere = load(
        tmp_path, archive={"path": str(tmp_path / "lake")}, views={"schema_name": "elsewhere"}
    )
    moments = Moment(at=at(9)), Moment(recorded_at=at(9)), Moment(position="token"), Moment()
    for moment in moments:
        compute(config, moment, monkeypatch)
        found = queries(config).cached("seat", moment)
        assert found is not None
        assert found.head(5).to_pylist() == ROWS.to_pylist()
        assert queries(other).cached("seat", moment) is None
        assert queries(elsewhere).cached("seat", moment) is None
    shutil.rmtree(tmp_path / "lake")
    archived(config, ("cluster", "made again"))
    assert [queries(config).cached("seat", moment) for moment in moments] == [None] * 4


@pytest.mark.parametrize(("recorded", "is_valid"), [(9, False), (2.5, False), (None, True)])
def test_a_result_as_recorded_ends_when_a_held_change_may_be_released(
    config: Config, monkeypatch: pytest.MonkeyPatch, recorded: float | None, is_valid: bool
) -> None:
    """The change that releases it may be recorded after the moment, by a clock that is ahead."""
    archive, moment = archived(config), Moment(recorded_at=at(3))
    compute(config, moment, monkeypatch, held=[(1, 0)])
    assert queries(config).cached("seat", moment) is not None
    archive.append([] if recorded is None else [record(3, recorded)], {0: 3 if is_valid else 4})
    assert (queries(config).cached("seat", moment) is not None) == is_valid


@pytest.mark.parametrize(("recorded", "is_valid"), [(9, True), (3, False)])
def test_a_result_as_recorded_stays_while_nothing_is_held_and_later_changes_come(
    config: Config, monkeypatch: pytest.MonkeyPatch, recorded: float, is_valid: bool
) -> None:
    archive, moment = archived(config), Moment(recorded_at=at(3))
    compute(config, moment, monkeypatch)
    archive.append([record(3, recorded)], {0: 4})
    assert (queries(config).cached("seat", moment) is not None) == is_valid


def test_equal_times_have_one_result_and_any_offset_can_be_asked(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    archived(config)
    compute(config, Moment(at=at(9)), monkeypatch)
    odd = timezone(timedelta(hours=5, minutes=30, seconds=15))
    assert queries(config).cached("seat", Moment(at=at(9).astimezone(odd))) is not None
    with pytest.raises(InvalidQuery, match="has no UTC offset"):
        Moment(at=datetime(2026, 1, 1))  # noqa: DTZ001
    with pytest.raises(InvalidQuery, match="years 1 to 9999"):
        Moment(at=datetime.max.replace(tzinfo=timezone(timedelta(hours=-1))))


@pytest.mark.parametrize("zone", ["UTC", "Etc/UTC", "Z", "GMT", "+00:00", "Europe/Vienna"])
def test_a_session_in_another_zone_is_refused(
    config: Config, zone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spark: Any = SimpleNamespace(conf=SimpleNamespace(get=lambda _name: zone))

    def reached(*_: Any) -> Any:
        raise LookupError

    monkeypatch.setattr("everstate.analysis._found", reached)
    for reading in (read, read_changes):
        with pytest.raises(InvalidQuery if "/V" in zone else LookupError):
            reading(spark, "seat", config=config)
