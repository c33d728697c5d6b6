"""Progress reports of the local stack: a bar on a terminal, else plain lines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from rich.console import Console

_PLAIN_EVERY_S = 5.0

Advance = Callable[[int], None]
"""Called with the number of bytes just received (negative: discarded again)."""


class StackProgress(Protocol):
    """Receiver of the stack's reports; methods may be called from several threads."""

    def step(self, text: str) -> None:
        """Report one finished step, as a sentence."""

    def fetching(self, files: int, total_bytes: int) -> AbstractContextManager[Advance]:
        """Report the start of a download of this size; the context lasts as long as it."""


class SentenceProgress:
    """Passes each report to a function, as a sentence; a download is one sentence."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show

    def step(self, text: str) -> None:
        """Report one step."""
        self._show(text)

    @contextmanager
    def fetching(self, files: int, total_bytes: int) -> Iterator[Advance]:
        """Report the start of a download."""
        self._show(f"fetching {files} files, {total_bytes / 1e6:,.1f} MB")
        yield lambda _size: None


SILENT: Final = SentenceProgress(lambda _text: None)
"""Reports nothing."""


class ConsoleProgress:
    """Reports on a Rich console: a bar with bytes, rate and time left; plain lines when piped."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def step(self, text: str) -> None:
        """Print one line."""
        # Imported here: needed only when something is started.
        from rich.text import Text

        self._console.print(Text.assemble(("✓", "green"), " ", text))

    @contextmanager
    def fetching(self, files: int, total_bytes: int) -> Iterator[Advance]:
        """Show the download until the context ends."""
        if self._console.is_terminal:
            with self._bar(files, total_bytes) as advance:
                yield advance
            return
        plain = _PlainDownload(self._console, files, total_bytes)
        yield plain.advance
        plain.report()

    @contextmanager
    def _bar(self, files: int, total_bytes: int) -> Iterator[Advance]:
        from rich import progress

        bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        with bar:
            task = bar.add_task(f"fetching {files} files", total=total_bytes)
            yield lambda size: bar.advance(task, size)
        self.step(f"{files} files fetched, {total_bytes / 1e6:,.1f} MB")


class _PlainDownload:
    """A line at the start, one every few seconds, and one at the end."""

    def __init__(self, console: Console, files: int, total_bytes: int) -> None:
        self._console, self._total = console, total_bytes
        self._done, self._lock = 0, threading.Lock()
        self._started = self._reported_s = time.monotonic()
        console.print(f"fetching {files} files, {total_bytes / 1e6:,.1f} MB", highlight=False)

    def advance(self, size: int) -> None:
        with self._lock:
            self._done += size
            due = time.monotonic() - self._reported_s > _PLAIN_EVERY_S
            if due:
                self._reported_s = time.monotonic()
        if due:
            self.report()

    def report(self) -> None:
        rate = self._done / max(time.monotonic() - self._started, 1e-3)
        left_s = (self._total - self._done) / rate if rate else 0.0
        self._console.print(
            f"  {self._done / 1e6:,.1f} of {self._total / 1e6:,.1f} MB, "
            f"{rate / 1e6:,.1f} MB/s, {left_s:,.0f} s left",
            highlight=False,
        )
