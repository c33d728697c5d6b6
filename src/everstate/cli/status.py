"""`everstate status`: how the servers and the roles of a project are."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import typer
from rich.text import Text

from everstate.cli.console import READING, JsonOption, config_of, out, print_json, table
from everstate.cli.watching import SUPERVISOR, VIEW, trouble
from everstate.config import Config
from everstate.errors import EverstateError
from everstate.local import Stack, connect
from everstate.parts import Health, Part, RoleState, read_states
from everstate.telemetry import without_secret

_GONE = 6
"""Exit code when a server is not there, as of LocalStackError."""
_TROUBLED = 1
"""Exit code when the servers are there, and a role or a part of one does not run."""


def register(cli: typer.Typer) -> None:
    """Add the verb."""
    cli.command("status")(status)


def status(context: typer.Context, json: JsonOption = False) -> None:
    """Show servers and roles; exit code 6 when a server does not run, 1 when a role does not."""
    config = config_of(context)
    stack, states = Stack(config), read_states(config.project.data_dir)
    if json:
        servers = stack.status()
        print_json({"servers": servers, "roles": [_record(state) for state in states]})
        servers_run = all(server.state == "running" for server in servers)
    else:
        servers_run = print_servers(stack)
        _print_address(config)
        out.print()
        _print_roles(states)
    if not servers_run:
        raise typer.Exit(_GONE)
    if _problems(states):
        raise typer.Exit(_TROUBLED)


def print_servers(stack: Stack) -> bool:
    """Print one row per server; True when all run."""
    servers = stack.status()
    if not servers:
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


def _print_address(config: Config) -> None:
    """Print where the views are read with SQL, while that is known."""
    with suppress(EverstateError):
        dsn = without_secret(connect(config, needs=READING).views_dsn)
        out.print(f"views in SQL: everstate psql, or {dsn}", highlight=False)


def _print_roles(states: Sequence[RoleState]) -> None:
    """Print one row per role, and below it what does not run and why."""
    if not states:
        out.print("no role runs: `everstate run` starts them, `everstate serve` the API")
        return
    parts = _supervised(states)
    rows = [_row(state, parts.get(state.role)) for state in states]
    # A role that ended before it could write its own state has a line in the supervisor's.
    known = {state.role for state in states}
    rows += [
        (name, part.state, None, None, None, None)
        for name, part in parts.items()
        if name not in known
    ]
    table(("role", "state", "pid", "up", "", "figures"), rows)
    for line in _problems(states):
        out.print(line)


def _supervised(states: Sequence[RoleState]) -> dict[str, Part]:
    """The roles that a running `everstate run` looks after, as it says that they are."""
    runs = (s for s in states if s.role == SUPERVISOR and s.health == "running")
    return {name: part for state in runs for name, part in state.parts.items()}


def _row(state: RoleState, supervised: Part | None) -> tuple[str | None, ...]:
    runs = state.health in ("running", "not answering")
    views = sum(name.startswith(VIEW) for name in state.parts)
    what = state.address or state.doing or (f"{views} view{'s' * (views > 1)}" if views else None)
    up = _duration(time.time() - state.started) if runs else None
    word = _word(state) if runs or supervised is None else supervised.state
    pid = str(state.pid) if runs else None
    return state.role, word, pid, up, what if runs else None, state.figures if runs else None


def _word(state: RoleState) -> str:
    """One word or two for the table; what keeps a part from running is told below it."""
    if state.health != "running":
        return state.health
    if state.doing is not None:
        return "starting"
    troubled = sum(part.state != "running" for part in state.parts.values())
    return f"{troubled} of {len(state.parts)} do not run" if troubled else "running"


def _problems(states: Sequence[RoleState]) -> list[Text]:
    """Lines: what does not run, why, and what to do about it."""
    supervised, lines = _supervised(states), list[Text]()
    for state in states:
        gone = state.health in ("killed", "ended")
        if gone and state.role in supervised:
            continue  # the supervisor says why, and when it starts it again
        for name, part in state.parts.items():
            if part.state != "running":
                alone = state.role in (SUPERVISOR, name)
                who = name if alone else f"{state.role}: {name}"
                why = trouble(part, of_role=state.role == SUPERVISOR)
                lines.append(Text.assemble((who, "bold"), " ", why))
        if said := _UNHEALTHY.get(state.health):
            lines.append(Text.assemble((state.role, "bold"), " ", (said, "red")))
    return lines


_UNHEALTHY: dict[Health, str] = {
    "killed": "is gone: its process was killed. `everstate run` or `everstate serve` starts it.",
    "not answering": "does not answer: its process is there, and hangs or is suspended.",
}


def _record(state: RoleState) -> dict[str, Any]:
    """A role for JSON."""
    return {**asdict(state), "health": state.health}


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
