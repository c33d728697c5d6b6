"""The list of verbs, each loaded only when it is asked for, so that `everstate status` is quick."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from everstate.cli.console import tell_error
from everstate.errors import EverstateError, MissingExtra


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb: its module has ``register(cli)``, which adds the command or group ``name``."""

    name: str
    module: str
    help: str
    """The line of the menu; a test holds it to the first line of the verb's own help."""


VERBS = (
    Verb(
        "demo",
        "demo",
        "Play real flights through a real log, a real lake and views, and prove the result.",
    ),
    Verb("up", "up", "Start Kafka and PostgreSQL for this project; what runs already is used."),
    Verb("down", "down", "Stop the servers of this project; their data stays."),
    Verb(
        "status",
        "status",
        "Show servers and roles; exit code 6 when a server does not run, 1 when a role does not.",
    ),
    Verb(
        "doctor",
        "doctor",
        "Check Python, Java, disk, ports, cache, settings and servers; exit code 1 at a failure.",
    ),
    Verb(
        "run",
        "run",
        "Move changes from the store to the log, archive them, and keep the views, until stopped.",
    ),
    Verb(
        "serve",
        "serve",
        "Serve the entity types over REST, until stopped; OpenAPI is at /openapi.json.",
    ),
    Verb("import", "import_", "Put every row of FILE into the store; equal states are no changes."),
    Verb(
        "get",
        "get",
        "Show one entity: now, at a time, or at a version; exit code 4 when it is not there.",
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
    Verb("commands", "commands", "Send commands; see, replay and give up those that are parked."),
    Verb("views", "views", "How the views stand, and the proof of them."),
    Verb(
        "psql",
        "psql",
        "Ask the views in SQL: one statement with -c, else psql, where it is installed.",
    ),
    Verb(
        "plan",
        "plan",
        "Show what starting this app would change of its views: what is built, and what it reads.",
    ),
    Verb("gaps", "gaps", "List keys whose changes wait for a missing version; accept that."),
    Verb("log", "log", "The log that the changes go to."),
    Verb("drift", "drift", "Compare the sources of truth with their logs, and mend what differs."),
    Verb("outbox", "outbox", "The outbox in a service's own database."),
    Verb("archive", "archive", "The lake: its proof, its files, and replay."),
    Verb("cdc", "cdc", "Captures of other systems' databases, by Debezium."),
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
            self._loaded[name] = typer.main.get_group(alone).commands[name]
        return self._loaded[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._modules[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


class VerbGroup(TyperGroup):
    """The verbs; an EverstateError of one is told as message and advice, with its exit code."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = VerbCommands()

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order of the menu."""
        return list(self.commands)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the menu from the list above; no verb is imported for it."""
        menu = copy.copy(self)
        menu.commands = {verb.name: TyperCommand(verb.name, help=verb.help) for verb in VERBS}
        TyperGroup.format_help(menu, ctx, formatter)

    def invoke(self, ctx: Any) -> Any:
        """Run the verb."""
        try:
            return super().invoke(ctx)
        except EverstateError as error:
            if ctx.params.get("debug"):
                raise
            tell_error(error)
            raise typer.Exit(error.exit_code) from error
        except ModuleNotFoundError as cause:
            missing = MissingExtra.of(cause)
            if missing is None or ctx.params.get("debug"):
                raise
            tell_error(missing)
            raise typer.Exit(missing.exit_code) from cause
