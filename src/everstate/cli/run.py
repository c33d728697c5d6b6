"""`everstate run`: the relay and the Spark application, supervised."""

from __future__ import annotations

import enum
import logging
import threading
from typing import Annotated

import typer

from everstate.app import App
from everstate.cli.console import AppOption, config_of, err, load_app
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


class Only(enum.StrEnum):
    """A role that runs by itself."""

    RELAY = "relay"
    PIPELINE = "pipeline"
    CLEAN = "clean"


def register(cli: typer.Typer) -> None:
    """Add the verb."""
    cli.command("run")(run)


def run(
    context: typer.Context,
    only: Annotated[
        Only | None, typer.Option("--only", help="Run one role in this process, unsupervised.")
    ] = None,
    app: AppOption = None,
    with_parent: Annotated[bool, typer.Option("--with-parent", hidden=True)] = False,
) -> None:
    """Move changes from the store to the log, archive them, and keep the views, until stopped."""
    configure_logging()
    config = connect(config_of(context))
    project_app = load_app(app, config)
    stop = threading.Event()
    stop_on_signals(stop)
    if with_parent:
        stop_with_parent(stop)
    if only is Only.RELAY:
        run_relay(config, project_app, stop)
    elif only is Only.PIPELINE:
        run_pipeline(config, project_app, stop)
    elif only is Only.CLEAN:
        run_clean(config, project_app, stop)
    else:
        _supervise(config, app, project_app, stop)


def run_relay(config: Config, app: App, stop: threading.Event) -> None:
    """Run the relay in this process until ``stop`` is set."""
    from everstate.log.topics import Topics
    from everstate.sources.outbox import Relay

    # The pipeline makes them too, but Spark takes long to start, and the relay need not wait.
    with Topics(config) as topics:
        topics.ensure(app.entities)
    with Relay(config, app.entities.values()) as relay:
        relay.run(stop)


def run_pipeline(config: Config, app: App, stop: threading.Event) -> None:
    """Run the Spark application in this process until ``stop`` is set."""
    # Imported here: Spark takes a second that no other role should pay.
    from everstate.pipeline.application import PipelineApplication

    PipelineApplication(config, app).run(stop)


def run_clean(config: Config, app: App, stop: threading.Event) -> None:
    """Clean the app's captures in this process until ``stop`` is set."""
    from everstate.pipeline.clean import run_cleaners

    run_cleaners(config, app.cleanings(config), stop)


def _supervise(config: Config, app: str | None, project: App, stop: threading.Event) -> None:
    spec = app or config.project.app
    if spec is None:
        raise InvalidConfig("project.app", None, "module:attribute of an App")
    folder, logs = config.project.data_dir.parent, config.project.data_dir / "logs"
    roles = [role for role in Only if role is not Only.CLEAN or project.captures]
    supervisor = Supervisor({role: role_argv(role, folder, spec) for role in roles}, logs)
    err.print(f"{', '.join(roles)} run; their logs are in {logs}. Ctrl-C stops all.")
    supervisor.run(stop)
    err.print("stopped")
