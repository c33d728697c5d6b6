"""The roles of a running project: the work of each process, and which apps need it."""

from __future__ import annotations

import enum
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Final

from everstate.app import App
from everstate.config import Config
from everstate.errors import Fenced, InvalidConfig, InvalidModelChange, SparkLost
from everstate.parts import Journal, PartRun, run_parts, states_folder
from everstate.runtime.figures import serving_figures
from everstate.sources.ways import truths_of, ways_in

CLEAN_PART: Final = "clean-"
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
    HANDLERS = "handlers"


def run_roles(
    roles: Sequence[Role],
    config: Config,
    app: App,
    stop: threading.Event,
    *,
    given: Config | None = None,
    deployment: int | None = None,
    groups: Sequence[str] = (),
) -> None:
    """Do the work of roles in this process until ``stop`` is set.

    Only pipeline and clean can be combined; they share one Spark session. Raises InvalidConfig for
    other combinations. ``given``: the settings without the addresses of running local servers.
    ``deployment``: number of the start of the project to which they belong. ``groups``: those of
    handlers; default: all. Raises InvalidHandler.
    """
    wanted = list(dict.fromkeys(roles))
    if len(wanted) > 1 and set(wanted) != {Role.PIPELINE, Role.CLEAN}:
        names = ", ".join(wanted)
        raise InvalidConfig("--only", names, "one role, or pipeline and clean in one process")
    role = Role.PIPELINE if len(wanted) > 1 else wanted[0]
    with serving_figures(config, role.value):
        if role in (Role.PIPELINE, Role.CLEAN):
            _run_on_spark(wanted, role, config, app, stop, given or config, deployment)
            return
        if role is Role.ALERTS:
            from everstate.attention.alerting import Alerting

            parts: Mapping[str, PartRun] = Alerting(config, app).parts()
        elif role is Role.HANDLERS:
            from everstate.handling.worker import handler_parts

            parts = handler_parts(config, app, groups)
        elif role is Role.DERIVE:
            from everstate.pipeline.derive.deriver import raw_parts

            parts = raw_parts(config, app)
        else:
            (way_in,) = (each for each in ways_in(config, app) if each.role == role)
            parts = way_in.parts()
        # Errors end a role of one part, which has no other part.
        fatal = (BaseException,) if list(parts) == [role] else ()
        run_parts(_journal(config, role), parts, stop, fatal=fatal)


def processes_of(config: Config, app: App) -> dict[str, list[Role]]:
    """The roles that an app has work for, by the name of the process that does it.

    The pipeline's process also cleans, so that one JVM runs Spark for both.
    """
    needed = {way_in.role for way_in in ways_in(config, app) if way_in.is_used}
    needed |= {Role.PIPELINE, Role.ALERTS}
    if any(each.is_raw for each in app.derivations.values()):
        needed.add(Role.DERIVE)
    if app.handlers:
        needed.add(Role.HANDLERS)
    found = {role.value: [role] for role in Role if role in needed}
    if found.pop(Role.CLEAN.value, None):
        found[Role.PIPELINE.value].append(Role.CLEAN)
    return found


def _run_on_spark(
    wanted: Sequence[Role],
    role: Role,
    config: Config,
    app: App,
    stop: threading.Event,
    servers: Config,
    deployment: int | None,
) -> None:
    """Run the parts of these roles in one Spark session.

    A part that fails is started again without stopping the others. A lost JVM, or another process
    that took this one's place, ends all parts; but each capture is fenced alone.
    """
    # Imported here: Spark takes a second that no other role should pay.
    from everstate.local import SentenceProgress, spark_jars
    from everstate.pipeline.application import pipeline_parts
    from everstate.pipeline.spark.session import own_spark

    journal = _journal(config, role)
    spark_jars(config, SentenceProgress(journal.doing))
    journal.doing("starting Spark")
    fatal = (SparkLost,) if role is Role.CLEAN else (SparkLost, Fenced, InvalidModelChange)
    with own_spark(config, app_name=f"everstate {role} {app.name}") as spark, ExitStack() as opened:
        parts: dict[str, PartRun] = {}
        if Role.PIPELINE in wanted:
            truths = truths_of(config, app)
            keeping = pipeline_parts(spark, config, app, truths, deployment=deployment)
            parts |= opened.enter_context(keeping)
        if Role.CLEAN in wanted:
            parts |= _clean_parts(config, app, servers)
        run_parts(journal, parts, stop, fatal=fatal)


def _clean_parts(config: Config, app: App, servers: Config) -> dict[str, PartRun]:
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


def _journal(config: Config, role: Role) -> Journal:
    return Journal(role.value, states_folder(config.project.data_dir))
