"""The roles of a running project: the work of each process, and which apps need it."""

from __future__ import annotations

import enum
import threading
from collections.abc import Sequence

from everstate.app import App
from everstate.cli.metrics import serving_figures
from everstate.config import Config
from everstate.errors import InvalidConfig
from everstate.parts import Journal, PartRun, run_parts, states_folder
from everstate.sources.ways import truths_of, ways_in

CLEAN_PART = "clean-"
"""Prefix of the name of the part that cleans a capture."""


class Role(enum.StrEnum):
    """A role that can run in a process of its own."""

    RELAY = "relay"
    PIPELINE = "pipeline"
    PUBLISHER = "publisher"
    COMMANDS = "commands"
    CLEAN = "clean"
    DERIVE = "derive"
    ALERTS = "alerts"


def run_roles(
    roles: Sequence[Role],
    config: Config,
    app: App,
    stop: threading.Event,
    *,
    given: Config | None = None,
    deployment: int | None = None,
) -> None:
    """Do the work of roles in this process until ``stop`` is set.

    Only pipeline and clean can be combined; they share one Spark session. Raises InvalidConfig for
    other combinations. ``given``: the settings without the addresses of running local servers.
    ``deployment``: number of the start of the project to which they belong.
    """
    wanted = list(dict.fromkeys(roles))
    if len(wanted) > 1 and set(wanted) != {Role.PIPELINE, Role.CLEAN}:
        names = ", ".join(wanted)
        raise InvalidConfig("--only", names, "one role, or pipeline and clean in one process")
    first = Role.PIPELINE if len(wanted) > 1 else wanted[0]
    with serving_figures(config, first.value):
        if first is Role.PIPELINE:
            clean = given or config if len(wanted) > 1 else None
            run_pipeline(config, app, stop, clean=clean, deployment=deployment)
        elif first is Role.CLEAN:
            run_clean(config, app, stop, given=given)
        elif first is Role.DERIVE:
            run_derive(config, app, stop)
        elif first is Role.ALERTS:
            run_alerts(config, app, stop)
        else:
            run_way_in(config, app, first, stop)


def processes_of(config: Config, app: App) -> dict[str, list[Role]]:
    """The roles that an app has work for, by the name of the process that does it.

    The pipeline's process also cleans, so that one JVM runs Spark for both.
    """
    needed = {way_in.role for way_in in ways_in(config, app) if way_in.is_used}
    needed |= {Role.PIPELINE, Role.ALERTS}
    if any(each.is_raw for each in app.derivations.values()):
        needed.add(Role.DERIVE)
    found = {role.value: [role] for role in Role if role in needed}
    if found.pop(Role.CLEAN.value, None):
        found[Role.PIPELINE.value].append(Role.CLEAN)
    return found


def run_way_in(config: Config, app: App, role: Role, stop: threading.Event) -> None:
    """Do the work of a way in's role. Errors end a role of one part, which has no other part."""
    (way_in,) = (each for each in ways_in(config, app) if each.role == role)
    parts = way_in.parts()
    fatal = (BaseException,) if list(parts) == [role] else ()
    run_parts(_journal(config, role), parts, stop, fatal=fatal)


def run_pipeline(
    config: Config,
    app: App,
    stop: threading.Event,
    *,
    clean: Config | None = None,
    deployment: int | None = None,
) -> None:
    """Archive the changes and keep the views, in one Spark application.

    ``clean``: clean the captures in it, too; the settings as for :func:`run_clean`.
    """
    # Imported here: Spark takes a second that no other role should pay.
    from everstate.pipeline.application import PipelineApplication

    truths = truths_of(config, app)
    more = {} if clean is None else clean_parts(config, app, clean)
    PipelineApplication(config, app, truths, deployment=deployment, more=more).run(stop)


def run_clean(
    config: Config, app: App, stop: threading.Event, *, given: Config | None = None
) -> None:
    """Turn the raw rows of captures into changes, in a Spark application of its own.

    ``given``: the settings without the addresses of running local servers.
    """
    from everstate.errors import SparkLost
    from everstate.pipeline.spark.session import own_spark

    journal = _journal(config, Role.CLEAN)
    journal.doing("starting Spark")
    with own_spark(config, app_name="everstate clean"):
        run_parts(journal, clean_parts(config, app, given or config), stop, fatal=(SparkLost,))


def clean_parts(config: Config, app: App, servers: Config) -> dict[str, PartRun]:
    """A part for each capture, and parts that restart failed writers of raw topics.

    These are failed connectors, and the local Connect when it crashed. ``servers``: the settings
    without the addresses of running local servers.
    """
    # Imported here: the roles that do not clean need no Arrow.
    from everstate.pipeline.clean import cleaning_part
    from everstate.sources.cdc.way_in import Captures

    captures = Captures(config, app, given=servers)
    cleaning = {
        f"{CLEAN_PART}{name}": cleaning_part(config, opener)
        for name, opener in captures.cleanings().items()
    }
    return {**cleaning, **captures.parts()}


def run_derive(config: Config, app: App, stop: threading.Event) -> None:
    """Write the raw derived topics, in a Spark application of their own."""
    # Imported here: Spark takes a second that no other role should pay.
    from everstate.pipeline.derive.application import run_raw

    run_raw(config, app, stop)


def run_alerts(config: Config, app: App, stop: threading.Event) -> None:
    """Check what needs attention, log alerts, and send them to the webhook."""
    from everstate.attention.alerting import Alerting

    run_parts(_journal(config, Role.ALERTS), Alerting(config, app).parts(), stop)


def _journal(config: Config, role: Role) -> Journal:
    return Journal(role.value, states_folder(config.project.data_dir))
