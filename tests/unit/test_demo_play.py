"""The flights of 2013 as changes in time order."""

from __future__ import annotations

from collections import Counter, defaultdict
from datetime import date, timedelta

import pytest

from everstate.demo.flights import Flight, app
from everstate.demo.play import BLIZZARD, FlightStep, Timetable, play, read_timetable


@pytest.fixture(scope="module")
def timetable() -> Timetable:
    return read_timetable(date(2013, 2, 7), date(2013, 2, 9))


@pytest.fixture(scope="module")
def steps(timetable: Timetable) -> list[FlightStep]:
    return list(play(timetable))


def test_every_flight_of_the_days_is_there_and_no_other(timetable: Timetable) -> None:
    assert timetable.flights == 932 + 930 + 684
    assert set(zip(timetable.columns["month"], timetable.columns["day"], strict=True)) == {
        (2, 7),
        (2, 8),
        (2, 9),
    }


def test_changes_come_in_the_order_in_which_they_happened(
    timetable: Timetable, steps: list[FlightStep]
) -> None:
    moments = [step.occurred_at for step in steps]
    assert moments == sorted(moments)
    assert len(steps) == timetable.changes


def test_a_flight_is_scheduled_and_then_flies_or_is_cancelled(steps: list[FlightStep]) -> None:
    lives: dict[str, list[str]] = defaultdict(list)
    for step in steps:
        lives[step.flight.flight_id].append(step.flight.status)
    assert set(map(tuple, lives.values())) == {
        ("scheduled", "departed", "arrived"),
        ("scheduled", "departed", "diverted"),
        ("scheduled", "cancelled"),
    }
    cancelled = Counter(life[-1] for life in lives.values())["cancelled"]
    assert cancelled == 4 + 472 + 393


def test_the_keys_are_unique_and_made_as_documented(steps: list[FlightStep]) -> None:
    scheduled = [step.flight for step in steps if step.flight.status == "scheduled"]
    assert len({flight.flight_id for flight in scheduled}) == len(scheduled)
    flight = scheduled[0]
    assert flight.flight_id == f"{flight.carrier}-{flight.number}-{flight.origin}-{flight.day}"


def test_times_agree_with_the_delays_that_are_told(steps: list[FlightStep]) -> None:
    landed = [step for step in steps if step.flight.status == "arrived"]
    for step in landed:
        flight = step.flight
        assert flight.dep is not None
        assert flight.arr is not None
        assert flight.dep - flight.sched_dep == timedelta(minutes=flight.dep_delay or 0)
        assert flight.arr - flight.sched_arr == timedelta(minutes=flight.arr_delay or 0)
        assert timedelta(minutes=15) < flight.arr - flight.dep < timedelta(hours=13)
        assert step.occurred_at == flight.arr


def test_a_known_flight_has_its_real_times() -> None:
    steps = list(play(read_timetable(date(2013, 1, 1), date(2013, 1, 1))))
    life = [step.flight for step in steps if step.flight.flight_id == "UA-1545-EWR-2013-01-01"]
    last = life[-1]
    assert last.model_dump_json() == (
        '{"flight_id":"UA-1545-EWR-2013-01-01","carrier":"UA","number":1545,"tailnum":"N14228",'
        '"origin":"EWR","dest":"IAH","day":"2013-01-01","sched_dep":"2013-01-01T05:15:00-05:00",'
        '"sched_arr":"2013-01-01T08:19:00-06:00","dep":"2013-01-01T05:17:00-05:00",'
        '"arr":"2013-01-01T08:30:00-06:00","dep_delay":2,"arr_delay":11,"distance":1400,'
        '"status":"arrived"}'
    )
    assert [flight.status for flight in life] == ["scheduled", "departed", "arrived"]


def test_each_system_signs_its_own_changes(steps: list[FlightStep]) -> None:
    services = {(step.flight.status, step.provenance.service_name) for step in steps}
    assert services == {
        ("scheduled", "schedule-service"),
        ("departed", "departure-control"),
        ("arrived", "arrival-control"),
        ("diverted", "arrival-control"),
        ("cancelled", "operations-control"),
    }
    assert all(step.provenance.identifier == f"carrier:{step.flight.carrier}" for step in steps)


def test_the_board_in_the_blizzard_is_what_history_says(steps: list[FlightStep]) -> None:
    latest: dict[str, Flight] = {}
    for step in steps:
        if step.occurred_at <= BLIZZARD:
            latest[step.flight.flight_id] = step.flight
    day = [f for f in latest.values() if f.origin == "JFK" and f.day == date(2013, 2, 8)]
    assert len(day) == 304
    assert Counter(flight.status for flight in day)["cancelled"] > 100


def test_the_app_declares_the_views_that_the_demonstration_shows() -> None:
    assert set(app.views) == {
        "board",
        "delay_by_carrier",
        "cancellations_by_day",
        "flights_by_origin",
    }
