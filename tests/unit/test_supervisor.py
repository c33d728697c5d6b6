"""The supervisor: what dies is started again, what cannot be mended by that ends the run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from everstate.errors import RoleEnded
from everstate.parts import Journal, states_folder
from everstate.runtime.supervisor import Supervisor, role_argv, stop_with_parent


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


def test_a_role_is_started_again_when_somebody_deleted_the_folder_of_the_logs(
    tmp_path: Path,
) -> None:
    logs = tmp_path / "logs"
    dying = program("import os; print('once more', flush=True); os._exit(1)")
    supervisor = Supervisor({"dying": dying}, logs, journal_in(tmp_path))
    (role,) = supervisor.roles

    def deleted() -> bool:
        if role.restarts == 1 and role.process is None and logs.is_dir():
            shutil.rmtree(logs)
        return role.restarts >= 2

    run_until(supervisor, deleted)
    assert role.log.read_text() == "once more\n"


def test_a_role_that_the_system_does_not_start_waits_and_says_why(tmp_path: Path) -> None:
    journal = journal_in(tmp_path)
    steady = program("import time; time.sleep(600)")
    supervisor = Supervisor({"role": ["/nowhere"], "steady": steady}, tmp_path, journal)
    first, second = supervisor.roles
    run_until(supervisor, lambda: first.restarts >= 2 and second.process is not None)
    part = journal.state.parts["role"]
    assert part.state == "waiting"
    assert part.reason == "it cannot be started: No such file or directory"
    assert part.retry_at is not None
    first.argv = steady
    run_until(supervisor, lambda: first.process is not None)


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
    assert pipeline.process is None
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


def rotated_role(folder: Path, rotate: str) -> Journal:
    """A role whose log is rotated in one of two ways before the role ends."""
    journal = journal_in(folder)
    source = (
        f"import os; log = {str(folder / 'role.log')!r}\n"
        f"print('x' * 5000, flush=True); {rotate}\n"
        "print('error: the reason.', flush=True); exit(1)"
    )
    supervisor = Supervisor({"role": program(source)}, folder, journal)
    (role,) = supervisor.roles
    run_until(supervisor, lambda: role.restarts == 1)
    return journal


def test_a_role_whose_log_was_deleted_is_started_again(tmp_path: Path) -> None:
    told = rotated_role(tmp_path, "os.remove(log)").state.parts["role"]
    assert told.state == "waiting"
    assert "its log cannot be read: No such file" in (told.reason or "")


def test_the_reason_of_a_role_is_found_in_a_log_that_was_cut(tmp_path: Path) -> None:
    (tmp_path / "role.log").write_text("before\n" * 10_000)
    assert rotated_role(tmp_path, "os.truncate(log, 0)").state.parts["role"].reason == "the reason."


def test_a_role_ends_although_its_supervisor_died_while_the_app_was_imported() -> None:
    gone = subprocess.Popen(program(""))
    gone.wait()
    stop = threading.Event()
    stop_with_parent(stop, gone.pid)
    assert stop.wait(30)


def test_a_role_is_given_the_number_of_its_supervisor() -> None:
    argv = role_argv(["relay"], Path("/project"), "shop:app")
    assert argv[argv.index("--with-parent") + 1] == str(os.getpid())
