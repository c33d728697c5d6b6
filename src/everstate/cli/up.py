"""`everstate up`: start the local stack."""

from __future__ import annotations

import threading
from typing import Annotated

import typer

from everstate.cli.console import JsonOption, config_of, err, out, print_json, tell_error
from everstate.cli.status import print_servers
from everstate.local import ConsoleProgress, Stack, supervise


def up(
    context: typer.Context,
    foreground: Annotated[
        bool,
        typer.Option(
            "--foreground", help="Keep running, restart crashed servers, stop all on Ctrl-C."
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Start Kafka and PostgreSQL for this project, unless they run already."""
    stack = Stack(config_of(context))
    if not stack.names and not json:
        out.print("nothing to start: log.bootstrap_servers and store.dsn are set")
        return
    progress = ConsoleProgress(err)
    if not foreground:
        stack.start(progress)
        _show(stack, json)
        return
    with stack:
        _show(stack, json)
        err.print("Ctrl-C stops the servers")
        try:
            supervise(stack, threading.Event(), on_crash=tell_error, progress=progress)
        except KeyboardInterrupt:
            err.print("stopping")


def _show(stack: Stack, json: bool) -> None:
    if json:
        print_json(stack.status())
    else:
        print_servers(stack)
