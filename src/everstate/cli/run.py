"""`everstate run`: the roles of a project, supervised."""

from __future__ import annotations

import logging
import socket
import threading
from typing import Annotated

import typer

from everstate.app import App
from everstate.cli.console import AppSession, err
from everstate.cli.results import show_pieces
from everstate.cli.watching import Watch
from everstate.config import Config
from everstate.errors import EverstateError, InvalidConfig, StatementRefused
from everstate.parts import Journal, states_folder
from everstate.roles import Role, processes_of, run_roles
from everstate.runtime.claim import claimed
from everstate.runtime.supervisor import (
    Supervisor,
    role_argv,
    stop_on_signals,
)
from everstate.serving.troubles import SUPERVISOR
from everstate.telemetry import configure_logging
from everstate.views.control import opened_control

logger = logging.getLogger(__name__)


def run(
    session: AppSession,
    only: Annotated[
        list[Role] | None,
        typer.Option(
            "--only",
            help="Run one role in this process, unsupervised; pipeline and clean can share one.",
        ),
    ] = None,
    with_parent: Annotated[int | None, typer.Option("--with-parent", hidden=True)] = None,
    deployment: Annotated[int | None, typer.Option("--deployment", hidden=True)] = None,
) -> None:
    """Move changes from the store to the log, archive them, and keep the views, until stopped.

    Commands are decided and Cassandra's changes published where the app has entity types of that
    kind.
    """
    given = session.config
    configure_logging(given.logging, "+".join(only or (SUPERVISOR,)))
    config, project_app = session.connected()
    stop = stop_on_signals(with_parent)
    if only:
        run_roles(only, config, project_app, stop, given=given, deployment=deployment)
        return
    _tell_plan(config, project_app)
    _supervise(config, session.spec, project_app, stop)


def _tell_plan(config: Config, app: App) -> None:
    """Print how models and views change, if the app declares others than are kept.

    Raises InvalidModelChange before any process is started.
    """
    from everstate.cli.plan import plan_pieces, planned, tell_refused
    from everstate.views.models import check_models

    tell_refused(app)
    try:
        changes, found = planned(config, app)
    except StatementRefused:
        raise
    except EverstateError:
        return  # the pipeline waits for a server that is down, and reports it
    if not found.is_first:
        show_pieces(*plan_pieces(found))
    check_models(changes)


def _begin_deployment(config: Config, app: App) -> int | None:
    """Number this start, so that processes of an earlier one cannot revert its declarations."""
    try:
        with opened_control(config) as control:
            control.install()
            return control.begin_deployment(app.name, socket.gethostname())
    except StatementRefused:
        raise
    except EverstateError:
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
