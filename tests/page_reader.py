"""Runs the code blocks of a documentation page, as a reader would.

```X file=NAME   writes the file; ```python   runs it as a script; ```console   runs each `$` line
and compares the lines below it, in which `…` stands for anything and space for any space.
`# exit N` after a command is the exit code that is expected, `&` leaves it running until the page
ends, and `cd` changes the folder of what follows.
Other blocks are only read.

Commands and scripts run in this process, with its Spark session: an interpreter and a JVM for each
would take most of the time. A reader who is `real` starts processes, as every `&` does.
"""

from __future__ import annotations

import io
import logging
import os
import re
import runpy
import shlex
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

_FENCE = re.compile(r"^```(\S*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_EXIT = re.compile(r"\s+# exit (\d+)$")
_JAVA_SAID = re.compile(r"^Picked up JAVA_TOOL_OPTIONS.*\n", re.MULTILINE)
"""What our own setting of the tests' JVMs makes them say."""
_PATIENCE_S = 300.0
_RUNNING_S = 420.0
_STOP_S = 90.0
_PAUSE_S_MIN = 0.5
_PAUSE_S_MAX = 5.0
_NUMBER = re.compile(r"[0-9a-f]*\d[0-9a-f,.]*")


@dataclass(frozen=True)
class Block:
    """One code block and the line of the page at which it begins."""

    language: str
    file: str | None
    text: str
    line: int

    @property
    def runs(self) -> bool:
        """Whether it is a script or commands."""
        return self.file is None and self.language in ("python", "console")


def blocks(page: Path) -> Iterator[Block]:
    """The code blocks of a page, in order."""
    text = page.read_text("utf-8")
    for match in _FENCE.finditer(text):
        named = re.search(r"file=(\S+)", match[2])
        line = text.count("\n", 0, match.start()) + 1
        yield Block(match[1], named[1] if named else None, match[3], line)


@dataclass
class Reader:
    """Somebody who follows a page step by step in a folder."""

    folder: Path
    env: Mapping[str, str] = field(default_factory=dict)
    real: bool = True
    """Each command and script is a process of its own."""
    figures: bool = True
    """Numbers in an output are those of the page; else any number will do for one."""
    running: list[subprocess.Popen[bytes] | Roles] = field(default_factory=list)

    def follow(self, page: Path) -> int:
        """Do what the page says; returns how many blocks were run."""
        done = 0
        for block in blocks(page):
            where = f"{page.name}:{block.line}"
            if block.file is not None:
                (self.folder / block.file).write_text(block.text, "utf-8")
            elif block.language == "python":
                code, output = self.run(["python", "-c", block.text])
                assert code == 0, f"{where}\n{output}"
            elif block.language == "console":
                self._console(block, where)
            else:
                continue
            done += 1
        return done

    def stop(self) -> None:
        """End what the page left running."""
        for each in self.running:
            each.terminate()
        for each in self.running:
            with suppress(subprocess.TimeoutExpired):
                each.wait(_STOP_S)
        left = [each for each in self.running if each.poll() is None]
        for each in left:
            each.kill()
        assert left == []

    def _console(self, block: Block, where: str) -> None:
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            line, _, expected = part.partition("\n")
            wanted = _EXIT.search(line)
            argv = shlex.split(_EXIT.sub("", line))
            if argv[-1] == "&":
                self._leave(argv[:-1])
                continue
            if argv[0] == "cd":
                self.folder = self.folder / argv[1]
                continue
            self._expect(argv, int(wanted[1]) if wanted else 0, expected, f"{where} $ {line}")

    def _leave(self, argv: list[str]) -> None:
        if argv[:2] == ["everstate", "run"] and not self.real:
            self.running.append(Roles(argv[2:], self.folder, self.env))
            return
        with open(self.folder / "background.log", "ab") as log:
            process = subprocess.Popen(
                _program(argv),
                cwd=self.folder,
                env=self._env(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.running.append(process)

    def _expect(self, argv: list[str], code: int, expected: str, where: str) -> None:
        """Run a command. What only reads may be asked again while something runs beside it."""
        may_repeat = bool(self.running) and only_reads(argv)
        deadline = time.monotonic() + (_RUNNING_S if may_repeat else 0.0)
        pause_s = _PAUSE_S_MIN
        while True:
            got, output = self.run(argv)
            if got == code and matches(expected, output, figures=self.figures):
                return
            if time.monotonic() > deadline:
                log = self.folder / "background.log"
                beside = log.read_text("utf-8")[-3000:] if log.exists() else ""
                raise AssertionError(f"{where}\nexit {got}, expected {code}\n{output}\n{beside}")
            time.sleep(pause_s)
            pause_s = min(_PAUSE_S_MAX, 2 * pause_s)

    def run(self, argv: list[str]) -> tuple[int, str]:
        if argv[0] in ("everstate", "python") and not self.real:
            return run_here(argv, self.folder, self.env)
        done = subprocess.run(
            _program(argv),
            cwd=self.folder,
            env=self._env(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_PATIENCE_S,
            check=False,
        )
        return done.returncode, _JAVA_SAID.sub("", done.stdout.decode())

    def _env(self) -> dict[str, str]:
        return {**os.environ, **self.env}


class Roles:
    """`everstate run` or `everstate run --only ROLE`, in threads of this process."""

    def __init__(self, options: list[str], folder: Path, env: Mapping[str, str]) -> None:
        from everstate.cli.console import load_app
        from everstate.local import project_config
        from everstate.roles import Role, processes_of, run_roles

        self._stop = threading.Event()
        self._folder, self._env = folder, env
        with as_if_alone(folder, env):
            config = project_config(folder)
            app = load_app(None, config)
        named = {options[1]: [Role(options[1])]} if options else processes_of(config, app)
        self._threads = [
            threading.Thread(target=run_roles, args=(roles, config, app, self._stop), name=name)
            for name, roles in named.items()
        ]
        for thread in self._threads:
            thread.start()

    def terminate(self) -> None:
        """Ask the roles to end."""
        self._stop.set()

    kill = terminate

    def wait(self, seconds: float) -> None:
        """Wait until they have ended."""
        for thread in self._threads:
            thread.join(seconds)

    def poll(self) -> int | None:
        """``None`` while one of them runs."""
        return None if any(thread.is_alive() for thread in self._threads) else 0


def matches(expected: str, output: str, *, figures: bool = True) -> bool:
    """Whether an output is what the page shows; `…` is anything, space is any space."""
    words = " ".join(expected.split())
    if not words:
        return True
    parts = [part.strip() for part in words.split("…")]
    if figures:
        patterns = [re.escape(part) for part in parts]
    else:
        texts = ([re.escape(text) for text in _NUMBER.split(part)] for part in parts)
        patterns = [_NUMBER.pattern.join(each) for each in texts]
    return re.search(".*".join(patterns), " ".join(output.split())) is not None


_READS = (
    *("get", "list", "history", "explain", "status", "plan", "views show", "views list"),
    *("views search", "views explain"),
    *("gaps list", "psql"),
    *("outbox status", "cdc status", "cdc held", "commands parked", "commands show"),
)


def only_reads(argv: list[str]) -> bool:
    """Whether a command asks how things are now: a proof, or what changes anything, does not."""
    words = argv[3:] if argv[1:2] == ["-C"] else argv[1:]
    if argv[0] == "everstate":
        return words[0] in _READS or " ".join(words[:2]) in _READS
    if argv[0] == "python":
        return argv[1] in ("read.py", "read_groups.py")
    return argv[0] == "curl" and not {"-X", "-d", "--json", "--data"} & set(argv)


def run_here(argv: list[str], folder: Path, env: Mapping[str, str]) -> tuple[int, str]:
    """Run `everstate …`, `python FILE …` or `python -c TEXT` in this process; exit code, output."""
    words = io.StringIO()
    with as_if_alone(folder, env), redirect_stdout(words), redirect_stderr(words):
        try:
            if argv[0] == "everstate":
                from everstate.cli import cli

                cli(argv[1:], prog_name="everstate")
            elif argv[1] == "-c":
                compiled = compile(argv[2], "<page>", "exec", dont_inherit=True)
                exec(compiled, {"__name__": "__main__"})
            else:
                sys.argv = argv[1:]
                runpy.run_path(str(folder / argv[1]), run_name="__main__")
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            return code, words.getvalue()
        except Exception:
            return 1, words.getvalue() + traceback.format_exc()
    return 0, words.getvalue()


@contextmanager
def as_if_alone(folder: Path, env: Mapping[str, str]) -> Iterator[None]:
    """A process of our own, as far as a command can see: folder, environment, modules, logging."""
    log = logging.getLogger("everstate")
    kept = log.handlers, log.propagate, log.level, sys.path[:], sys.argv, Path.cwd()
    start = f"{folder}{os.sep}"
    for name in [path.stem for path in folder.glob("*.py")]:
        # Another test's project may have a module of this name.
        if not str(getattr(sys.modules.get(name), "__file__", start)).startswith(start):
            del sys.modules[name]
    try:
        with mock.patch.dict(os.environ, env):
            os.chdir(folder)
            sys.path.insert(0, str(folder))
            yield
    finally:
        log.handlers, log.propagate, level, sys.path[:], sys.argv, before = kept
        log.setLevel(level)
        os.chdir(before)
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(start):
                del sys.modules[name]


def _program(argv: list[str]) -> list[str]:
    known = {
        "everstate": [sys.executable, "-m", "everstate.cli"],
        "pytest": [sys.executable, "-m", "pytest"],
        "python": [sys.executable],
    }
    return [*known.get(argv[0], argv[:1]), *argv[1:]]
