"""What the verbs share: consoles, settings, the app, tables, JSON, and how errors are told."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from everstate.config import CONFIG_FILE, Config, load
from everstate.errors import EverstateError, InvalidConfig

if TYPE_CHECKING:
    from everstate.app import App

_PIPED_WIDTH = 240

out = Console(soft_wrap=True)
"""Results."""

err = Console(stderr=True, soft_wrap=True)
"""Progress and errors."""

JsonOption = Annotated[bool, typer.Option("--json", help="One JSON value on stdout.")]
AppOption = Annotated[
    str | None, typer.Option("--app", help="module:attribute; default: project.app.")
]


@dataclass
class Session:
    """The options that stand before the verb."""

    project: Path
    debug: bool

    @cached_property
    def config(self) -> Config:
        """Settings of the project, read once."""
        return load(self.project)


def tell_error(error: EverstateError) -> None:
    """Print an error's message and advice to stderr."""
    err.print(f"[bold red]error:[/] {escape(error.message)}", highlight=False)
    if error.advice:
        err.print(f"[cyan]{escape(error.advice)}[/]", highlight=False)


def config_of(context: typer.Context) -> Config:
    """Settings of the project that the command line names."""
    session: Session = context.find_object(Session) or Session(Path("."), debug=False)
    return session.config


def print_json(value: Any) -> None:
    """Print one value as JSON to stdout; datetimes, UUIDs and dataclasses are taken."""
    options = orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS
    sys.stdout.write(orjson.dumps(value, default=str, option=options).decode() + "\n")
    sys.stdout.flush()


def table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str | None = None
) -> None:
    """Print rows as a table; ``None`` is an empty cell, numbers stand to the right."""
    shown = [list(row) for row in rows]
    grid = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for at, column in enumerate(columns):
        numeric = any(isinstance(row[at], int | float) for row in shown)
        grid.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in shown:
        grid.add_row(*("" if cell is None else escape(_cell(cell)) for cell in row))
    # A pipe has no width: rows stay whole there, so that grep finds them.
    wide = out if out.is_terminal else Console(width=_PIPED_WIDTH)
    wide.print(grid, soft_wrap=False)


def load_app(spec: str | None, config: Config) -> App:
    """The App that ``spec`` or `project.app` names as ``module:attribute``.

    The working folder and the project's folder can be imported from. Raises InvalidConfig that
    says what to set; an error inside the module itself is raised as it is.
    """
    from everstate.app import App

    field = "--app" if spec else "project.app"
    spec = spec or config.project.app
    expected = f"module:attribute of an App (--app, or app under [project] in {CONFIG_FILE})"
    if not spec:
        raise InvalidConfig(field, None, expected)
    module_name, separator, attribute = spec.partition(":")
    if not (module_name and separator and attribute):
        raise InvalidConfig(field, spec, expected)
    for folder in (str(config.project.data_dir.parent), str(Path.cwd())):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as cause:
        missing = cause.name or ""
        if module_name != missing and not module_name.startswith(missing + "."):
            raise
        raise InvalidConfig(field, spec, f"{expected}; there is no module {missing!r}") from cause
    app = getattr(module, attribute, None)
    if not isinstance(app, App):
        found = f"{module_name} has no App named {attribute!r}"
        raise InvalidConfig(field, spec, f"{expected}; {found}")
    return app


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.3f}"
    return str(value)
