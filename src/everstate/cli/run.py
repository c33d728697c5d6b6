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
    PUBLISHER = "publisher"


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
    elif only is Only.PUBLISHER:
        run_publisher(config, project_app, stop)
    else:
        _supervise(config, app, project_app, stop)


def run_relay(config: Config, app: App, stop: threading.Event) -> None:
    """Run the relay in this process until ``stop`` is set."""
    from everstate.log.topics import Topics
    from everstate.sources.outbox import Relay

    # The pipeline makes them too, but Spark takes long to start, and the relay need not wait.
    with Topics(config) as topics:
        topics.ensure(app.entities)
    with Relay(config, app.entities_from("store")) as relay:
        relay.run(stop)


def run_pipeline(config: Config, app: App, stop: threading.Event) -> None:
    """Run the Spark application in this process until ``stop`` is set."""
    # Imported here: Spark takes a second that no other role should pay.
    from everstate.pipeline.application import PipelineApplication

    PipelineApplication(config, app, app.truths(config)).run(stop)


def run_publisher(config: Config, app: App, stop: threading.Event) -> None:
    """Run Cassandra's publisher in this process until ``stop`` is set."""
    from everstate.log.topics import Topics
    from everstate.sources.crud.stores.cassandra import Publisher

    with Topics(config) as topics:
        topics.ensure(app.entities)
    with Publisher(config, app.entities_from("cassandra")) as publisher:
        publisher.run(stop)


def _roles(app: App) -> list[Only]:
    """The roles that an app has work for."""
    publisher = [Only.PUBLISHER] if app.entities_from("cassandra") else []
    return [Only.RELAY, Only.PIPELINE, *publisher]


def _supervise(config: Config, app: str | None, project_app: App, stop: threading.Event) -> None:
    spec = app or config.project.app
    if spec is None:
        raise InvalidConfig("project.app", None, "module:attribute of an App")
    folder, logs = config.project.data_dir.parent, config.project.data_dir / "logs"
    roles = _roles(project_app)
    supervisor = Supervisor({role: role_argv(role, folder, spec) for role in roles}, logs)
    err.print(f"{', '.join(roles)} run; their logs are in {logs}. Ctrl-C stops all.")
    supervisor.run(stop)
    err.print("stopped")
