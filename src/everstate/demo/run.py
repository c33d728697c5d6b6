"""The whole demonstration: from an empty folder to answers and their proofs."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from rich.console import Console

from everstate.config import CONFIG_FILE, Config, load
from everstate.demo import answers, show
from everstate.demo.feed import Feeder
from everstate.demo.play import Timetable, read_timetable
from everstate.demo.watch import Course, Display, PeakMemory, Troubles, Watcher
from everstate.errors import LocalStackError, Unavailable
from everstate.local import ConsoleProgress, Stack
from everstate.private import private_folder
from everstate.runtime.supervisor import end_all, role_argv

APP = "everstate.demo.flights:app"
_SETTINGS = f"""\
[project]
app = "{APP}"
data_dir = "data"

[archive]
trigger_s = 5
"""
_DAYS = "days"
"""Name of a file in the data folder, with the days that are played into it."""
_POLL_S = 0.25
_STALL_S = 300.0
_STOP_S = 90.0
_TAIL_LINES = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What to play and where; ``folder`` is the demonstration's own project folder."""

    folder: Path
    first: date
    last: date
    keep: bool = False
    """Continue with the folder's data; otherwise the folder is emptied first."""
    stay: bool = False
    """Keep everything running after the answers, until Ctrl-C."""
    picture: Path | None = None
    """File for an SVG of the board and the proofs, as this terminal shows them."""


def run_demo(options: DemoOptions, console: Console) -> None:
    """Play the flights and answer the questions; all started processes are stopped at the end.

    Raises VerificationFailed when a proof does not hold, and LocalStackError when a server or the
    pipeline ends early.
    """
    began = time.monotonic()
    config = _prepare(options)
    console.print(
        f"Flights from New York, {options.first:%-d %B} to {options.last:%-d %B %Y}, "
        f"in {_shown(options.folder)}",
        highlight=False,
    )
    stack = Stack(config)
    try:
        running = stack.start(ConsoleProgress(console))
        timetable = read_timetable(options.first, options.last)
        console.print(
            f"[green]✓[/] {timetable.flights:,} real flights make {timetable.changes:,} changes",
            highlight=False,
        )
        memory = PeakMemory()
        with _child(options, running) as child:
            course = _play(running, timetable, stack, child, memory, console)
            console.record = options.picture is not None
            today = answers.ask_board(running, console, _shown(options.folder))
            console.record = False
            answers.ask(running, console, _shown(options.folder), today)
            if options.stay:
                _wait_for_interrupt(console)
        console.record = options.picture is not None
        answers.prove(running, console, _shown(options.folder))
        if options.picture is not None:
            options.picture.write_text(show.picture(console), encoding="utf-8")
        answers.farewell(console, _shown(options.folder), course, memory, time.monotonic() - began)
    finally:
        stack.stop()


def _prepare(options: DemoOptions) -> Config:
    """Create the project folder; data of an earlier demonstration is deleted, unless it is kept.

    Raises LocalStackError, and changes nothing, when the folder is not the demonstration's own, or
    when the data to continue with is that of other days.
    """
    folder = options.folder
    days = f"{options.first} to {options.last}"
    settings = folder / CONFIG_FILE
    if settings.is_file():
        config = load(folder)
        if config.project.app != APP:
            raise _not_ours(folder)
        kept = config.project.data_dir / _DAYS
        if options.keep and kept.is_file() and (former := kept.read_text("utf-8")) != days:
            raise LocalStackError(
                f"{_shown(folder)} has the flights of {former}, and not those of {days}.",
                advice="Give those days with --keep, or leave out --keep to begin again.",
            )
        if not options.keep:
            Stack(config).stop()
            shutil.rmtree(config.project.data_dir, ignore_errors=True)
            settings.unlink()
    elif folder.exists() and any(folder.iterdir()):
        raise _not_ours(folder)
    private_folder(folder)
    if not settings.is_file():
        settings.write_text(_SETTINGS, encoding="utf-8")
    config = load(folder)
    private_folder(config.project.data_dir)
    (config.project.data_dir / _DAYS).write_text(days, "utf-8")
    return config


def _not_ours(folder: Path) -> LocalStackError:
    return LocalStackError(
        f"{folder} holds something else; it is not emptied.",
        advice="Give another folder with --folder.",
    )


@contextmanager
def _child(options: DemoOptions, config: Config) -> Iterator[subprocess.Popen[bytes]]:
    """`everstate run` as a child process, which ends with this one."""
    log = config.project.data_dir / "logs" / "run.log"
    # Its own process group: this process passes Ctrl-C on, so that current work is finished.
    with open(log, "ab") as output:
        child = subprocess.Popen(
            role_argv((), options.folder, APP),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=os.environ,
        )
    try:
        yield child
    finally:
        end_all([child], _STOP_S)


def _play(
    config: Config,
    timetable: Timetable,
    stack: Stack,
    child: subprocess.Popen[bytes],
    memory: PeakMemory,
    console: Console,
) -> Course:
    """Feed the store and watch until every change is in the views and in the archive."""
    feeder, watcher = Feeder(config, timetable), Watcher(config, "flight")
    feeder.prepare()
    course = Course(timetable.changes, before=feeder.written)
    display = Display(console, course)
    troubles = Troubles(console, config.project.data_dir)
    moved_at, moved = time.monotonic(), -1
    pids = [os.getpid(), *(stack.pid(name) for name in stack.names)]
    try:
        while True:
            sample = watcher.sample(feeder.written, feeder.clock)
            course.add(sample)
            display.update()
            troubles.look()
            memory.sample(pids)
            if sample.lag_seconds is not None:
                # Spark has started, so the views can follow the store without a backlog.
                feeder.start()
            if sample.applied:
                feeder.go_on()
            if feeder.error is not None:
                raise feeder.error
            if min(sample.applied, sample.archived) >= timetable.changes:
                return course
            _check(child, config, stack)
            progress = sample.written + sample.published + sample.applied + sample.archived
            if progress != moved:
                moved_at, moved = time.monotonic(), progress
            elif time.monotonic() - moved_at > _STALL_S:
                reasons = "".join(f" {reason}" for reason in troubles.told)
                raise Unavailable(
                    f"no progress for {_STALL_S:.0f} s.{reasons}",
                    advice=f"See the logs in {config.project.data_dir / 'logs'}.",
                )
            time.sleep(_POLL_S)
    finally:
        display.close()
        feeder.stop()
        watcher.close()


def _check(child: subprocess.Popen[bytes], config: Config, stack: Stack) -> None:
    stack.check()
    if child.poll() is None:
        return
    log = config.project.data_dir / "logs" / "run.log"
    tail = "\n".join(log.read_text("utf-8", errors="replace").splitlines()[-_TAIL_LINES:])
    raise LocalStackError(
        f"`everstate run` ended with code {child.returncode}. The end of its log:\n{tail}\n",
        advice=f"The whole log is {log}.",
    )


def _wait_for_interrupt(console: Console) -> None:
    console.print("\neverything keeps running; Ctrl-C runs the proofs and stops it")
    try:
        while True:
            time.sleep(1)
    except KeyboardInterrupt:
        console.print()


def _shown(folder: Path) -> str:
    """The folder as a user would type it."""
    try:
        return str(folder.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(folder)
