"""`everstate status`: status of the servers and the roles of a project."""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.text import Text

from everstate.app import App
from everstate.attention.conditions import Concern, of_roles
from everstate.cli.console import READING, JsonOption, Session, load_app, out
from everstate.cli.results import Piece, Result, ResultTable, fails, show_pieces
from everstate.cli.watching import VIEW, trouble
from everstate.config import Config
from everstate.errors import EverstateError
from everstate.local import ServerStatus, Stack, resolve
from everstate.parts import Part, RoleState, read_states
from everstate.postgres import connect_views
from everstate.serving import Reader
from everstate.serving.answers import standing_text
from everstate.serving.troubles import supervised, troubles
from everstate.telemetry import without_secret
from everstate.views.control import BUILDING, LIVE, WAITING, ViewStatuses
from everstate.views.control.registry import reasons_text

_GONE = 6
"""Exit code when a server does not run; the same as for LocalStackError."""
_WATCH_S = 2.0
_TROUBLED = 1
"""Exit code when the servers run, but a role or a part of one does not, or when the app cannot be
loaded."""
_NO_ANSWER = "no-answer"
_NO_APP = "no-answer:app"


def status(
    session: Session,
    json: JsonOption = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it again every two seconds, until Ctrl-C.")
    ] = False,
) -> None:
    """Show servers, roles and what needs attention.

    Exit code 6 when a server does not run or does not answer; else 1 when a role or a part of one
    failed or hangs, or when the app cannot be loaded; else 0, also when no role was started. With
    --watch --json each status is one line of JSON.
    """
    config = session.config
    if not watch:
        fails(_show(config, json=json))()
        return
    code: int | None = None
    try:
        while True:
            if out.is_terminal:
                out.clear()
            code = _show(config, json=json, is_line=True)
            time.sleep(_WATCH_S)
    except KeyboardInterrupt:
        # It also comes while the next status is made; the last whole one counts.
        if code is None:
            raise
        fails(code)()


def _show(config: Config, *, json: bool, is_line: bool = False) -> int:
    """Print the status once; returns the exit code."""
    servers, states = Stack(config).status(), read_states(config.project.data_dir)
    servers_run = all(server.state == "running" for server in servers)
    if not json:  # Before the servers are asked, which may take seconds.
        show_pieces(*servers_pieces(servers), *_address(config), "", *_roles_pieces(states))
    conditions, views = _conditions(config, states, servers_run), _views(config)
    Result(
        {
            "servers": servers,
            "roles": [{**asdict(state), "health": state.health} for state in states],
            "views": views,
            "attention": conditions,
        },
        *_views_pieces(views, known=_told(states) | {each.what for each in conditions}),
        *_conditions_pieces(conditions, states),
        is_line=is_line,
    ).show(json)
    # A server does not answer; a warning is of one that refused the question.
    silent = [e for e in conditions if e.kind == _NO_ANSWER and e.level == "bad"]
    if not servers_run or any(each.key != _NO_APP for each in silent):
        return _GONE
    is_troubled = _problems(states) or any(each.key == _NO_APP for each in conditions)
    return _TROUBLED if is_troubled else 0


def servers_pieces(servers: Sequence[ServerStatus]) -> Iterator[Piece]:
    """One row per server."""
    if not servers:
        yield "no local servers: log.bootstrap_servers and store.dsn are set"
        return
    rows = [
        (
            *(server.name, server.state, server.address),
            str(server.pid) if server.pid else None,
            f"{server.memory_bytes / 1e6:.0f} MB" if server.memory_bytes else None,
            _duration(time.time() - server.since) if server.since else None,
        )
        for server in servers
    ]
    yield ResultTable(("server", "state", "address", "pid", "memory", "up"), rows)
    yield f"logs: {servers[0].log.parent}"


def _address(config: Config) -> Iterator[str]:
    """The address for reading the views with SQL, if it is known."""
    with suppress(EverstateError):
        dsn = without_secret(resolve(config, needs=READING).views_dsn)
        yield f"views in SQL: everstate psql, or {dsn}"


def _views(config: Config) -> list[dict[str, Any]]:
    """Versions of views that are being built, wait for a decision, or lag."""
    with suppress(EverstateError):
        dsn = resolve(config, needs=READING).views_dsn
        with connect_views(dsn) as connection:
            rows = ViewStatuses(connection, config.views.schema_name).versions()
            return [
                {
                    "view": row.name,
                    "version": row.version,
                    "status": row.shown,
                    "status_reason": row.status_reason,
                    "error": row.error,
                    "waits_for": row.waits_for,
                    "progress": row.progress,
                }
                for row in rows
                if row.status in (BUILDING, WAITING)
                or (row.status == LIVE and (row.why is not None or row.progress is not None))
            ]
    return []


def _conditions(config: Config, states: Sequence[RoleState], servers_run: bool) -> list[Concern]:
    """What needs attention; only what the roles report, where servers or the app are not there."""
    has_own_servers = config.log.bootstrap_servers or config.store.dsn
    if not servers_run or (config.project.app is None and not has_own_servers):
        return list(of_roles(states))
    try:
        # Without an app the servers are asked all the same.
        app = App("status") if config.project.app is None else load_app(None, config)
        connected = resolve(config)
    except (EverstateError, ImportError) as error:
        why = error.message if isinstance(error, EverstateError) else str(error)
        told = ("not known", "what needs attention", f"is not known: {why}")
        return [*of_roles(states), Concern(_NO_APP, "always", "roles", *told)]
    # Imported here: it is needed only for a project with an app.
    from everstate.attention.looking import Looking

    with Reader(connected, app) as reader:
        return Looking(connected, app, reader).look().conditions


def _conditions_pieces(
    conditions: Sequence[Concern], states: Sequence[RoleState]
) -> Iterator[Text]:
    """What needs attention, but for what the table of roles shows, or the line for none."""
    known = ("role", "part") if states else ("role", "part", "roles")
    told = _told(states)
    shown = [
        each
        for each in conditions
        if each.kind not in known and not (each.kind == "view-behind" and each.what in told)
    ]
    for each in shown:
        style = "red" if each.level == "bad" else "yellow"
        advice = (f"\n         {each.advice}", "cyan") if each.advice else ""
        yield Text.assemble((each.what, "bold"), " ", (each.why, style), advice)


def _views_pieces(views: Sequence[dict[str, Any]], known: Container[str]) -> Iterator[Text]:
    """The views that are being built, wait, or lag; ``known`` are told elsewhere."""
    for view in views:
        name = f"view {view['view']}, version {view['version']}"
        if name in known:
            continue
        why = reasons_text(view["error"], view["waits_for"], view["status_reason"])
        how = standing_text(view["status"], why, view["progress"])
        yield Text.assemble((name, "bold"), f" {how}")


def _roles_pieces(states: Sequence[RoleState]) -> Iterator[Piece]:
    """One row per role, and below it the parts that do not run, with reasons."""
    if not states:
        yield "no role runs: `everstate run` starts them, `everstate serve` the API"
        return
    parts = supervised(states)
    rows = [_row(state, parts.get(state.role)) for state in states]
    # A role that ended before it wrote its own state has an entry in the supervisor's state.
    known = {state.role for state in states}
    rows += [
        (name, part.state, None, None, None, None)
        for name, part in parts.items()
        if name not in known
    ]
    yield ResultTable(("role", "state", "pid", "up", "", "figures"), rows)
    yield from _problems(states)


def _row(state: RoleState, supervised: Part | None) -> tuple[str | None, ...]:
    runs = state.health in ("running", "not answering")
    # A version that cannot be built is a part, too, beside the view that readers see.
    views = sum(name.startswith(VIEW) and ", version " not in name for name in state.parts)
    what = state.address or state.doing or (f"{views} view{'s' * (views > 1)}" if views else None)
    up = _duration(time.time() - state.started) if runs else None
    word = _word(state) if runs or supervised is None else supervised.state
    pid = str(state.pid) if runs else None
    return state.role, word, pid, up, what if runs else None, state.figures if runs else None


def _word(state: RoleState) -> str:
    """One or two words for the table; problems of parts are printed below it."""
    if state.health != "running":
        return state.health
    if state.doing is not None:
        return "starting"
    troubled = sum(part.state != "running" for part in state.parts.values())
    return f"{troubled} of {len(state.parts)} do not run" if troubled else "running"


def _problems(states: Sequence[RoleState]) -> list[Text]:
    """Lines with the parts that do not run, the reasons, and advice."""
    return [
        Text.assemble(
            (each.who, "bold"),
            " ",
            (each.process, "red")
            if each.part is None
            else trouble(each.part, of_role=each.is_role),
        )
        for each in troubles(states)
    ]


def _told(states: Sequence[RoleState]) -> set[str]:
    """The parts that do not run, by name: the lines below the table of roles have their reasons."""
    return {each.who.partition(": ")[2] for each in troubles(states) if each.part is not None}


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
