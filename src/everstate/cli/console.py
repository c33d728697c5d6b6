"""Shared by the verbs: consoles, settings, the app, tables, JSON, and printing of errors."""

from __future__ import annotations

import errno
import getpass
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from everstate.changes.row_json import row_json
from everstate.config import CONFIG_FILE, Config, load
from everstate.errors import EverstateError, InvalidConfig, InvalidProject
from everstate.telemetry import safe_text

if TYPE_CHECKING:
    from everstate.app import App

_ANY_WIDTH = 1_000_000
_PACKAGE = Path(__file__).parents[1]


class SafeConsole(Console):
    """A console that is safe for text from any writer.

    Text is not parsed as markup unless requested: style with ``style=`` or a rich ``Text``. Control
    characters are escaped by :func:`~everstate.telemetry.safe_text`.
    """

    def __init__(self, *, markup: bool = False, **options: Any) -> None:
        super().__init__(markup=markup, emoji=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Segments to print; every text goes through here."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else safe_text(text), style, control)


out = SafeConsole(soft_wrap=True)
"""Results."""

err = SafeConsole(stderr=True, soft_wrap=True)
"""Progress and errors."""

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON value on stdout.")]
AppOption = Annotated[
    str | None, typer.Option("--app", help="The App as module:attribute. Default: project.app.")
]
WaitOption = Annotated[
    str | None,
    typer.Option("--wait-for", help="Wait until the view has reached this token."),
]


READING: Final = ("postgres",)
"""The servers of the local stack that are needed to read store or views."""

SIGNS: Final[Mapping[str, tuple[str, str]]] = {
    "ok": ("✓", "green"),
    "warn": ("!", "yellow"),
    "fail": ("✗", "red"),
}
"""Sign and style of an outcome, for ``Text.assemble``."""


@dataclass
class Session:
    """The project that the command line names."""

    project: Path

    @cached_property
    def config(self) -> Config:
        """Settings of the project, read once."""
        return load(self.project)


@dataclass
class AppSession(Session):
    """A project and the app in it; a verb that takes it has the option `--app`."""

    spec: str | None

    @property
    def has_app(self) -> bool:
        """Whether the command line or everstate.toml names an app."""
        return bool(self.spec or self.config.project.app)

    def app(self, *, views: bool = True) -> App:
        """The app; ``views`` and errors as for :func:`load_app`."""
        return load_app(self.spec, self.config, views=views)

    def connected(
        self, *, needs: Collection[str] | None = None, views: bool = True
    ) -> tuple[Config, App]:
        """Settings with the running servers' addresses, and the app.

        The project is checked before the servers, so that errors in files are reported first.
        ``needs`` as for :func:`everstate.local.connect`.
        """
        config, app = self.config, self.app(views=views)
        for name in config.log.entities.keys() - app.entities.keys():
            known = f"an entity type of the app: {', '.join(app.entities)}"
            raise InvalidConfig("the name of a table in log.entities", name, known)
        if needs == READING and config.log.bootstrap_servers and config.store.dsn:
            return config, app
        # Imported here: with servers of your own a look-up needs no local stack: it takes 40 ms.
        from everstate.local import resolve

        return resolve(config, needs=needs), app


def tell_error(error: EverstateError) -> None:
    """Print an error's message and advice to stderr."""
    err.print(Text.assemble(("error:", "bold red"), " ", error.message))
    if error.advice:
        err.print(error.advice, style="cyan", highlight=False)


_SIGN_OF_LIFE_S: Final = 10.0


class Telling:
    """Reports progress: call it with the next step, and :meth:`now` with the progress of it."""

    def __init__(self, step: Callable[[str], None], now: Callable[[str], None]) -> None:
        self._step, self.now = step, now

    def __call__(self, step: str) -> None:
        """Report the next step."""
        self._step(step)


class _Step:
    """A step of work, printed with the seconds since the work began."""

    def __init__(self, text: str) -> None:
        self.text, self._begun = text, time.monotonic()

    def __rich__(self) -> Text:
        # A plain string would be parsed as markup.
        return Text(f"{self.text} ({time.monotonic() - self._begun:.0f} s)")


@contextmanager
def working(text: str) -> Iterator[Telling]:
    """Report progress while the block runs, with the seconds since it began.

    On a terminal it shows a spinner; otherwise it writes a line for each step, and one every ten
    seconds, so that a log shows that it is alive, and its progress.
    """
    step, ended = _Step(text), threading.Event()

    def change(text: str) -> None:
        step.text = text

    if err.is_terminal:
        with err.status(step):
            yield Telling(change, change)
        return

    def say(text: str) -> None:
        change(text)
        err.print(text, highlight=False)

    def live() -> None:
        while not ended.wait(_SIGN_OF_LIFE_S):
            err.print(step)

    say(text)
    thread = threading.Thread(target=live, name="sign of life", daemon=True)
    thread.start()
    try:
        yield Telling(say, change)
    finally:
        ended.set()
        thread.join()


def print_json(value: Any, *, is_line: bool = False) -> None:
    """Print one value as JSON to stdout; datetimes, UUIDs and dataclasses are taken.

    ``is_line``: on one line, for a verb that prints one value after the other.
    """
    if sys.stdout is None:  # as Python has it for `>&-`
        raise OSError(errno.EBADF, "the result cannot be printed, because it is closed", "stdout")
    # In JSON unsafe characters occur only in strings, where an escape such as \\u009b is equal.
    sys.stdout.write(safe_text(row_json(value, indented=not is_line).decode()) + "\n")
    sys.stdout.flush()


def user_name() -> str:
    """Name of the user who runs this process; without one, as in containers, the number."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    title: str | None = None,
    exact: bool = False,
) -> None:
    """Print rows as a table; ``None`` is an empty cell, numbers are right-aligned.

    ``exact``: floats keep all digits, because they are values of the user; our own figures have
    three places.
    """
    shown = [list(row) for row in rows]
    shown_title = None if title is None else safe_text(title)
    grid = Table(title=shown_title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for at, column in enumerate(columns):
        numeric = any(isinstance(row[at], int | float) for row in shown)
        side: Literal["left", "right"] = "right" if numeric else "left"
        grid.add_column(safe_text(column), justify=side, overflow="fold")
    for row in shown:
        grid.add_row(*("" if cell is None else safe_text(_cell(cell, exact)) for cell in row))
    if out.is_terminal:
        out.print(grid, soft_wrap=False)
        return
    # A pipe has no width: rows are not wrapped there, so that grep finds them.
    endless = SafeConsole(width=_ANY_WIDTH)
    wide = SafeConsole(width=endless.measure(grid).maximum)
    wide.print(grid, soft_wrap=False)


def load_app(spec: str | None, config: Config, *, views: bool = True) -> App:
    """The App that ``spec`` or `project.app` names as ``module:attribute``.

    ``views``: whether the verb needs its views; otherwise they are not compiled now. A view that
    is refused does not affect others (`App.refused_views`). Modules can be imported from the
    project's folder and the working folder. Raises InvalidConfig with the setting to change, and
    InvalidProject naming the line of an error in the module itself.
    """
    from everstate.app import App
    from everstate.views.declaring import refused_views_recorded, views_compiled_later

    field = "--app" if spec else "project.app"
    if not spec and not config.project.app and not (config.folder / CONFIG_FILE).is_file():
        raise InvalidProject(
            f"{config.folder} has no {CONFIG_FILE}, and --app is not given.",
            advice="Change to the project's folder, or name it with -C before the verb.",
        )
    spec = spec or config.project.app
    expected = f"module:attribute of an App (--app, or app under [project] in {CONFIG_FILE})"
    if not spec:
        raise InvalidConfig(field, None, expected)
    module_name, separator, attribute = spec.partition(":")
    if not (module_name and separator and attribute):
        raise InvalidConfig(field, spec, expected)
    for folder in (str(Path.cwd()), str(config.folder)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    try:
        with refused_views_recorded(), nullcontext() if views else views_compiled_later():
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as cause:
        missing = cause.name or ""
        if module_name != missing and not module_name.startswith(missing + "."):
            raise _refused_app(module_name, config, cause) from cause
        places = f"in {config.folder} nor on Python's path"
        wanted = f"module:attribute, and there is no module {missing!r} {places}"
        raise InvalidConfig(field, spec, wanted) from cause
    except EverstateError as error:
        error.args = (f"{_line_of(module_name, config, error)}: {error.message}",)
        raise
    except Exception as cause:
        # The project's own code may raise anything.
        raise _refused_app(module_name, config, cause) from cause
    app = getattr(module, attribute, None)
    if not isinstance(app, App):
        wanted = f"module:attribute, and {module_name} has no App named {attribute!r}"
        raise InvalidConfig(field, spec, wanted)
    return app


def _refused_app(module: str, config: Config, cause: Exception) -> InvalidProject:
    """The error for an app's module that cannot be imported."""
    reason = f"{cause.msg}" if isinstance(cause, SyntaxError) else f"{cause}"
    return InvalidProject(
        f"{_line_of(module, config, cause)}: {type(cause).__name__}: {reason}.".replace("..", "."),
        advice="Correct the module; `everstate --debug` before the verb shows the traceback.",
    )


def _line_of(module: str, config: Config, error: Exception) -> str:
    """File and line of the project's own code that raised; without one, the module's name.

    It is the last call from the project's folder: for an error in a library, the calling line.
    """
    places = [(frame.filename, frame.lineno) for frame in extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename is not None:
        places.append((error.filename, error.lineno))
    for file, line in reversed(places):
        path = Path(file)
        is_library = "site-packages" in path.parts or path.is_relative_to(_PACKAGE)
        for folder in (config.folder, Path.cwd()):
            if path.is_relative_to(folder) and not is_library:
                return f"{path.relative_to(folder)}:{line}"
    return module


def _cell(value: Any, exact: bool) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return repr(value) if exact else f"{value:,.3f}"
    return str(value)
