"""Runs the code blocks of a documentation page, as a reader would.

```X file=NAME   writes the file; ```python   runs it as a script; ```console   runs each `$` line
and compares the lines below it, in which `…` stands for anything and space for any space.
`# exit N` after a command is the exit code that is expected, `&` leaves it running until the page
ends.
Other blocks are only read.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

_FENCE = re.compile(r"^```(\S*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_EXIT = re.compile(r"\s+# exit (\d+)$")
_JAVA_SAID = re.compile(r"^Picked up JAVA_TOOL_OPTIONS.*\n", re.MULTILINE)
"""What our own setting of the tests' JVMs makes them say."""
_PATIENCE_S = 300.0
_RUNNING_S = 420.0
_PAUSE_S_MAX = 5.0


@dataclass(frozen=True)
class Block:
    """One code block and the line of the page at which it begins."""

    language: str
    file: str | None
    text: str
    line: int


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
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def follow(self, page: Path) -> int:
        """Do what the page says; returns how many blocks were run."""
        done = 0
        for block in blocks(page):
            where = f"{page.name}:{block.line}"
            if block.file is not None:
                (self.folder / block.file).write_text(block.text, "utf-8")
            elif block.language == "python":
                code, output = self._run([sys.executable, "-c", block.text])
                assert code == 0, f"{where}\n{output}"
            elif block.language == "console":
                self._console(block, where)
            else:
                continue
            done += 1
        return done

    def stop(self) -> None:
        """End what the page left running."""
        for process in self.running:
            process.send_signal(signal.SIGTERM)
        for process in self.running:
            process.wait(90)

    @staticmethod
    def matches(expected: str, output: str) -> bool:
        """Whether an output is what the page shows; `…` is anything, space is any space."""
        words = " ".join(expected.split())
        if not words:
            return True
        pattern = ".*".join(re.escape(part.strip()) for part in words.split("…"))
        return re.search(pattern, " ".join(output.split())) is not None

    def _console(self, block: Block, where: str) -> None:
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            line, _, expected = part.partition("\n")
            wanted = _EXIT.search(line)
            command = _EXIT.sub("", line)
            argv = [_program(word, at) for at, word in enumerate(shlex.split(command))]
            flat = [word for words in argv for word in words]
            if flat[-1] == "&":
                self._leave(flat[:-1])
                continue
            self._expect(flat, int(wanted[1]) if wanted else 0, expected, f"{where} $ {line}")

    def _leave(self, argv: list[str]) -> None:
        with open(self.folder / "background.log", "ab") as log:
            process = subprocess.Popen(
                argv,
                cwd=self.folder,
                env=self._env(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.running.append(process)

    def _expect(self, argv: list[str], code: int, expected: str, where: str) -> None:
        """Run a command; while something runs beside it, its answer may come later."""
        deadline = time.monotonic() + (_RUNNING_S if self.running else 0.0)
        pause_s = 1.0
        while True:
            got, output = self._run(argv)
            if got == code and self.matches(expected, output):
                return
            if time.monotonic() > deadline:
                log = self.folder / "background.log"
                beside = log.read_text("utf-8")[-3000:] if log.exists() else ""
                raise AssertionError(f"{where}\nexit {got}, expected {code}\n{output}\n{beside}")
            # Each try is a process of its own, which takes its time from what it waits for.
            time.sleep(pause_s)
            pause_s = min(_PAUSE_S_MAX, 2 * pause_s)

    def _run(self, argv: list[str]) -> tuple[int, str]:
        done = subprocess.run(
            argv,
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


def _program(word: str, at: int) -> list[str]:
    if at > 0:
        return [word]
    known = {"everstate": [sys.executable, "-m", "everstate.cli"], "python": [sys.executable]}
    return known.get(word, [word])


@pytest.fixture(scope="session")
def make_reader() -> type[Reader]:
    """Makes somebody who follows pages in a folder, with an environment."""
    return Reader


@pytest.fixture
def reader(stack: Any, database: str, tmp_path: Path, make_reader: Any) -> Iterator[Any]:
    """A reader with an empty project folder, on the servers of this run."""
    env = {
        "EVERSTATE_LOG_BOOTSTRAP_SERVERS": stack.bootstrap_servers,
        "EVERSTATE_STORE_DSN": database,
        "EVERSTATE_LOG_PREFIX": f"t{uuid.uuid4().hex[:12]}",
        "EVERSTATE_PIPELINE_MASTER": "local[2]",
        "EVERSTATE_PIPELINE_DRIVER_MEMORY": "2g",
        "PYTHONPATH": str(tmp_path),
    }
    made = make_reader(tmp_path, env)
    yield made
    made.stop()
