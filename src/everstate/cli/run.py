"""`everstate run`: the roles of a project, supervised."""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import suppress
from typing import Annotated

import typer

from everstate.app import App
from everstate.cli.claim import claimed
from everstate.cli.console import AppOption, config_of, err, project_of
from everstate.cli.roles import Role, processes_of, run_roles
from everstate.cli.supervisor import (
    Supervisor,
    role_argv,
    stop_on_signals,
    stop_with_parent,
)
from everstate.cli.watching import Watch
from everstate.config import Config
from everstate.errors import EverstateError, InvalidConfig
from everstate.parts import Journal, states_folder
from everstate.serving.troubles import SUPERVISOR
from everstate.telemetry import configure_logging
from everstate.views.control import Control
from everstate.views.database import connect_views, views_errors

logger = logging.getLogger(__name__)


def run(
    context: typer.Context,
    only: Annotated[
        list[Role] | None,
        typer.Option(
            "--only",
            help="Run one role in this process, unsupervised; pipeline and clean can share one.",
        ),
    ] = None,
    app: AppOption = None,
    with_parent: Annotated[int | None, typer.Option("--with-parent", hidden=True)] = None,
    deployment: Annotated[int | None, typer.Option("--deployment", hidden=True)] = None,
) -> None:
    """Move changes from the store to the log, archive them, and keep the views, until stopped.

    Commands are decided and Cassandra's changes published where the app has entity types of that
    kind.
    """
    given = config_of(context)
    configure_logging(given.logging, "+".join(only or (SUPERVISOR,)))
    config, project_app = project_of(context, app)
    stop = threading.Event()
    stop_on_signals(stop)
    if with_parent is not None:
        stop_with_parent(stop, with_parent)
    if only:
        run_roles(only, config, project_app, stop, given=given, deployment=deployment)
        return
    _tell_plan(config, project_app)
    _supervise(config, app, project_app, stop)


def _tell_plan(config: Config, app: App) -> None:
    """Print how models and views change, if the app declares others than are kept.

    Raises InvalidModelChange before any process is started.
    """
    from everstate.cli.plan import planned, print_plan, tell_refused
    from everstate.views.models import check_models

    tell_refused(app)
    try:
        changes, found = planned(config, app)
    except EverstateError:
        return  # the pipeline waits for a server that is down, and reports it
    if not found.is_first and (found.models or found.views):
        print_plan(found)
    check_models(changes)


def _begin_deployment(config: Config, app: App) -> int | None:
    """Number this start, so that processes of an earlier one cannot revert its declarations."""
    with suppress(EverstateError), views_errors(config.views_dsn):
        with connect_views(config.views_dsn) as connection:
            control = Control(connection, config.views.schema_name)
            control.install()
            return control.begin_deployment(app.name, socket.gethostname())
    return None


def _supervise(config: Config, app: str | None, project: App, stop: threading.Event) -> None:
    spec, processes = app or config.project.app, processes_of(config, project)
    if spec is None:
        raise InvalidConfig("project.app", None, "module:attribute of an App")
    data_dir = config.project.data_dir
    logs = data_dir / "logs"
    with claimed(config):
        journal = Journal(SUPERVISOR, states_folder(data_dir))
        number = _begin_deployment(config, project)
        argv_of = {
            name: role_argv(roles, config.folder, spec, number) for name, roles in processes.items()
        }
        supervisor = Supervisor(argv_of, logs, journal)
        *others, last = [role for roles in processes.values() for role in roles]
        err.print(
            f"{', '.join(others)} and {last} run; their logs are in {logs}. Ctrl-C stops them all.",
            highlight=False,
        )
        try:
            supervisor.run(stop, Watch(data_dir).look)
        finally:
            journal.remove()
    err.print("stopped")
