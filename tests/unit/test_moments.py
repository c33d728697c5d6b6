"""One rule says which times can be kept, for every way in: the years 1 to 9999 in UTC."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, computed_field

from everstate.changes import Change, ChangeCodec, DomainEvent, EntityType, Provenance
from everstate.changes.codec import ready_time
from everstate.changes.moments import moment_fault
from everstate.changes.values import model_json
from everstate.changes.written import parse_moment
from everstate.errors import InvalidChange, InvalidQuery, InvalidRequest
from everstate.http.callers import occurred_at_of
from everstate.sources.stores.rows import event_text, moment_text
from kit.changes import change_of

EARLY = "0001-01-01T00:00:00+12:00"
LATE = "9999-12-31T23:59:59.999999-00:01"
ENDS = [EARLY, LATE]


class Leg(BaseModel):
    departs: datetime | None = None


class Trip(BaseModel):
    trip_id: str
    booked: datetime | None = None
    legs: list[Leg] = []
    stops: dict[str, set[datetime]] = {}
    shift: str | None = None

    @computed_field
    def arrives(self) -> datetime | None:
        return None if self.shift is None else datetime.fromisoformat(self.shift)


TRIP = EntityType("trip", Trip, "trip_id")


@given(
    st.sampled_from((1, 2, 2026, 9998, 9999)),
    st.timedeltas(timedelta(0), timedelta(days=1, microseconds=-1)),
    st.booleans(),
    st.builds(timezone, st.timedeltas(-timedelta(hours=23), timedelta(hours=23))),
)
def test_a_time_is_kept_when_utc_has_it(
    year: int, time: timedelta, at_the_end: bool, zone: timezone
) -> None:
    month, day = (12, 31) if at_the_end else (1, 1)
    moment = datetime(year, month, day, tzinfo=zone) + time
    try:
        moment.astimezone(UTC)
    except OverflowError:
        assert moment_fault(moment) == "the time is not of the years 1 to 9999 in UTC"
    else:
        assert moment_fault(moment) is None


def created(occurred_at: datetime, recorded_at: datetime) -> Change[Any]:
    who = Provenance(api_version="v1", service_name="s", identifier="i")
    trip = Trip(trip_id="t-1")
    return change_of("trip", "t-1", 1, trip, who=who, at=occurred_at, recorded_at=recorded_at)


@pytest.mark.parametrize("text", ENDS)
@pytest.mark.parametrize("field", ["booked", "legs", "stops", "arrives"])
def test_a_state_with_a_time_that_cannot_be_kept_is_refused_at_any_depth(
    text: str, field: str
) -> None:
    values: dict[str, Any] = {
        "booked": text,
        "legs": [{}, {"departs": text}],
        "stops": {"a": [text]},
        "arrives": text,
    }
    name = "shift" if field == "arrives" else field
    trip = TRIP.validate({"trip_id": "t-1", name: values[field]})
    with pytest.raises(InvalidChange, match=f"{field}: the time is not of the years 1 to 9999"):
        TRIP.encode(trip)


@pytest.mark.parametrize("text", ["0001-01-01T12:00:00+12:00", "9999-12-31T23:59:59.999999Z"])
def test_the_first_and_the_last_time_are_kept(text: str) -> None:
    trip = TRIP.validate({"trip_id": "t-1", "booked": text, "legs": [{"departs": text}]})
    assert text[:10].encode() in TRIP.encode(trip)
    assert occurred_at_of({"everstate-occurred-at": text}) == datetime.fromisoformat(text)
    assert moment_text("trip", "t-1", datetime.fromisoformat(text)) != ""
    assert parse_moment(text) == datetime.fromisoformat(text)


@pytest.mark.parametrize("text", ENDS)
def test_every_way_in_refuses_a_time_that_cannot_be_kept(text: str) -> None:
    """From a header, from emit and the stores, into the log, and asked for."""
    moment = datetime.fromisoformat(text)
    with pytest.raises(InvalidRequest, match="years 1 to 9999"):
        occurred_at_of({"everstate-occurred-at": text})
    with pytest.raises(InvalidChange, match="occurredAt: the time is not of the years 1 to 9999"):
        moment_text("trip", "t-1", moment)
    with pytest.raises(InvalidQuery, match="years 1 to 9999"):
        parse_moment(text)
    now = datetime.now(UTC)
    for occurred_at, recorded_at in ((moment, now), (now, moment)):
        change = created(occurred_at, recorded_at)
        with pytest.raises(InvalidChange, match="years 1 to 9999"):
            ChangeCodec(TRIP).encode(change)


MONROVIA = ZoneInfo("Africa/Monrovia")
"""Its clocks were 44 minutes and 30 seconds behind UTC until 1972."""
NOON = datetime(1960, 6, 1, 12, tzinfo=MONROVIA)
NOON_TEXT = "1960-06-01T12:44:30Z"


class Visit(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)
    at: datetime


def test_a_state_with_a_time_whose_offset_has_seconds_is_of_the_same_instant() -> None:
    given: dict[str, Any] = {
        "booked": NOON,
        "legs": [Leg(departs=NOON), Leg()],
        "stops": {"a": {NOON}, "b": set()},
    }
    trip = TRIP.accept({"trip_id": "t-1", **given})
    written = TRIP.validate_json(TRIP.encode(trip))
    assert written == trip
    assert TRIP.encode(trip).count(NOON_TEXT.encode()) == 3
    visit = EntityType("visit", Visit, "at")
    stored = visit.encode(Visit(at=NOON, later=NOON))
    assert stored.count(NOON_TEXT.encode()) == 2
    assert visit.key_of(visit.validate_json(stored)) == visit.key_of(Visit(at=NOON)) == NOON_TEXT


def test_a_computed_time_whose_offset_has_seconds_is_refused() -> None:
    trip = Trip(trip_id="t-1", shift="2026-01-01T00:00:00+00:00:30")
    with pytest.raises(InvalidChange, match="offset has seconds"):
        TRIP.encode(trip)


class Call(NamedTuple):
    at: datetime


@dataclass(frozen=True)
class Pause:
    at: datetime


@dataclass(frozen=True, slots=True)
class Halt:
    at: datetime


class Shift(BaseModel):
    """A fact whose time is computed."""

    start: str

    @computed_field  # type: ignore[prop-decorator]
    @property
    def at(self) -> datetime:
        return datetime.fromisoformat(self.start)


class Plan(BaseModel):
    """A command: its fields need no column."""

    pause: Pause
    calls: list[Call]


def test_times_of_commands_facts_and_changes_whose_offset_has_seconds_keep_their_instant() -> None:
    plan = Plan(pause=Pause(NOON), calls=[Call(NOON)])
    assert model_json(plan).count(NOON_TEXT.encode()) == 2
    for fact in (Pause(NOON), Halt(NOON)):
        assert model_json(fact) == f'{{"at":"{NOON_TEXT}"}}'.encode()
        assert fact.at is NOON
    with pytest.raises(ValueError, match="offset has seconds"):
        model_json(Shift(start="2026-01-01T00:00:00+00:00:30"))
    assert moment_text("trip", "t-1", NOON) == "1960-06-01T12:44:30+00:00"
    assert ready_time(NOON) == NOON_TEXT
    event = DomainEvent(type="Booked", data={"at": [NOON]})
    assert NOON_TEXT in event_text("trip", "t-1", event, "s")
    _, value, headers = ChangeCodec(TRIP).encode(created(NOON, NOON))
    assert value.count(NOON_TEXT.encode()) == 2
    assert dict(headers)["ce_time"] == NOON_TEXT.encode()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("2026-01-01T00:00:00.1234567Z", "parts of a microsecond"),
        ("2026-01-01T00:00:00.0000001+01:00", "parts of a microsecond"),
        ("2026-01-01T00:00:00+00:00:30", "RFC 3339"),
        ("2026-W01-1T00:00:00Z", "RFC 3339"),
        ("20260101T000000Z", "RFC 3339"),
        ("2026-01-01T00:00Z", "RFC 3339"),
        ("2026-01-01T00:00:00,5Z", "RFC 3339"),
        ("2026-01-01T00:00:00+01", "RFC 3339"),
        ("2026-01-01", "RFC 3339"),
        ("٢٠٢٦-01-01T00:00:00Z", "RFC 3339"),
        ("2026-02-30T00:00:00Z", "RFC 3339"),
    ],
)
def test_a_time_of_a_change_is_rfc_3339_and_is_not_cut(text: str, reason: str) -> None:
    header = text.encode().decode("latin-1")
    with pytest.raises(InvalidRequest, match=reason):
        occurred_at_of({"everstate-occurred-at": header})


@pytest.mark.parametrize(
    "text",
    ["2026-01-01T00:00:00.1234560000Z", "2026-01-01t01:00:00.123456z", "2026-01-01 00:00:00-00:30"],
)
def test_every_form_of_rfc_3339_is_read(text: str) -> None:
    moment = occurred_at_of({"everstate-occurred-at": text})
    assert moment == datetime.fromisoformat(text.upper().replace("0000Z", "Z"))
