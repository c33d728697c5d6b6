"""The roles of a running project: what each does in a process of its own, and who needs it."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass

from everstate.app import App
from everstate.config import Config
from everstate.errors import InvalidEntityType


class Role(enum.StrEnum):
    """A role that runs by itself."""

    RELAY = "relay"
    PIPELINE = "pipeline"
    PUBLISHER = "publisher"
    COMMANDS = "commands"
    CLEAN = "clean"


def run_role(role: Role, config: Config, app: App, stop: threading.Event) -> None:
    """Do a role's work in this process until ``stop`` is set."""
    _WORK[role].run(config, app, stop)


def roles_of(app: App) -> list[Role]:
    """The roles that an app has work for."""
    return [role for role, work in _WORK.items() if work.is_needed(app)]


def run_relay(config: Config, app: App, stop: threading.Event) -> None:
    """Move the outbox of the store to the log."""
    from everstate.log.topics import Topics
    from everstate.sources.outbox import relay_of

    # The pipeline makes them too, but Spark takes long to start, and the relay need not wait.
    with Topics(config) as topics:
        topics.ensure(app.entities)
    # Facts come through the outbox's stream too, beside those that the API writes to the log.
    entity_types = (*app.entities_from("store"), *app.entities_from("log"))
    with relay_of(config, entity_types) as relay:
        relay.run(stop)


def run_pipeline(config: Config, app: App, stop: threading.Event) -> None:
    """Archive the changes and keep the views, in one Spark application."""
    # Imported here: Spark takes a second that no other role should pay.
    from everstate.pipeline.application import PipelineApplication

    PipelineApplication(config, app, app.truths(config)).run(stop)


def run_publisher(config: Config, app: App, stop: threading.Event) -> None:
    """Publish what was written to Cassandra."""
    from everstate.log.topics import Topics
    from everstate.sources.crud.stores.cassandra import Publisher

    with Topics(config) as topics:
        topics.ensure(app.entities)
    with Publisher(config, app.entities_from("cassandra")) as publisher:
        publisher.run(stop)


def run_commands(config: Config, app: App, stop: threading.Event) -> None:
    """Decide commands, and run all process managers.

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


def run_clean(config: Config, app: App, stop: threading.Event) -> None:
    """Turn what captures wrote into changes, and restart their connectors when they fail."""
    from everstate.local import connect
    from everstate.pipeline.clean import run_cleaners
    from everstate.sources.cdc.restarting import keep_running, restarters_of

    restarters = restarters_of(app.captures, lambda: connect(config))
    watching = threading.Thread(
        target=keep_running, args=(restarters, stop), name="restart-captures", daemon=True
    )
    watching.start()
    run_cleaners(config, app.cleanings(config), stop)


@dataclass(frozen=True, slots=True)
class _Work:
    """What a role does, and whether an app needs it."""

    run: Callable[[Config, App, threading.Event], None]
    is_needed: Callable[[App], bool]


_WORK = {
    Role.RELAY: _Work(run_relay, lambda app: True),
    Role.PIPELINE: _Work(run_pipeline, lambda app: True),
    Role.PUBLISHER: _Work(run_publisher, lambda app: bool(app.entities_from("cassandra"))),
    Role.COMMANDS: _Work(run_commands, lambda app: bool(app.command_groups)),
    Role.CLEAN: _Work(run_clean, lambda app: bool(app.captures)),
}
