"""A process is known by pid and start; what a run remembers of its stack."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from everstate.errors import LocalStackError
from everstate.local.files import make_password
from everstate.local.memory import Memory, Remembered
from everstate.local.processes import (
    ProcessId,
    end,
    free_port,
    is_alive,
    is_free,
    send,
    spawn,
    strays,
)


def sleeper(folder: Path, *arguments: str, ignoring_sigterm: bool = False) -> ProcessId:
    """A child that sleeps, ready to take signals."""
    program = "import signal, sys, time\n"
    if ignoring_sigterm:
        program += "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    program += "print('ready', flush=True); time.sleep(60)"
    log = folder / "log"
    argv = (sys.executable, "-c", program, *arguments)
    process = spawn(argv, env=os.environ, cwd=folder, log=log)
    deadline = time.monotonic() + 20
    while "ready" not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    return process


def test_a_process_ends_by_the_asked_signal(tmp_path: Path) -> None:
    process = sleeper(tmp_path)
    assert is_alive(process)
    assert end(process, signal.SIGTERM, patience_s=10)
    assert not is_alive(process)


def test_a_process_that_will_not_is_killed(tmp_path: Path) -> None:
    process = sleeper(tmp_path, ignoring_sigterm=True)
    assert not end(process, signal.SIGTERM, patience_s=0.5)
    assert not is_alive(process)


def test_a_pid_that_was_given_to_another_process_is_left_alone(tmp_path: Path) -> None:
    process = sleeper(tmp_path)
    before = ProcessId(process.pid, process.started - 100)
    assert not is_alive(before)
    send(before, signal.SIGKILL)
    assert end(before, signal.SIGKILL, patience_s=1)
    assert is_alive(process)
    end(process, signal.SIGKILL, patience_s=10)


def test_a_stray_is_found_by_its_marker(tmp_path: Path) -> None:
    marker, program = str(tmp_path / "marker"), Path(sys.executable).name
    process = sleeper(tmp_path, marker)
    assert [stray.pid for stray in strays(marker, program, tmp_path)] == [process.pid]
    assert strays(str(tmp_path), program, tmp_path) == []
    assert strays(marker, "postgres", tmp_path) == []
    assert strays(marker, program, tmp_path / "other") == []
    end(process, signal.SIGKILL, patience_s=10)


def test_a_long_log_is_moved_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstate.local.processes._LOG_BYTES_MAX", 3)
    (tmp_path / "log").write_text("four")
    end(sleeper(tmp_path), signal.SIGKILL, patience_s=10)
    assert (tmp_path / "log.1").read_text() == "four"
    assert (tmp_path / "log").read_text() == "ready\n"


def test_free_ports_are_free_and_differ() -> None:
    taken: set[int] = set()
    ports = [free_port(taken) for _ in range(50)]
    assert len(set(ports)) == 50 == len(taken)
    assert all(is_free(port) for port in ports)


def test_memory_is_read_back_as_written(tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    servers = {
        "kafka": Remembered({"client": 1, "controller": 2}, ProcessId(3, 4.5)),
        "postgres": Remembered({"client": 6}, None),
    }
    memory.write(servers)
    assert memory.read() == servers
    assert [path.name for path in tmp_path.iterdir()] == ["stack.json"]


def test_a_record_that_a_full_disk_refuses_is_a_clear_error_and_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, before = Memory(tmp_path), {"kafka": Remembered({"client": 1}, None)}
    memory.write(before)

    def full(_from: Path, _to: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(LocalStackError, match=r"stack\.json: No space left on device") as caught:
        memory.write({})
    assert "everstate doctor" in str(caught.value.advice)
    assert memory.read() == before
    assert [path.name for path in tmp_path.iterdir()] == ["stack.json"]


def test_a_password_that_a_full_disk_left_empty_is_made_again(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.touch()
    make_password(file)
    password = file.read_text()
    assert len(password.strip()) == 32
    make_password(file)
    assert file.read_text() == password


@pytest.mark.parametrize("text", ["", "{", "[]", '{"servers": {"kafka": {}}}', '{"other": 1}'])
def test_a_memory_that_cannot_be_read_is_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "stack.json").write_text(text)
    assert Memory(tmp_path).read() == {}


def test_a_new_data_folder_is_closed_to_others(tmp_path: Path) -> None:
    with Memory(tmp_path / "data").lock():
        assert (tmp_path / "data").stat().st_mode & 0o077 == 0


def test_two_starters_wait_for_each_other(tmp_path: Path) -> None:
    order: list[str] = []

    def second() -> None:
        with Memory(tmp_path).lock():
            order.append("second")

    with Memory(tmp_path).lock():
        waiting = threading.Thread(target=second)
        waiting.start()
        time.sleep(0.2)
        order.append("first")
    waiting.join()
    assert order == ["first", "second"]
