"""The supervisor: what dies is started again, what cannot be mended by that ends the run."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from everstate.cli.supervisor import Supervisor
from everstate.errors import RoleEnded
from everstate.parts import Journal, states_folder


def program(source: str) -> list[str]:
    return [sys.executable, "-c", source]


def journal_in(folder: Path) -> Journal:
    return Journal("run", states_folder(folder))


def run_until(supervisor: Supervisor, done: Callable[[], bool]) -> None:
    stop = threading.Event()
    deadline = time.monotonic() + 60

    def look() -> None:
        if done() or time.monotonic() > deadline:
            stop.set()

    supervisor.run(stop, look)
    assert time.monotonic() < deadline


def test_a_role_that_dies_is_started_again_and_the_other_is_left_alone(tmp_path: Path) -> None:
    supervisor = Supervisor(
        {
            "dying": program("import os; print('once more', flush=True); os._exit(1)"),
            "steady": program("import time; time.sleep(600)"),
        },
        tmp_path,
        journal_in(tmp_path),
    )
    dying, steady = supervisor.roles
    pids: set[int] = set()

    def twice() -> bool:
        if steady.process is not None:
            pids.add(steady.process.pid)
        return dying.restarts >= 2

    run_until(supervisor, twice)
    assert (tmp_path / "dying.log").read_text().count("once more") == 2
    assert len(pids) == 1
    assert not psutil.pid_exists(pids.pop())


def test_a_killed_role_is_started_again(tmp_path: Path) -> None:
    journal = journal_in(tmp_path)
    supervisor = Supervisor({"role": program("import time; time.sleep(600)")}, tmp_path, journal)
    (role,) = supervisor.roles
    pids: list[int] = []

    reasons: set[str | None] = set()

    def killed_once() -> bool:
        reasons.update(part.reason for part in journal.state.parts.values())
        if role.process is not None and role.process.pid not in pids:
            pids.append(role.process.pid)
            if len(pids) == 1:
                role.process.kill()
        return len(pids) == 2

    run_until(supervisor, killed_once)
    assert reasons == {None, "it was ended by SIGKILL"}
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize("code", [2, 7, 9])
def test_a_role_that_starting_again_does_not_mend_stops_alone(tmp_path: Path, code: int) -> None:
    journal = journal_in(tmp_path)
    supervisor = Supervisor(
        {
            "pipeline": program(f"print('error: the view is wrong.\\nadvice'); exit({code})"),
            "relay": program("import time; time.sleep(600)"),
        },
        tmp_path,
        journal,
    )
    pipeline, relay = supervisor.roles
    run_until(supervisor, lambda: pipeline.ended is not None)
    assert pipeline.ended is not None
    assert pipeline.ended.message == "pipeline ended: the view is wrong."
    assert pipeline.ended.exit_code == code
    assert pipeline.state == "stopped"
    told = journal.state.parts["pipeline"]
    assert (told.state, told.reason) == ("stopped", "the view is wrong.")
    assert told.advice == f"advice Its log is {tmp_path / 'pipeline.log'}."
    assert pipeline.restarts == 0
    assert relay.restarts == 0


def test_the_run_ends_with_the_first_reason_when_no_role_is_left(tmp_path: Path) -> None:
    supervisor = Supervisor(
        {
            "pipeline": program("print('error: the view is wrong.\\nadvice'); exit(2)"),
            "relay": program("import time; time.sleep(0.5); exit(7)"),
        },
        tmp_path,
        journal_in(tmp_path),
    )
    with pytest.raises(RoleEnded, match=r"^pipeline ended: the view is wrong\.") as raised:
        supervisor.run(threading.Event())
    assert raised.value.exit_code == 2
    assert str(tmp_path / "pipeline.log") in str(raised.value)
