"""What the demonstration shows, and what it counts."""

from __future__ import annotations

import io
import os
import re
import time
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from rich.console import Console, RenderableType

from everstate.demo import show
from everstate.demo.play import BLIZZARD, NEW_YORK
from everstate.demo.watch import Course, Display, PeakMemory, Sample, Troubles
from everstate.parts import Journal, Part, states_folder
from everstate.serving import Entity, Place

NOW = BLIZZARD.astimezone(NEW_YORK)


def flight(status: str, due_in_min: int = 0, **fields: Any) -> Entity:
    due = NOW + timedelta(minutes=due_in_min)
    state = {
        "carrier": "B6",
        "number": 917,
        "dest": "ORD",
        "sched_dep": due.isoformat(),
        "dep": None,
        "dep_delay": None,
        "status": status,
        **fields,
    }
    return Entity(
        entity="flight",
        key="B6-917",
        version=1,
        kind="created",
        state=state,
        as_of=NOW,
        occurred_at=NOW,
        recorded_at=NOW,
        change_id=UUID(int=1),
        provenance={"serviceName": "schedule-service"},
        place=Place(1, 0, 0),
    )


def text_of(part: RenderableType, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(part)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("entity", "said"),
    [
        (flight("cancelled"), "CANCELLED"),
        (flight("scheduled", 30), "on time"),
        (flight("scheduled", -30), "DELAYED"),
        (flight("departed", dep=NOW.isoformat(), dep_delay=93), "left 18:00 +93"),
        (flight("diverted"), "diverted"),
    ],
)
def test_the_board_says_what_an_airport_would(entity: Entity, said: str) -> None:
    assert show.board_status(entity.state, NOW).plain == said


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_the_board_fits_every_terminal(width: int) -> None:
    board = text_of(show.board([flight("scheduled", 10)] * 7, NOW, "JFK", width), width)
    assert board.count("B6 917") == 7
    assert "18:10" in board
    assert max(map(len, board.splitlines())) <= width


def test_an_empty_board_is_still_a_board() -> None:
    assert "DEPARTURES" in text_of(show.board([], NOW, "JFK", 80))


def test_delays_are_told_with_the_airlines_names() -> None:
    told = text_of(show.delays([("B6", Decimal("12.51"), 3945), ("HA", Decimal(-28), 28)]))
    assert "JetBlue Airways" in told
    assert "12.5 min" in told
    assert "-28.0 min" in told
    unknown = text_of(show.delays([("B6", None, 1)]))
    assert "–" in unknown
    assert "0.0 min" not in unknown


def sample(at: float, done: int, lag: float = 0.5) -> Sample:
    return Sample(
        at=at,
        written=done,
        published=done,
        applied=done,
        archived=done,
        lag_seconds=lag,
        clock=datetime(2013, 2, 8, 23, tzinfo=UTC),
    )


def test_rates_are_taken_over_the_last_seconds_and_over_the_whole_run() -> None:
    course = Course(1000)
    for second, done in enumerate([0, 100, 200, 300, 600, 900]):
        course.add(sample(float(second), done))
    assert course.rate("applied") == pytest.approx(700 / 3)
    for second, done in enumerate([1000, 1000, 1000], 6):
        course.add(sample(float(second), done))
    assert course.rate("applied") == pytest.approx(1000 / 6)
    assert course.overall_rate() == pytest.approx(1000 / 5)
    assert course.median_lag_s() == 0.5


def test_on_a_slow_machine_a_rate_is_taken_between_two_samples() -> None:
    course = Course(1000)
    for at, done in ((0.0, 0), (5.0, 100), (10.0, 300)):
        course.add(sample(at, done))
    assert course.rate("applied") == pytest.approx(200 / 5)


def test_the_changes_of_an_earlier_run_are_not_among_those_of_this_one() -> None:
    course = Course(1000, before=900)
    for second, done in enumerate([900, 950, 1000]):
        course.add(sample(float(second), done))
    assert course.overall_rate() == pytest.approx(100)
    course = Course(1000, before=1000)
    course.add(sample(0.0, 1000))
    assert course.overall_rate() == 0


def test_a_pipe_gets_plain_lines() -> None:
    console = Console(file=io.StringIO(), width=200)
    course = Course(1000)
    display = Display(console, course)
    course.add(sample(0.0, 10))
    display.update()
    display.close()
    assert isinstance(console.file, io.StringIO)
    assert "Fri 2013-02-08 18:00  store 10, log" in console.file.getvalue()
    assert "\x1b" not in console.file.getvalue()


def test_peak_memory_is_that_of_the_whole_family() -> None:
    memory = PeakMemory()
    memory.sample([os.getpid(), 2**30])
    assert memory.peak_bytes > 10_000_000


def test_why_a_part_does_not_go_on_is_shown_once_with_its_advice(tmp_path: Path) -> None:
    journal = Journal("run", states_folder(tmp_path))
    shown = io.StringIO()
    troubles = Troubles(Console(file=shown, width=100), tmp_path)
    minute_ago = time.time() - 60
    journal.note("relay", Part("running", minute_ago))
    journal.note("clean", Part("waiting", time.time(), "Kafka is starting."))
    journal.note("pipeline", Part("waiting", minute_ago, "[Java] is not there.", "Install it."))
    troubles.look()
    troubles.look()
    assert shown.getvalue() == "pipeline: [Java] is not there.\n  Install it.\n"


def test_a_picture_has_the_recorded_lines_and_loads_nothing() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print("not recorded")
    console.record = True
    console.print(show.board([flight("cancelled")], NOW, "JFK", 100))
    svg = show.picture(console)
    assert "DEPARTURES" in svg
    assert "CANCELLED" in svg
    assert "recorded" not in svg
    assert "@font-face" not in svg
    assert "url(http" not in svg
    assert set(re.findall(r"https?://[\w./]+", svg)) <= {
        "http://www.w3.org/2000/svg",
        "https://www.textualize.io",
    }
