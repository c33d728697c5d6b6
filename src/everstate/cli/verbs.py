"""The list of verbs, each imported only when it is used, so that `everstate status` is quick."""

from __future__ import annotations

import copy
import errno
import importlib
import sys
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from everstate.cli.console import tell_error
from everstate.errors import EverstateError, MissingExtra

HELP = ["-h", "--help"]


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb: its module has ``register(cli)``, which adds the command or group ``name``."""

    name: str
    module: str
    help: str
    """The line of the menu; a test compares it with the first line of the verb's own help."""


VERBS = (
    Verb(
        "init",
        "init",
        "Create a project in DIR: an entity type, a view, their test, first data, a README.",
    ),
    Verb(
        "demo",
        "demo",
        "Send real flights through a real log, a real lake and views, and prove the result.",
    ),
    Verb(
        "dev",
        "dev",
        "Do `up`, `run` and `serve` in one terminal, and restart them when the project changes.",
    ),
    Verb("up", "up", "Start Kafka and PostgreSQL for this project, unless they run already."),
    Verb("down", "down", "Stop the servers of this project; their data is kept."),
    Verb(
        "status",
        "status",
        "Show servers, roles and what needs attention.",
    ),
    Verb(
        "doctor",
        "doctor",
        "Check machine, settings and servers, and show how to correct problems.",
    ),
    Verb(
        "run",
        "run",
        "Move changes from the store to the log, archive them, and keep the views, until stopped.",
    ),
    Verb(
        "serve",
        "serve",
        "Serve REST (/openapi.json) and the web console (/) of the entity types, until stopped.",
    ),
    Verb("token", "token", "Make a token for a caller of the API; list the callers."),
    Verb(
        "import",
        "import_",
        "Put every row of FILE into the store; a row that changes nothing is not written.",
    ),
    Verb(
        "get",
        "get",
        "Show one entity: now, at a time, or at a version; exit code 4 if it does not exist.",
    ),
    Verb(
        "list",
        "list_",
        "List entities that exist now, or existed at a time, and meet all conditions.",
    ),
    Verb(
        "history",
        "history",
        "Show every version of an entity: when, what, by whom, and what it changed.",
    ),
    Verb(
        "explain",
        "explain",
        "Explain a version: its change, log position, source transaction, file in the lake, views.",
    ),
    Verb("commands", "commands", "Send commands; list, replay and discard parked ones."),
    Verb("views", "views", "List, show, search, rebuild and prove views."),
    Verb(
        "psql",
        "psql",
        "Query the views in SQL: one statement with -c, or interactively if psql is installed.",
    ),
    Verb(
        "plan",
        "plan",
        "Show how starting this app would change its views, and which changes that reads.",
    ),
    Verb("gaps", "gaps", "List keys with missing versions, and accept such gaps."),
    Verb("dead", "dead", "List records that were rejected, by reason; show one of them."),
    Verb("log", "log", "Begin a new log."),
    Verb("drift", "drift", "Compare the sources of truth with their logs, and repair differences."),
    Verb("outbox", "outbox", "Install and inspect the outbox in a service's database."),
    Verb("archive", "archive", "Prove, compact and list the archive in the lake."),
    Verb(
        "replay",
        "replay",
        "Write archived changes again: all, one key, a time range, or those of a provenance.",
    ),
    Verb(
        "schema",
        "schema",
        "Export the forms of states and messages for programs in any language.",
    ),
    Verb("cdc", "cdc", "Capture changes of other systems' databases with Debezium."),
)
"""Every verb, in the order of the menu."""


class VerbCommands(MutableMapping[str, Any]):
    """Name of the verb → its command, imported when it is looked up."""

    def __init__(self) -> None:
        self._modules = {verb.name: f"everstate.cli.{verb.module}" for verb in VERBS}
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            alone = typer.Typer()
            importlib.import_module(self._modules[name]).register(alone)
            self._loaded[name] = with_plain_flags(typer.main.get_group(alone).commands[name])
        return self._loaded[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._modules[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


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


def _sentence(error: OSError) -> str:
    """What the operating system refused: the file, and why."""
    where = "" if error.filename is None else f"{error.filename}: "
    return f"{where}{error.strerror or error}."


def _refused(error: OSError) -> Exception:
    """What to raise instead of an error of the operating system, which was printed."""
    if error.errno == errno.EPIPE:
        return error  # the end of a pipe is no error: its reader has seen enough
    tell_error(EverstateError(_sentence(error)))
    _forget_output()
    return typer.Exit(EverstateError.exit_code)


def _forget_output() -> None:
    """Drop what stdout did not take: Python would try again at its end, with a traceback."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError, AttributeError):
        sys.stdout = None


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
        menu.commands = {verb.name: TyperCommand(verb.name, help=verb.help) for verb in VERBS}
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
        except EverstateError as error:
            if ctx.params.get("debug"):
                raise
            tell_error(error)
            raise typer.Exit(error.exit_code) from error
        except OSError as cause:
            if ctx.params.get("debug"):
                raise
            raise _refused(cause) from None
        except ModuleNotFoundError as cause:
            missing = MissingExtra.of(cause)
            if missing is None or ctx.params.get("debug"):
                raise
            tell_error(missing)
            raise typer.Exit(missing.exit_code) from cause
        except TyperException as error:
            name = getattr(error, "option_name", None) or ""
            if name[:1] == "-" != name[1:2]:
                # A key or a number may begin with a minus.
                error.message += f". If {name} begins a value, write -- before that value."
            raise
