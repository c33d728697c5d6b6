"""The roles of a running project: what each does in a process of its own, and who needs it."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from everstate.app import App
from everstate.cli.metrics import serving_figures
from everstate.config import Config
from everstate.errors import InvalidEntityType
from everstate.parts import Journal, Run, run_parts, states_folder


class Role(enum.StrEnum):
    """A role that runs by itself."""

    RELAY = "relay"
    PIPELINE = "pipeline"
    PUBLISHER = "publisher"
    COMMANDS = "commands"
    CLEAN = "clean"


def run_role(
    role: Role, config: Config, app: App, stop: threading.Event, *, given: Config | None = None
) -> None:
    """Do a role's work in this process until ``stop`` is set.

    ``given``: the settings without the addresses of the local servers that run now.
    """
    with serving_figures(config, role.value):
        if role is Role.CLEAN:
            run_clean(config, app, stop, given=given)
        else:
            _WORK[role].run(config, app, stop)


def roles_of(app: App) -> list[Role]:
    """The roles that an app has work for."""
    return [role for role, work in _WORK.items() if work.is_needed(app)]


def run_relay(config: Config, app: App, stop: threading.Event) -> None:
    """Move the outbox of the store to the log."""
    from everstate.log.topics import Topics
    from everstate.sources.outbox import relay_of

    def relay_until(stop: threading.Event) -> None:
        # The pipeline makes them too, but Spark takes long to start, and the relay need not wait.
        with Topics(config) as topics:
            topics.ensure(app.entities)
        # Facts come through the outbox's stream too, beside those that the API writes to the log.
        entity_types = (*app.entities_from("store"), *app.entities_from("log"))
        with relay_of(config, entity_types) as relay:
            relay.run(stop)

    _run_alone(config, Role.RELAY, relay_until, stop)


def run_pipeline(config: Config, app: App, stop: threading.Event) -> None:
    """Archive the changes and keep the views, in one Spark application."""
    # Imported here: Spark takes a second that no other role should pay.
    from everstate.pipeline.application import PipelineApplication

    PipelineApplication(config, app, app.truths(config)).run(stop)


def run_publisher(config: Config, app: App, stop: threading.Event) -> None:
    """Publish what was written to Cassandra."""
    from everstate.log.topics import Topics
    from everstate.sources.crud.stores.cassandra import Publisher

    def publish_until(stop: threading.Event) -> None:
        with Topics(config) as topics:
            topics.ensure(app.entities)
        with Publisher(config, app.entities_from("cassandra")) as publisher:
            publisher.run(stop)

    _run_alone(config, Role.PUBLISHER, publish_until, stop)


def run_commands(config: Config, app: App, stop: threading.Event) -> None:
    """Decide commands, and run all process managers; each is a part that fails alone."""
    from everstate.sources.commands import CommandHandler, ProcessRunner

    if not app.command_groups:
        raise InvalidEntityType(
            f"app {app.name} has no entity type that takes commands",
            advice='Register one with source="commands" and declare app.commands(…) for it.',
        )

    def handle(stop: threading.Event) -> None:
        with CommandHandler(config, app) as handler:
            handler.run(stop)

    def react(name: str, stop: threading.Event) -> None:
        with ProcessRunner(config, app, name) as runner:
            runner.run(stop)

    parts: dict[str, Run] = {"handler": handle}
    parts |= {f"process-{name}": partial(react, name) for name in app.processes}
    run_parts(_journal(config, Role.COMMANDS), parts, stop)


def run_clean(
    config: Config, app: App, stop: threading.Event, *, given: Config | None = None
) -> None:
    """Turn what captures wrote into changes, and restart what stops writing it.

    That is a connector that failed, and the local Connect when it crashed. ``given``: the settings
    without the addresses of the local servers that run now.
    """
    from everstate.local import connect
    from everstate.local import keep_running as keep_servers_running
    from everstate.pipeline.clean import cleaning_part
    from everstate.sources.cdc.restarting import keep_running, restarters_of

    parts = {
        name: cleaning_part(config, partial(app.cleaning, config, name)) for name in app.captures
    }
    servers = given or config
    restarters = restarters_of(app.captures, lambda: connect(servers))
    parts["connectors"] = partial(keep_running, restarters)
    captures = app.captures.values()
    if servers.capture.connect_url is None and any(
        capture.dsn is not None and capture.connect_url is None for capture in captures
    ):
        parts["connect"] = partial(keep_servers_running, servers, ("connect",))
    run_parts(_journal(config, Role.CLEAN), parts, stop)


def _journal(config: Config, role: Role) -> Journal:
    return Journal(role.value, states_folder(config.project.data_dir))


def _run_alone(config: Config, role: Role, run: Run, stop: threading.Event) -> None:
    """Run a role that is one part: what it raises ends the process, as nothing else is in it."""
    run_parts(_journal(config, role), {role.value: run}, stop, fatal=(BaseException,))


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
