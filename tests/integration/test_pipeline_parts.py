"""The pipeline role as a whole: what fails in it fails alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from keep_cases import World

from everstate.archive.layout import table_path
from everstate.parts import Part, read_states
from everstate.roles import Role, run_roles
from kit.models import Seat
from kit.waiting import until

BROKEN = "archive-seat"


@pytest.fixture
def world(world: World) -> World:
    world.app.entity("seat", key="seat_id")(Seat)
    return world


@contextmanager
def running(world: World) -> Iterator[None]:
    """The pipeline of a project, in a thread."""
    stop = threading.Event()
    role = ([Role.PIPELINE], world.config, world.app, stop)
    thread = threading.Thread(target=run_roles, args=role)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()


def part(world: World, name: str) -> Part | None:
    states = read_states(world.config.project.data_dir)
    return next((state.parts[name] for state in states if name in state.parts), None)


def test_an_archive_that_cannot_go_on_ends_no_other_and_says_why(world: World) -> None:
    seats = Path(table_path(world.config, "seat"))
    seats.parent.mkdir(parents=True, exist_ok=True)
    seats.write_text("somebody's file, where the archive of seats should be")
    world.keeper().close()  # It makes the tables, so that they can be asked.
    with running(world):
        until(lambda: (found := part(world, BROKEN)) is not None and found.state == "waiting")
        world.send(*[world.put(f"o-{n}", "NL", "150.00") for n in range(10)])
        until(lambda: world.rows("SELECT orders FROM by_country") == [(10,)])
        until(lambda: archived(world) == 10)
        waits = part(world, BROKEN)
        assert waits is not None
        assert waits.state == "waiting"
        assert "seat" in (waits.reason or "")
        others = {state for name, state in parts(world).items() if name != BROKEN}
        assert others == {"running"}


def parts(world: World) -> dict[str, str]:
    (role,) = read_states(world.config.project.data_dir)
    return {name: each.state for name, each in role.parts.items()}


def archived(world: World) -> int:
    path = table_path(world.config, "ordr")
    if not (Path(path) / "_delta_log").is_dir():
        return 0
    return world.spark.read.format("delta").load(path).count()
