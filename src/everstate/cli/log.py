"""`everstate log begin`: start a new log if the old one is lost or has other partitions."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from everstate.app import App
from everstate.archive.commits import ArchiveLog
from everstate.cli.console import AppSession
from everstate.cli.results import Result, ResultTable, Verbs
from everstate.config import Config
from everstate.errors import LogError
from everstate.log.bound import Bound, changelogs
from everstate.log.positions import Offsets
from everstate.log.topics import Topics
from everstate.runtime.claim import claimed
from everstate.sources.ways import truths_of, ways_in
from everstate.views.control import opened_control

log = Verbs(no_args_is_help=True, help="Begin a new log.")


@log.command("begin")
def begin(
    session: AppSession,
    again: Annotated[
        bool, typer.Option("--again", help="Accept records in the new topics.")
    ] = False,
) -> Result:
    """Let the stores publish to the log that everstate.toml names now, and to no other.

    For a log that lost its end, was made again, or got partitions. The old log stays, as do its
    lake and its views. The steps:

    1. Stop `everstate run`, and the services that publish. Remove captures: `everstate cdc remove`.
    The log is the source of truth of what commands or events write. Keep that:
    `everstate replay ENTITY --to NEWPREFIX.ENTITY.changes.g1`. From these changes follow the states
    and the answers of accepted commands. An archive has no rejections, no parked or undecided
    commands and no delayed ones of process managers: send again what is needed.

    2. In everstate.toml, give `log.prefix`, `archive.path` and `views.schema_name` new values.

    3. Run `everstate log begin` (with `--again` after a replay).

    4. Start `everstate run`. For each entity type of a store, `everstate drift repair ENTITY`
    publishes what the store has. Add captures again: `everstate cdc add`.
    """
    config, project = session.connected()
    moved = begin_log(config, project, again=again)
    repairs = [each for each in truths_of(config, project) if each in moved]
    value = {"moved": moved, "repair": repairs}
    if not moved:
        return Result(value, "The stores publish to this log already; nothing was changed.")
    then = ", then publish what the stores have:" if repairs else "."
    return Result(
        value,
        ResultTable(("entity", "from", "to"), [(name, *topics) for name, topics in moved.items()]),
        f"Next: start `everstate run`{then}",
        *(f"  everstate drift repair {name}" for name in repairs),
    )


def begin_log(config: Config, project: App, *, again: bool = False) -> dict[str, tuple[str, str]]:
    """Let the stores publish to the configured log; returns entity type → old and new changelog.

    Raises LogError when the log has records (unless ``again``), when views or archive belong to
    another log, or when process managers would react again, and Fenced while `everstate run` runs;
    nothing was changed then.
    """
    with claimed(config), Topics(config) as topics:
        topics.ensure(project.entities)
        bound = changelogs(config, project.entities)
        if not again:
            _check_empty(config, bound)
        _check_views(config, bound)
        _check_archive(config, bound)
        moved: dict[str, tuple[str, str]] = {}
        ways = ways_in(config, project)
        for way_in in ways:
            way_in.check_move(bound)
        for way_in in ways:
            moved |= way_in.move(bound)
        return moved


def _check_empty(config: Config, bound: Bound) -> None:
    with closing(Offsets(config)) as offsets:
        ends = offsets.stable_ends([each.topic for each in bound.values()])
    for (topic, _), end in ends.items():
        if end:
            raise LogError(
                f"topic {topic} has records already; a new log begins with empty topics.",
                advice="Choose a `log.prefix` that was never used. If you replayed into it: "
                "`everstate log begin --again`.",
            )


def _check_views(config: Config, bound: Bound) -> None:
    schema = config.views.schema_name
    with opened_control(config) as control:
        control.install()
        for entity, each in bound.items():
            stored = control.stored_topics(entity)
            if any(known != each.identity for known in stored.values()) or stored.keys() - {
                each.topic
            }:
                raise LogError(
                    f"schema {schema} has views of {entity} that were kept from another log.",
                    advice="Give `views.schema_name` a new value; readers see the old views in the "
                    "old schema until you drop it.",
                )


def _check_archive(config: Config, bound: Bound) -> None:
    for entity, each in bound.items():
        archive = ArchiveLog(config, entity)
        commit = archive.last() if archive.exists() else None
        ids = set() if commit is None or commit.note is None else set(commit.note.topics.values())
        if ids - {(each.identity.cluster_id, each.identity.topic_id)}:
            raise LogError(
                f"the archive of {entity} in {config.archive_path} is of another log.",
                advice="Give `archive.path` a new value; the old archive stays.",
            )
