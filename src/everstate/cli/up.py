"""`everstate up`: start the local stack."""

from __future__ import annotations

import threading
from typing import Annotated

import typer

from everstate.cli.console import JsonOption, Session, err, out, tell_error
from everstate.cli.results import Result
from everstate.cli.status import servers_pieces
from everstate.local import ConsoleProgress, Stack, supervise


def up(
    session: Session,
    foreground: Annotated[
        bool,
        typer.Option(
            "--foreground", help="Keep running, restart crashed servers, stop all on Ctrl-C."
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Start Kafka and PostgreSQL for this project, unless they run already."""
    stack = Stack(session.config)
    if not stack.names and not json:
        out.print("nothing to start: log.bootstrap_servers and store.dsn are set")
        return
    progress = ConsoleProgress(err)
    if not foreground:
        stack.start(progress)
        _shown(stack).show(json)
        return
    with stack:
        _shown(stack).show(json)
        err.print("Ctrl-C stops the servers")
        try:
            supervise(stack, threading.Event(), on_crash=tell_error, progress=progress)
        except KeyboardInterrupt:
            err.print("stopping")


def _shown(stack: Stack) -> Result:
    servers = stack.status()
    return Result(servers, *servers_pieces(servers))
