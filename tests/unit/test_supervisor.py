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


def program(source: str) -> list[str]:
    return [sys.executable, "-c", source]


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
    supervisor = Supervisor({"role": program("import time; time.sleep(600)")}, tmp_path)
    (role,) = supervisor.roles
    pids: list[int] = []

    def killed_once() -> bool:
        if role.process is not None and role.process.pid not in pids:
            pids.append(role.process.pid)
            if len(pids) == 1:
                role.process.kill()
        return len(pids) == 2

    run_until(supervisor, killed_once)
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize("code", [2, 7, 9])
def test_what_starting_again_does_not_mend_ends_all_and_is_told(tmp_path: Path, code: int) -> None:
    supervisor = Supervisor(
        {
            "pipeline": program(f"print('error: the view is wrong.\\nadvice'); exit({code})"),
            "relay": program("import time; time.sleep(600)"),
        },
        tmp_path,
    )
    with pytest.raises(RoleEnded, match=r"^pipeline ended: the view is wrong\.") as raised:
        supervisor.run(threading.Event())
    assert raised.value.exit_code == code
    assert str(tmp_path / "pipeline.log") in str(raised.value)
    assert all(role.process is None or role.process.poll() is not None for role in supervisor.roles)
