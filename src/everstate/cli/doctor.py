"""`everstate doctor`: check this machine and the project, and print how to correct problems."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Annotated, Any

import typer
from rich.text import Text

from everstate.app import App
from everstate.attention.checks import server_checks
from everstate.cli.console import SIGNS, Session, load_app
from everstate.cli.results import Aside, Piece, Result, fails
from everstate.config import Config
from everstate.errors import EverstateError
from everstate.findings import Finding
from everstate.local import machine_checks, resolve, stack_checks


def doctor(
    session: Session,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe", help="Also write a record to a new topic, and delete the topic again."
        ),
    ] = False,
) -> Result:
    """Check machine, settings and servers, and show how to correct problems.

    Checked are Python, Java, disk, ports and cache; versions, rights, settings and clocks of Kafka
    and PostgreSQL; and the settings of topics. Exit code 1 at a failure.
    """
    try:
        config = session.config
    except EverstateError as error:
        checks = [Finding("settings", "fail", error.message, advice=error.advice)]
    else:
        settings, app = _settings(config)
        checks = [*machine_checks(config), settings, *stack_checks(config)]
        with suppress(EverstateError):  # of servers that do not run the address stays empty
            config = resolve(config, needs=())
        checks += server_checks(config, app, probe=probe)
    return Result(checks, *(line for check in checks for line in _pieces(check)), **failing(checks))


def _pieces(check: Finding) -> Iterator[Piece]:
    yield Text.assemble(SIGNS[check.outcome], f" {check.name:<13}{check.found}")
    if check.advice:
        yield Text(f"  {'':<13}{check.advice}", "cyan")


def failing(findings: Iterable[Finding]) -> dict[str, Any]:
    """How a doctor's result ends: with exit code 1 where a check failed."""
    if not any(each.outcome == "fail" for each in findings):
        return {}
    return {"notes": [Aside("some checks failed: see the lines with ✗")], "then": fails(1)}


def _settings(config: Config) -> tuple[Finding, App | None]:
    """Whether the settings name an app that loads, and the app."""
    if config.project.app is None:
        advice = 'set app = "module:attribute" under [project] in everstate.toml'
        return Finding("settings", "warn", "no app is set", advice=advice), None
    try:
        app = load_app(None, config)
    except (EverstateError, ImportError) as error:
        advice = "correct project.app in everstate.toml"
        return Finding("settings", "fail", str(error), advice=advice), None
    found = f"app {app.name} with {len(app.entities)} entity types"
    return Finding("settings", "ok", found), app
