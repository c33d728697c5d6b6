"""`everstate doctor`: look for what may be missing on this machine, and say what mends it."""

from __future__ import annotations

import typer
from rich.text import Text

from everstate.cli.console import SIGNS, JsonOption, config_of, err, load_app, out, print_json
from everstate.config import Config
from everstate.errors import EverstateError
from everstate.local import Check, machine_checks, stack_checks


def register(cli: typer.Typer) -> None:
    """Add the verb."""
    cli.command("doctor")(doctor)


def doctor(context: typer.Context, json: JsonOption = False) -> None:
    """Check Python, Java, disk, ports, cache, settings and servers; exit code 1 at a failure."""
    try:
        config = config_of(context)
    except EverstateError as error:
        checks = [Check("settings", "fail", error.message, error.advice)]
    else:
        checks = [*machine_checks(config), _settings(config), *stack_checks(config)]
    if json:
        print_json(checks)
    else:
        for check in checks:
            out.print(Text.assemble(SIGNS[check.outcome], f" {check.name:<13}{check.found}"))
            if check.mend:
                out.print(f"  {'':<13}{check.mend}", style="cyan", highlight=False)
    if any(check.outcome == "fail" for check in checks):
        err.print("something is missing: see the lines with ✗")
        raise typer.Exit(1)


def _settings(config: Config) -> Check:
    """Whether the settings name an app that loads."""
    if config.project.app is None:
        mend = 'set app = "module:attribute" under [project] in everstate.toml'
        return Check("settings", "warn", "no app is set", mend)
    try:
        app = load_app(None, config)
    except (EverstateError, ImportError) as error:
        return Check("settings", "fail", str(error), "correct project.app in everstate.toml")
    return Check("settings", "ok", f"app {app.name} with {len(app.entities)} entity types")
