"""`everstate run`: the roles of a project, supervised."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

import typer

from everstate.app import App
from everstate.cli.claim import claimed
from everstate.cli.console import AppOption, config_of, err, project_of
from everstate.cli.roles import Role, roles_of, run_role
from everstate.cli.supervisor import (
    Supervisor,
    role_argv,
    stop_on_signals,
    stop_with_parent,
)
from everstate.cli.watching import SUPERVISOR, Watch
from everstate.config import Config
from everstate.errors import EverstateError, InvalidConfig
from everstate.parts import Journal, states_folder
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
    given = config_of(context)
    config, project_app = project_of(context, app)
    stop = threading.Event()
    stop_on_signals(stop)
    if with_parent:
        stop_with_parent(stop)
    if only is None:
        _tell_plan(config, project_app)
    if only is not None:
        run_role(only, config, project_app, stop, given=given)
    else:
        _supervise(config, app, roles_of(project_app), stop)


def _tell_plan(config: Config, app: App) -> None:
    """Print what becomes of the views, when the app declares others than are kept."""
    from everstate.cli.plan import planned_steps, print_plan

    with suppress(EverstateError):  # the pipeline waits for a server that is away
        found = planned_steps(config, app)
        if any(step.published is not None for step in found):
            print_plan(found)


def _supervise(
    config: Config, app: str | None, roles: Sequence[Role], stop: threading.Event
) -> None:
    spec = app or config.project.app
    if spec is None:
        raise InvalidConfig("project.app", None, "module:attribute of an App")
    data_dir = config.project.data_dir
    logs = data_dir / "logs"
    with claimed(config):
        journal = Journal(SUPERVISOR, states_folder(data_dir))
        argv_of = {role.value: role_argv(role, config.folder, spec) for role in roles}
        supervisor = Supervisor(argv_of, logs, journal)
        *others, last = roles
        err.print(
            f"{', '.join(others)} and {last} run; their logs are in {logs}. Ctrl-C stops them all.",
            highlight=False,
        )
        try:
            supervisor.run(stop, Watch(data_dir).look)
        finally:
            journal.remove()
    err.print("stopped")
