"""Which servers belong to a project's folder, and when they are started, left alone and ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from everstate.config import Config, load
from everstate.errors import LocalStackError
from everstate.local import SILENT, Stack, supervise
from everstate.local.artifacts import Artifact
from everstate.local.memory import Memory
from everstate.local.processes import end, is_alive
from everstate.local.server import Launch, Ports, Server
from everstate.local.stack import _SERVERS

SLEEPS = "import time; time.sleep(600)"


class Sleeper(Server):
    """A server that answers as soon as it runs."""

    port_names: tuple[str, ...] = ("client",)
    stop_signal: signal.Signals = signal.SIGTERM
    artifacts: tuple[Artifact, ...] = ()
    program: str = Path(sys.executable).name

    def __init__(self, name: str, config: Config) -> None:
        self.name = name
        self._folder = config.project.data_dir / name
        self.marker = str(self._folder / "settings")

    def prepare(self, ports: Ports) -> Launch:
        self._folder.mkdir(parents=True, exist_ok=True)
        return Launch((sys.executable, "-c", SLEEPS, self.marker), os.environ, self._folder)

    def probe(self, ports: Ports) -> None:
        pass

    def settle(self, ports: Ports) -> None:
        pass


class Broken(Sleeper):
    """A server that does not start."""

    def prepare(self, ports: Ports) -> Launch:
        raise LocalStackError("its settings are wrong.")


class Rounds(threading.Event):
    """A stop signal that lets a loop look ``count`` times, and does not wait."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._left = count

    def wait(self, timeout: float | None = None) -> bool:
        self._left -= 1
        return self._left < 0


def makes(sort: type[Sleeper], name: str) -> Callable[[Config], Sleeper]:
    return lambda config: sort(name, config)


@pytest.fixture(autouse=True)
def sleepers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _SERVERS:
        monkeypatch.setitem(_SERVERS, name, makes(Sleeper, name))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A project's folder, whose servers are ended after the test wherever they work then."""
    folder = tmp_path / "project"
    folder.mkdir()
    yield folder
    for process in psutil.process_iter():
        try:
            if any(str(tmp_path) in argument for argument in process.cmdline()):
                process.kill()
        except psutil.Error:
            continue


def states(stack: Stack) -> dict[str, str]:
    return {server.name: server.state for server in stack.status()}


def test_a_copied_folder_has_servers_of_its_own(folder: Path) -> None:
    original = Stack(load(folder))
    original.start()
    before = {name: original.pid(name) for name in original.names}
    shutil.copytree(folder, folder.parent / "copy")
    copy = Stack(load(folder.parent / "copy"))
    assert states(copy) == {"kafka": "stopped", "postgres": "stopped"}
    assert copy.stop() == []
    assert states(original) == {"kafka": "running", "postgres": "running"}
    copy.start()
    assert states(copy) == {"kafka": "running", "postgres": "running"}
    assert {name: original.pid(name) for name in original.names} == before
    assert not set(before.values()) & {copy.pid(name) for name in copy.names}
    assert copy.stop() == ["kafka", "postgres"]
    assert original.stop() == ["kafka", "postgres"]


def test_a_moved_folder_keeps_its_servers(folder: Path) -> None:
    stack = Stack(load(folder))
    stack.start()
    before = stack.pid("kafka")
    moved = Stack(load(folder.rename(folder.parent / "moved")))
    assert states(moved) == {"kafka": "running", "postgres": "running"}
    assert moved.pid("kafka") == before
    assert moved.stop() == ["kafka", "postgres"]


def test_a_step_of_the_clock_changes_no_server(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = Stack(load(folder))
    stack.start()
    started = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: started(process) + 90)
    assert stack.crashed() == []
    assert stack.stop() == ["kafka", "postgres"]


def test_a_record_of_an_earlier_release_is_recognised(folder: Path) -> None:
    stack = Stack(load(folder))
    stack.start()
    file = folder / ".everstate" / "stack.json"
    stored = json.loads(file.read_text())
    for entry in stored["servers"].values():
        del entry["process"]["mark"]
    file.write_text(json.dumps(stored))
    assert states(stack) == {"kafka": "running", "postgres": "running"}
    assert stack.stop() == ["kafka", "postgres"]


def test_a_program_of_the_user_that_reads_the_data_is_left_alone(folder: Path) -> None:
    """A backup with ``tar`` has the path of the data folder among its arguments."""
    config = load(folder)
    marker = Sleeper("kafka", config).marker
    with subprocess.Popen((sys.executable, "-c", SLEEPS, marker), cwd="/") as elsewhere:
        with subprocess.Popen(("tail", "-f", "/dev/null", marker), cwd=folder) as other:
            with Stack(config) as stack:
                stack.stop()
            assert (elsewhere.poll(), other.poll()) == (None, None)
            other.kill()
        elsewhere.kill()


def test_a_server_that_no_record_names_is_ended(folder: Path) -> None:
    stack = Stack(load(folder))
    stack.start()
    (folder / ".everstate" / "stack.json").unlink()
    assert stack.stop() == ["kafka", "postgres"]


def test_a_stack_that_starts_in_part_leaves_no_server_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_SERVERS, "postgres", makes(Broken, "postgres"))
    stack = Stack(load(folder))
    with pytest.raises(LocalStackError, match="its settings are wrong"), stack:
        pass
    assert states(stack) == {"kafka": "stopped", "postgres": "stopped"}


def test_down_ends_servers_that_the_settings_do_not_name_any_more(folder: Path) -> None:
    Stack(load(folder)).start()
    process = Memory(folder / ".everstate").read()["kafka"].process
    assert process is not None
    now = Stack(load(folder, log={"bootstrap_servers": "kafka:9092"}))
    assert states(now) == {"postgres": "running"}
    assert now.stop_all() == ["postgres", "kafka"]
    assert not is_alive(process)
    assert now.stop_all() == []


def test_a_server_that_crashes_is_started_again_and_one_that_was_stopped_is_not(
    folder: Path,
) -> None:
    watched, told = Stack(load(folder)), list[LocalStackError]()
    watched.start()
    crashed = watched.pid("kafka")
    watched.kill("kafka")
    supervise(watched, Rounds(1), on_crash=told.append, progress=SILENT)
    assert watched.pid("kafka") != crashed
    assert [error.message.split(".")[0] for error in told] == ["the local kafka crashed"]
    Stack(load(folder)).stop()
    supervise(watched, Rounds(3), on_crash=told.append, progress=SILENT)
    assert states(watched) == {"kafka": "stopped", "postgres": "stopped"}
    assert len(told) == 1


def test_a_server_that_is_being_stopped_has_not_crashed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`everstate down` ends the process first, and records afterwards that it was stopped."""
    config = load(folder, store={"dsn": "postgresql://db/shop"})
    watched, told = Stack(config), list[LocalStackError]()
    watched.start()
    watching = threading.Thread(
        target=supervise,
        args=(watched, Rounds(1)),
        kwargs={"on_crash": told.append, "progress": SILENT},
    )

    def ends_while_watched(*arguments: object, **named: object) -> bool:
        done = end(*arguments, **named)  # type: ignore[arg-type]
        if watching.ident is None:
            watching.start()
        return done

    monkeypatch.setattr("everstate.local.stack.end", ends_while_watched)
    Stack(config).stop()
    watching.join()
    assert told == []
    assert states(watched) == {"kafka": "stopped"}
