"""`everstate status`: how the local stack is."""

from __future__ import annotations

import time

import typer

from everstate.cli.console import JsonOption, config_of, out, print_json, table
from everstate.local import Stack

_GONE = 6
"""Exit code when a server is not there, as of LocalStackError."""


def register(cli: typer.Typer) -> None:
    """Add the verb."""
    cli.command("status")(status)


def status(context: typer.Context, json: JsonOption = False) -> None:
    """Show the servers of this project; exit code 6 when one does not run."""
    stack = Stack(config_of(context))
    if not print_servers(stack, json=json):
        raise typer.Exit(_GONE)


def print_servers(stack: Stack, *, json: bool) -> bool:
    """Print one row per server; True when all run."""
    servers = stack.status()
    if json:
        print_json(servers)
    elif not servers:
        out.print("no local servers: log.bootstrap_servers and store.dsn are set")
    else:
        rows = [
            (
                server.name,
                server.state,
                server.address,
                str(server.pid) if server.pid else None,
                f"{server.memory_bytes / 1e6:.0f} MB" if server.memory_bytes else None,
                _duration(time.time() - server.since) if server.since else None,
            )
            for server in servers
        ]
        table(("server", "state", "address", "pid", "memory", "up"), rows)
        out.print(f"logs: {servers[0].log.parent}", highlight=False)
    return all(server.state == "running" for server in servers)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
