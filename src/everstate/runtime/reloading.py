"""Watches the source files of a project, and runs commands that are restarted together."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final

from everstate.config import CONFIG_FILE
from everstate.runtime.supervisor import end_all

_NOT_WATCHED: Final = ("test_*.py", "*_test.py", "conftest.py")
_NO_SOURCES: Final = frozenset({"__pycache__", "node_modules", "site-packages"})
_STOP_S: Final = 90.0
"""`everstate run` needs up to a minute to stop its roles."""
_POLL_S: Final = 0.2

NO_BYTECODE: Final = {"PYTHONDONTWRITEBYTECODE": "1"}
"""Variables of the children, which write no compiled files: Python recognises one as old by the
size and the second of its source, and two saves may have both in common."""


def is_source(path: Path) -> bool:
    """Whether a change of this file changes what runs: Python and settings, but no tests."""
    is_code = path.suffix == ".py" and not any(path.match(pattern) for pattern in _NOT_WATCHED)
    return is_code or path.name == CONFIG_FILE


def source_folders(folder: Path) -> list[Path]:
    """The folder and its subfolders, without hidden ones, environments and caches.

    Servers write in `.everstate` all the time, so that folder is not watched at all.
    """
    found = []
    for place, names, _ in os.walk(folder):
        names[:] = sorted(
            name
            for name in names
            if not name.startswith(".")
            and name not in _NO_SOURCES
            and not (Path(place) / name / "pyvenv.cfg").exists()
        )
        found.append(Path(place))
    return found


FileChanges = SimpleQueue[Path]
"""Source files that changed, in the order of their saves."""


@contextmanager
def watched(folder: Path) -> Iterator[FileChanges]:
    """Watch a project's source files during the block; a save is reported within a second."""
    # Imported here: it is in an extra, and loads a library.
    from watchfiles import watch

    changes, ended = FileChanges(), threading.Event()

    def look_at(known: Sequence[Path]) -> None:
        """Report changes in these folders, until a folder comes or goes."""
        for found in watch(
            *known,
            watch_filter=lambda _, path: is_source(Path(path)) or Path(path).is_dir(),
            stop_event=ended,
            recursive=False,
            debounce=400,
            rust_timeout=1000,
            raise_interrupt=False,
        ):
            for path in sorted({Path(path) for _, path in found}):
                if is_source(path):
                    changes.put(path)
            if source_folders(folder) != known:
                return

    def look() -> None:
        while not ended.is_set():
            # A new folder is a change of the one around it: then the list is made again.
            try:
                look_at(source_folders(folder))
            except OSError:
                # A folder of the list went before it was watched.
                ended.wait(_POLL_S)

    thread = threading.Thread(target=look, name="watch", daemon=True)
    thread.start()
    try:
        yield changes
    finally:
        ended.set()
        thread.join()


class ChildProcesses:
    """Child processes that are started and stopped together; they print to this terminal."""

    def __init__(self, argv_of: Mapping[str, Sequence[str]]) -> None:
        self._argv_of = argv_of
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start each of them, in a session of its own: Ctrl-C reaches only this process."""
        for name, argv in self._argv_of.items():
            self._running[name] = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **NO_BYTECODE},
                start_new_session=True,
            )

    def ended(self) -> tuple[str, int] | None:
        """Name and exit code of one that has ended by itself; ``None``: all run."""
        for name, process in self._running.items():
            if (code := process.poll()) is not None:
                return name, code
        return None

    def stop(self) -> None:
        """End all of them together; those that do not end when asked are killed."""
        end_all(self._running.values(), _STOP_S)
        self._running.clear()


def run_reloading(
    commands: ChildProcesses,
    changes: FileChanges,
    stop: threading.Event,
    *,
    check: Callable[[], frozenset[Path] | None],
    tell: Callable[[str], None],
) -> None:
    """Run the commands until ``stop`` is set, and start them again when a file of theirs changes.

    ``check()`` returns these files; or ``None`` after it has reported an error in one of them: then
    nothing runs until any source file changes. When a command ends by itself, all are stopped until
    then.
    """
    try:
        changed: list[Path] = []
        while not stop.is_set():
            if changed:
                tell(f"{', '.join(sorted({path.name for path in changed}))} changed")
            files = check()
            commands.stop()
            if files is None:
                tell("nothing runs until the error above is corrected and saved")
            elif not stop.is_set():
                commands.start()
            changed = _next_changes(commands, changes, stop, files, tell)
    finally:
        commands.stop()


def _next_changes(
    commands: ChildProcesses,
    changes: FileChanges,
    stop: threading.Event,
    files: frozenset[Path] | None,
    tell: Callable[[str], None],
) -> list[Path]:
    """Wait for changes of these files, or of any (``None``), until ``stop`` is set."""
    while not stop.is_set():
        with suppress(Empty):
            found = {changes.get(timeout=_POLL_S)}
            while not changes.empty():
                found.add(changes.get())
            if mine := [each for each in sorted(found) if files is None or each.resolve() in files]:
                return mine
        if (ended := commands.ended()) is not None:
            name, code = ended
            commands.stop()
            tell(f"`everstate {name}` ended with exit code {code}; save a file to start it again")
            files = None
    return []
