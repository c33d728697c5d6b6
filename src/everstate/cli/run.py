"""`everstate run`: relay, Spark application and command handler, supervised."""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
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
from everstate.errors import InvalidConfig, InvalidEntityType
from everstate.local import connect
from everstate.telemetry import configure_logging

log = logging.getLogger(__name__)


class Only(enum.StrEnum):
    """A role that runs by itself."""

    RELAY = "relay"
    PIPELINE = "pipeline"
    COMMANDS = "commands"


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
    """Move changes from the store to the log, archive them, and keep the views, until stopped.

    When entity types take commands, those are decided too.
    """
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
    elif only is Only.COMMANDS:
        run_commands(config, project_app, stop)
    else:
        _supervise(config, app, roles_of(project_app), stop)


def run_relay(config: Config, app: App, stop: threading.Event) -> None:
    """Run the relay in this process until ``stop`` is set."""
    from everstate.log.topics import Topics
    from everstate.sources.outbox import Relay

    # The pipeline makes them too, but Spark takes long to start, and the relay need not wait.
    with Topics(config) as topics:
        topics.ensure(app.entities)
    stored = [each for name, each in app.entities.items() if app.source_of(name) != "commands"]
    with Relay(config, stored) as relay:
        relay.run(stop)


def run_pipeline(config: Config, app: App, stop: threading.Event) -> None:
    """Run the Spark application in this process until ``stop`` is set."""
    # Imported here: Spark takes a second that no other role should pay.
    from everstate.pipeline.application import PipelineApplication

    PipelineApplication(config, app).run(stop)


def run_commands(config: Config, app: App, stop: threading.Event) -> None:
    """Run the command handler and all process managers in this process until ``stop`` is set.

    Each has a thread; when one fails, all are stopped and its error is raised.
    """
    from everstate.sources.commands import CommandHandler, ProcessRunner

    if not app.command_groups:
        raise InvalidEntityType(
            f"app {app.name} has no entity type that takes commands",
            advice='Register one with source="commands" and declare app.commands(…) for it.',
        )
    runners: list[CommandHandler | ProcessRunner] = [CommandHandler(config, app)]
    runners += [ProcessRunner(config, app, name) for name in app.processes]
    with ThreadPoolExecutor(len(runners), thread_name_prefix="commands") as pool:
        running = [pool.submit(runner.run, stop) for runner in runners]
        wait(running, return_when=FIRST_COMPLETED)
        stop.set()
    for runner in runners:
        runner.close()
    for each in running:
        each.result()


def roles_of(app: App) -> list[Only]:
    """The roles that an app needs."""
    return [role for role in Only if role is not Only.COMMANDS or app.command_groups]


def _supervise(
    config: Config, app: str | None, roles: Sequence[Only], stop: threading.Event
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
