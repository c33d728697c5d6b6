"""A worker's steps: when the next one comes, what an error does, and how it ends."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from everstate.errors import EverstateError, Fenced, Unavailable
from everstate.parts import Journal, run_parts
from everstate.runtime import worker as worker_module
from everstate.runtime.worker import Repeated, Worker, part_of

DOWN = Unavailable("the server is down.")


class Listed(Worker):
    """Raises or returns what is listed, one each step; then it is stopped."""

    doing = "the work"
    idle_s = 0.0
    retry_s = (0.01, 0.02)

    def __init__(self, *steps: object, opens: tuple[object, ...] = ()) -> None:
        self._steps, self._opens = list(steps), list(opens)
        self.calls: list[str] = []

    def open(self) -> None:
        self.calls.append("open")
        if self._opens and isinstance(found := self._opens.pop(0), Exception):
            raise found

    def step(self) -> object:
        self.calls.append("step")
        found = self._steps.pop(0)
        if not self._steps:
            self.stop.set()
        if isinstance(found, Exception):
            raise found
        return found

    def failed(self, error: EverstateError) -> None:
        self.calls.append("failed")

    def leave(self) -> None:
        self.calls.append("leave")

    def close(self) -> None:
        self.calls.append("close")


def pauses_of(caplog: pytest.LogCaptureFixture) -> list[object]:
    """Seconds of each pause that was logged."""
    return [record.args[1] for record in caplog.records if isinstance(record.args, tuple)]


def test_pauses_double_to_a_limit_and_start_again_after_a_success(
    caplog: pytest.LogCaptureFixture,
) -> None:
    Listed(DOWN, DOWN, DOWN, 1, DOWN, 1).run(threading.Event())
    assert all(each.startswith("the work is retried in 0.0 s: the") for each in caplog.messages)
    assert pauses_of(caplog) == [0.01, 0.02, 0.02, 0.01]


def test_pauses_go_on_growing_until_a_step_shows_that_the_reason_is_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Waiting(Listed):
        def has_recovered(self, done: object) -> bool:
            return bool(done)

    Waiting(DOWN, 0, DOWN, 1, DOWN, 1).run(threading.Event())
    assert pauses_of(caplog) == [0.01, 0.02, 0.01]


@pytest.mark.parametrize("idle_s", [float("inf"), 1e10])
def test_a_pause_that_never_ends_is_ended_by_a_stop(idle_s: float) -> None:
    stop = threading.Event()
    threading.Timer(0.05, stop.set).start()
    Repeated("the work", lambda: pytest.fail("it never comes"), idle_s, begins_idle=True).run(stop)
    assert stop.is_set()


def test_a_stop_ends_the_pause_and_the_step_is_not_repeated() -> None:
    stop, work = threading.Event(), Listed(*[DOWN] * 9)
    work.retry_s = (600.0, 600.0)
    timer = threading.Timer(0.05, stop.set)
    timer.start()
    begun = time.monotonic()
    work.run(stop)
    assert time.monotonic() - begun < 60
    assert work.calls == ["open", "step", "failed", "leave"]
    timer.join()


def test_nothing_is_done_when_the_stop_came_before() -> None:
    stop, work = threading.Event(), Listed(1)
    stop.set()
    work.run(stop)
    assert work.calls == ["leave"]


def test_what_does_not_pass_is_raised_after_each_failure_was_prepared_for() -> None:
    work = Listed(DOWN, Fenced("another one took over."), 1)
    with pytest.raises(Fenced):
        work.run(threading.Event())
    assert work.calls == ["open", "step", "failed", "step", "failed", "leave"]


def test_to_open_is_repeated_while_its_errors_pass_and_done_once() -> None:
    work = Listed(DOWN, 1, opens=(DOWN, DOWN))
    work.run(threading.Event())
    assert work.calls == [*["open", "failed"] * 2, "open", "step", "failed", "step", "leave"]


def test_a_step_that_found_nothing_is_followed_by_a_pause_and_another_one_is_not() -> None:
    class Timed(threading.Event):
        def __init__(self) -> None:
            super().__init__()
            self.waited: list[float | None] = []

        def wait(self, timeout: float | None = None) -> bool:
            self.waited.append(timeout)
            return self.is_set()

    stop, steps = Timed(), [7, None, 7, 0]

    def step() -> object:
        if len(steps) == 1:
            stop.set()
        return steps.pop(0)

    Repeated("looking", step, 5.0).run(stop)
    assert stop.waited == [5.0, 5.0]
    stop.clear()
    stop.waited, steps[:] = [], [7, 7]
    Repeated("looking", step, 3.0, begins_idle=True).run(stop)
    assert stop.waited == [3.0]


def test_a_part_makes_a_worker_at_each_start_and_closes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "_LOOK_S", 0.01)
    made, prepared = [Listed(ValueError("a defect"), 1), Listed(DOWN, 1)], threading.Event()
    workers, journal = list(made), Journal("pipeline", tmp_path)
    seen = []

    def ready(stop: threading.Event) -> None:
        seen.append([list(each.calls) for each in made])
        prepared.set()

    parts = {"work": part_of(lambda: workers.pop(0), after=prepared), "ready": ready}
    run_parts(journal, parts, threading.Event(), retry_s=(0.01,))
    assert seen == [[[], []]]
    assert made[0].calls == ["open", "step", "leave", "close"]
    assert made[1].calls == ["open", "step", "failed", "step", "leave", "close"]


def test_a_part_that_waits_for_an_event_ends_when_it_is_stopped() -> None:
    stop = threading.Event()
    stop.set()
    part_of(lambda: pytest.fail("it began"), after=threading.Event())(stop)
