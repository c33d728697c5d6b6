"""What a verb shows: one JSON value, or tables and lines for people.

A verb returns it, and it is printed here, so that every verb has `--json` in the same way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import typer
from rich.text import Text

from everstate.cli.console import (
    AppOption,
    AppSession,
    JsonOption,
    Session,
    err,
    out,
    print_json,
    table,
)


@dataclass(frozen=True)
class ResultTable:
    """Rows for people; see :func:`everstate.cli.console.table`."""

    columns: Sequence[str]
    rows: Iterable[Sequence[Any]]
    title: str | None = None
    exact: bool = False
    none: str | None = None
    """What stderr says in place of a table without rows."""

    def show(self) -> None:
        """Print it to stdout."""
        rows = list(self.rows)
        if self.none is not None and not rows:
            err.print(self.none, highlight=False)
        else:
            table(self.columns, rows, title=self.title, exact=self.exact)


@dataclass(frozen=True)
class Aside:
    """A line on stderr: what is said about a result, and is no part of it."""

    text: str | Text
    style: str | None = None

    def show(self) -> None:
        """Print it to stderr."""
        err.print(self.text, style=self.style, highlight=False)


Piece = ResultTable | Aside | Text | str
"""A piece for people; a text is a line on stdout."""


class Result:
    """The result of a verb."""

    def __init__(
        self,
        value: Any,
        *pieces: Piece,
        notes: Iterable[Aside] = (),
        then: Callable[[], object] | None = None,
        is_line: bool = False,
    ) -> None:
        """``value`` is for `--json`, or what the function ``value`` returns; the rest for people.

        ``notes`` follow both. ``then`` is called at the end: it raises what the verb ends with.
        ``is_line``: the value is one of several, each on a line.
        """
        self.value, self.pieces, self.notes = value, pieces, notes
        self.then, self.is_line = then, is_line

    def show(self, json: bool) -> None:
        """Print it, and end as it says."""
        if json:
            value = self.value() if callable(self.value) else self.value
            print_json(value, is_line=self.is_line)
        else:
            show_pieces(*self.pieces)
        show_pieces(*self.notes)
        if self.then is not None:
            self.then()


def show_pieces(*pieces: Piece) -> None:
    """Print pieces for people."""
    for each in pieces:
        if isinstance(each, ResultTable | Aside):
            each.show()
        else:
            out.print(each, highlight=False)


def records(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], *, notes: Iterable[Aside] = ()
) -> Result:
    """Rows of the user's values: as a JSON list of objects, or as a table."""
    from everstate.serving.words import cell  # here: not every verb needs the readers of views

    cells = ([cell(each) for each in row] for row in rows)
    return Result(
        lambda: [dict(zip(columns, row, strict=True)) for row in rows],
        ResultTable(columns, cells, exact=True),
        notes=notes,
    )


def fails(code: int) -> Callable[[], None]:
    """Ends a verb with an exit code after its result; with 0 it succeeds."""

    def end() -> None:
        if code:
            raise typer.Exit(code)

    return end


class Verbs(typer.Typer):
    """A verb with commands of its own, each a function that returns what it shows."""

    def command(self, *given: Any, **more: Any) -> Callable[[Callable[..., Any]], Any]:
        """Decorate a command, as typer does; see :func:`showing`."""
        add = super().command(*given, **more)

        def added(function: Callable[..., Any]) -> Callable[..., Any]:
            add(showing(function))
            return function

        return added


def showing(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a verb as typer calls it.

    One that takes a Session gets the project of the command line, and one that takes an AppSession
    has the option `--app`. One that returns a result, or several, one after the other, has the
    option `--json`, and its results are printed; if it must know how, it has a parameter ``json``.
    """
    signature = inspect.signature(function, eval_str=True)
    own = dict(signature.parameters)
    session, json_of_its_own = own.pop("session", None), own.pop("json", None)
    prints = signature.return_annotation in (Result, Iterator[Result])
    if session is None and not prints:
        return function
    has_app = session is not None and session.annotation is AppSession

    @wraps(function)
    def called(
        context: typer.Context, *, app: str | None = None, json: bool = False, **given: Any
    ) -> None:
        known = context.find_object(Session) or Session(Path("."))
        if session is not None:
            given["session"] = AppSession(known.project, app) if has_app else known
        if json_of_its_own is not None:
            given["json"] = json
        found = function(**given)
        for each in (found,) if isinstance(found, Result) else found or ():
            each.show(json)

    # Within a paragraph typer would keep the ends of the lines.
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    called.__doc__ = "\n\n".join(" ".join(each.split()) for each in paragraphs)
    options = []
    if has_app:
        options.append(_parameter("app", AppOption, None))
    if prints or json_of_its_own is not None:
        options.append(_parameter("json", JsonOption, False))
    called.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            _parameter("context", typer.Context),
            *(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own.values()),
            *options,
        ]
    )
    return called


def _parameter(
    name: str, annotation: Any, default: Any = inspect.Parameter.empty
) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)
