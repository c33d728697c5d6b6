"""`everstate run`: the roles of a project, supervised."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Annotated

import typer

from everstate.cli.console import AppOption, config_of, err, load_app
from everstate.cli.roles import Role, roles_of, run_role
from everstate.cli.supervisor import (
    Supervisor,
    role_argv,
    stop_on_signals,
    stop_with_parent,
)
from everstate.config import Config
from everstate.errors import InvalidConfig
from everstate.local import connect
from everstate.telemetry import configure_logging

log = logging.getLogger(__name__)


def register(cli: typer.Typer) -> None:
    """Add the verb."""
    cli.command("run")(run)


def run(
    context: typer.Context,
    only: Annotated[
        Role | None, typer.Option("--only", help="Run one role in this process, unsupervised.")
    ] = None,
    app: AppOption = None,
    with_parent: Annotated[bool, typer.Option("--with-parent", hidden=True)] = False,
) -> None:
    """Move changes from the store to the log, archive them, and keep the views, until stopped.

    Commands are decided and Cassandra's changes published where the app has entity types of that
    kind.
    """
    configure_logging()
    config = connect(config_of(context))
    project_app = load_app(app, config)
    stop = threading.Event()
    stop_on_signals(stop)
    if with_parent:
        stop_with_parent(stop)
    if only is not None:
        run_role(only, config, project_app, stop)
    else:
        _supervise(config, app, roles_of(project_app), stop)


def _supervise(
    config: Config, app: str | None, roles: Sequence[Role], stop: threading.Event
) -> None:
    spec = app or config.project.app
    if spec is None:
        raise InvalidConfig("project.app", None, "module:attribute of an App")
    folder, logs = config.project.data_dir.parent, config.project.data_dir / "logs"
    supervisor = Supervisor({role: role_argv(role, folder, spec) for role in roles}, logs)
    *others, last = roles
    err.print(
        f"{', '.join(others)} and {last} run; their logs are in {logs}. Ctrl-C stops them all."
    )
    supervisor.run(stop)
    err.print("stopped")
