"""`everstate handle`: the handlers of one group, in a service of its own."""

from __future__ import annotations

from typing import Annotated

import typer

from everstate.cli.console import AppSession
from everstate.roles import Role, run_roles
from everstate.runtime.supervisor import stop_on_signals
from everstate.telemetry import configure_logging


def handle(
    session: AppSession, group: Annotated[str, typer.Argument(help="Group of handlers.")]
) -> None:
    """Run the handlers of one group in this process; many may share its work."""
    configure_logging(session.config.logging, f"handle-{group}")
    config, app = session.connected()
    run_roles([Role.HANDLERS], config, app, stop_on_signals(), groups=[group])
