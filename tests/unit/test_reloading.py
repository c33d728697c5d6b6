"""What `everstate dev` watches, and how it restarts what it runs."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from everstate.cli import cli
from everstate.runtime.reloading import (
    ChildProcesses,
    FileChanges,
    is_source,
    run_reloading,
    source_folders,
    watched,
)

_PATIENCE_S = 60.0


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        *(("hotel.py", True), ("everstate.toml", True), ("views/sales.py", True)),
        *(("test_hotel.py", False), ("hotel_test.py", False), ("conftest.py", False)),
        *(("README.md", False), ("guests.csv", False), ("pyproject.toml", False)),
    ],
)
def test_code_and_settings_are_watched_and_tests_are_not(name: str, wanted: bool) -> None:
    assert is_source(Path("/project") / name) is wanted


def test_folders_of_servers_environments_and_caches_are_not_watched(tmp_path: Path) -> None:
    for name in ("views/inner", ".everstate/kafka", ".git", "__pycache__", "env/lib"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "env" / "pyvenv.cfg").touch()
    found = [str(each.relative_to(tmp_path)) for each in source_folders(tmp_path)]
    assert found == [".", "views", "views/inner"]


def test_a_save_is_seen_also_in_a_new_folder_and_writes_of_servers_are_not(tmp_path: Path) -> None:
    (tmp_path / ".everstate").mkdir()
    with watched(tmp_path) as changes:
        seen: set[str] = set()

        def look() -> set[str]:
            while not changes.empty():
                seen.add(changes.get().name)
            return seen

        def save_until_seen(name: str) -> None:
            # The watch itself takes a moment to begin.
            def saved() -> bool:
                (tmp_path / ".everstate" / "server.py").write_text(f"x = {time.time()}", "utf-8")
                (tmp_path / name).write_text(f"x = {time.time()}", "utf-8")
                time.sleep(0.2)
                return Path(name).name in look()

            wait_until(saved, name)

        save_until_seen("hotel.py")
        (tmp_path / "views").mkdir()
        save_until_seen("views/sales.py")
        (tmp_path / "hotel.py").unlink()
        seen.clear()
        wait_until(lambda: "hotel.py" in look(), "removed")
        assert "server.py" not in seen


def children_with(program: str) -> list[psutil.Process]:
    """The children that run a program: other tests of this process may have servers below it."""
    found = []
    for each in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if program in each.cmdline() and each.status() != psutil.STATUS_ZOMBIE:
                found.append(each)
    return found


class Rig:
    """Two commands that are run by `run_reloading` in a thread."""

    def __init__(self, program: str) -> None:
        self.program = program
        argv = [sys.executable, "-c", program]
        self.commands = ChildProcesses({"run": argv, "serve": [*argv, "serve"]})
        self.changes, self.stop = FileChanges(), threading.Event()
        self.is_right, self.checks, self.told = True, 0, list[str]()

    def check(self) -> frozenset[Path] | None:
        self.checks += 1
        return frozenset({Path("/project/hotel.py")}) if self.is_right else None

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(
            target=run_reloading,
            args=(self.commands, self.changes, self.stop),
            kwargs={"check": self.check, "tell": self.told.append},
        )
        thread.start()
        try:
            yield
        finally:
            self.stop.set()
            thread.join(_PATIENCE_S)
            assert not thread.is_alive()

    def save(self, name: str = "hotel.py") -> None:
        self.changes.put(Path("/project") / name)

    def processes(self) -> set[int]:
        return {each.pid for each in children_with(self.program)}


def test_a_save_starts_both_again_and_the_end_stops_them() -> None:
    rig = Rig("import time; time.sleep(600)")
    with rig.running():
        wait_until(lambda: len(rig.processes()) == 2, "they are started")
        first = rig.processes()
        rig.save("script.py")  # the app does not import it
        wait_until(rig.changes.empty, "it is seen")
        rig.save()
        wait_until(lambda: len(rig.processes() - first) == 2, "they are started again")
        assert not first & rig.processes()
    assert rig.processes() == set()
    assert rig.told == ["hotel.py changed"]


def test_nothing_runs_while_a_file_is_wrong() -> None:
    rig = Rig("import time; time.sleep(600)")
    with rig.running():
        wait_until(lambda: len(rig.processes()) == 2, "they are started")
        rig.is_right = False
        rig.save()
        wait_until(lambda: not rig.processes(), "they are stopped")
        rig.save("missing_module.py")
        wait_until(lambda: rig.checks == 3, "it is checked again")
        assert rig.processes() == set()
        rig.is_right = True
        rig.save()
        wait_until(lambda: len(rig.processes()) == 2, "they are started")
    assert rig.told.count("nothing runs until the error above is corrected and saved") == 2


def test_when_one_ends_by_itself_the_other_is_stopped_until_a_file_changes() -> None:
    rig = Rig("import sys, time; len(sys.argv) > 1 and sys.exit(3); time.sleep(600)")
    with rig.running():
        wait_until(lambda: rig.told, "it has ended")
        assert rig.processes() == set()
        assert rig.told == [
            "`everstate serve` ended with exit code 3; save a file to start it again"
        ]
        assert rig.checks == 1
        rig.save()
        wait_until(lambda: len(rig.told) == 3, "it has ended again")


def test_a_command_that_does_not_end_when_asked_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstate.runtime.reloading._STOP_S", 0.5)
    deaf = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    program = f"{deaf}; open(sys.argv[1], 'w').close(); time.sleep(600)"
    commands = ChildProcesses({"run": [sys.executable, "-c", program, str(tmp_path / "deaf")]})
    commands.start()
    wait_until((tmp_path / "deaf").exists, "it ignores the signal")
    (process,) = children_with(program)
    commands.stop()
    assert not process.is_running()


def test_a_folder_that_goes_before_it_is_watched_does_not_end_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walks: list[int] = []

    def walked(folder: Path) -> list[Path]:
        walks.append(1)
        gone = [folder / "gone"] if len(walks) == 1 else []
        return [*source_folders(folder), *gone]

    monkeypatch.setattr("everstate.runtime.reloading.source_folders", walked)
    with watched(tmp_path) as changes:

        def seen() -> bool:
            (tmp_path / "hotel.py").write_text(f"x = {time.time()}", "utf-8")
            time.sleep(0.2)
            return not changes.empty()

        wait_until(seen, "a save is seen")


def test_what_an_app_prints_is_not_between_the_names_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loud.py").write_text(
        "import everstate.app\nprint('hello')\napp = everstate.app.App('shop')\n"
    )
    servers = 'log.bootstrap_servers = "127.0.0.1:1"\nstore.dsn = "postgresql://u@127.0.0.1:1/x"\n'
    (tmp_path / "everstate.toml").write_text(f'{servers}project.app = "loud:app"\n')
    monkeypatch.setattr(sys, "path", list(sys.path))
    done = CliRunner().invoke(cli, ["-C", str(tmp_path), "dev", "--check"])
    assert "hello" in done.stderr
    assert str(tmp_path / "loud.py") in json.loads(done.stdout)
