"""`everstate doctor`: check this machine and the project, and print how to correct problems."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer
from rich.text import Text

from everstate.app import App
from everstate.attention.checks import server_checks
from everstate.cli.console import SIGNS, JsonOption, config_of, err, load_app, out, print_json
from everstate.config import Config
from everstate.errors import EverstateError
from everstate.findings import Finding
from everstate.local import machine_checks, resolve, stack_checks


def doctor(
    context: typer.Context,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe", help="Also write a record to a new topic, and delete the topic again."
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Check machine, settings and servers, and show how to correct problems.

    Checked are Python, Java, disk, ports and cache; versions, rights, settings and clocks of Kafka
    and PostgreSQL; and the settings of topics. Exit code 1 at a failure.
    """
    try:
        config = config_of(context)
    except EverstateError as error:
        checks = [Finding("settings", "fail", error.message, advice=error.advice)]
    else:
        settings, app = _settings(config)
        checks = [*machine_checks(config), settings, *stack_checks(config)]
        checks += server_checks(_connected(config), app, probe=probe)
    if json:
        print_json(checks)
    else:
        for check in checks:
            out.print(Text.assemble(SIGNS[check.outcome], f" {check.name:<13}{check.found}"))
            if check.advice:
                out.print(f"  {'':<13}{check.advice}", style="cyan", highlight=False)
    if any(check.outcome == "fail" for check in checks):
        err.print("some checks failed: see the lines with ✗")
        raise typer.Exit(1)


def _connected(config: Config) -> Config:
    """The settings with the addresses of the servers that run; of the others they stay empty."""
    with suppress(EverstateError):
        return resolve(config, needs=())
    return config


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
