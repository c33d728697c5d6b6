"""The list of verbs, each imported only when it is used, so that `everstate status` is quick."""

from __future__ import annotations

import copy
import errno
import importlib
import sys
from collections.abc import Iterator, MutableMapping
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from everstate.cli.console import tell_error
from everstate.cli.results import showing
from everstate.errors import EverstateError, MissingExtra

HELP = ["-h", "--help"]
_TAKEN: Final = ("import", "list")


VERBS: Final = {
    "init": "Create a project in DIR: an entity type, a view, their test, first data, a README.",
    "demo": "Send real flights through a real log, a real lake and views, and prove the result.",
    "dev": "Do `up`, `run` and `serve` in one terminal, and restart them when the project changes.",
    "up": "Start Kafka and PostgreSQL for this project, unless they run already.",
    "down": "Stop the servers of this project; their data is kept.",
    "status": "Show servers, roles and what needs attention.",
    "doctor": "Check machine, settings and servers, and show how to correct problems.",
    "run": (
        "Move changes from the store to the log, archive them, and keep the views, until stopped."
    ),
    "handle": "Run the handlers of one group in this process; many may share its work.",
    "serve": (
        "Serve REST (/openapi.json) and the web console (/) of the entity types, until stopped."
    ),
    "token": "Make a token for a caller of the API; list the callers.",
    "import": "Put every row of FILE into the store; a row that changes nothing is not written.",
    "get": "Show one entity: now, at a time, or at a version; exit code 4 if it does not exist.",
    "list": "List entities that exist now, or existed at a time, and meet all conditions.",
    "history": "Show every version of an entity: when, what, by whom, and what it changed.",
    "explain": (
        "Explain a version: its change, log position, source transaction, file in the lake, views."
    ),
    "commands": "Send commands; list, replay and discard parked ones.",
    "handlers": "List handlers; retry, skip or reset their changes.",
    "views": "List, show, search, rebuild and prove views.",
    "psql": "Query the views in SQL: one statement with -c, or interactively if psql is installed.",
    "plan": "Show how a start of this app would change views and topics, and what it would read.",
    "gaps": "List keys with missing versions, and accept such gaps.",
    "dead": "List records that were rejected, by reason; show one of them.",
    "log": "Show how large the log is, and begin a new one.",
    "drift": "Compare the sources of truth with their logs, and repair differences.",
    "outbox": "Install and inspect the outbox in a service's database.",
    "archive": "Prove, compact and list the archive in the lake.",
    "replay": "Write archived changes again: all, one key, a time range, or those of a provenance.",
    "schema": "Export the forms of states and messages for programs in any language.",
    "cdc": "Capture changes of other systems' databases with Debezium.",
}
"""Every verb and its line of the menu, in this order: the first line of its help."""


class VerbCommands(MutableMapping[str, Any]):
    """Name of the verb → its command, imported when it is looked up.

    The command or group has the name of its module; behind a word of Python's is a `_`.
    """

    def __init__(self) -> None:
        self._names = dict.fromkeys(VERBS)
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._loaded:
            alone, own = typer.Typer(), f"{name}_" if name in _TAKEN else name
            verb = getattr(importlib.import_module(f"everstate.cli.{own}"), own)
            if isinstance(verb, typer.Typer):
                alone.add_typer(verb, name=name)
            else:
                alone.command(name)(showing(verb))
            self._loaded[name] = with_plain_flags(typer.main.get_group(alone).commands[name])
        return self._loaded[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._names[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def with_plain_flags(command: Any) -> Any:
    """The command, and those below it, whose help shows no type beside a flag: it takes no value.

    typer would show ``--json <bool>``.
    """
    context = typer.Context(command, help_option_names=HELP)
    for option in [*command.params, command.get_help_option(context)]:
        if getattr(option, "is_flag", False):
            option.metavar = ""
    for below in getattr(command, "commands", {}).values():
        with_plain_flags(below)
    return command


def _refused(cause: Exception) -> Exception:
    """What to raise instead of an error that was printed, or the error itself."""
    told: Exception | None = cause
    if isinstance(cause, OSError):
        if cause.errno == errno.EPIPE:
            return cause  # the end of a pipe is no error: its reader has seen enough
        where = "" if cause.filename is None else f"{cause.filename}: "
        told = EverstateError(f"{where}{cause.strerror or cause}.")
    elif isinstance(cause, ModuleNotFoundError):
        told = MissingExtra.of(cause)
    if not isinstance(told, EverstateError):
        return cause
    tell_error(told)
    if isinstance(cause, OSError):
        try:
            sys.stdout.flush()
        except (OSError, ValueError, AttributeError):
            # Drop what it did not take: Python would try again at its end, with a traceback.
            sys.stdout = None
    return typer.Exit(told.exit_code)


class VerbGroup(TyperGroup):
    """The verbs; an EverstateError of one is printed as message and advice, with its exit code."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        with_plain_flags(self)
        self.commands = VerbCommands()

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order of the menu."""
        return list(self.commands)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the menu from the list above, without importing any verb."""
        menu = copy.copy(self)
        menu.commands = {name: TyperCommand(name, help=line) for name, line in VERBS.items()}
        TyperGroup.format_help(menu, ctx, formatter)

    def make_context(self, *given: Any, **more: Any) -> Any:
        """Read the options; `--help` and `--version` print here already."""
        try:
            return super().make_context(*given, **more)
        except OSError as cause:
            raise _refused(cause) from None

    def invoke(self, ctx: Any) -> Any:
        """Run the verb."""
        try:
            return super().invoke(ctx)
        except (EverstateError, ModuleNotFoundError, OSError) as cause:
            if ctx.params.get("debug"):
                raise
            raise _refused(cause) from None
        except TyperException as error:
            name = getattr(error, "option_name", None) or ""
            if name[:1] == "-" != name[1:2]:
                # A key or a number may begin with a minus.
                error.message += f". If {name} begins a value, write -- before that value."
            raise
