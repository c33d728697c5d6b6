"""`everstate down`: stop the local stack."""

from __future__ import annotations

import typer

from everstate.cli.console import JsonOption, config_of, out, print_json
from everstate.local import Stack


def down(context: typer.Context, json: JsonOption = False) -> None:
    """Stop the servers of this project; their data is kept."""
    stopped = Stack(config_of(context)).stop_all()
    if json:
        print_json({"stopped": stopped})
    elif stopped:
        out.print(f"stopped {' and '.join(stopped)}")
    else:
        out.print("no server was running")
