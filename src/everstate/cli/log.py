"""`everstate log`: how large it is, and a new one if it is lost or has other partitions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from everstate.app import App
from everstate.archive.commits import ArchiveLog
from everstate.attention.conditions import of_readers
from everstate.attention.looking import all_readers
from everstate.cli.console import AppSession
from everstate.cli.results import Aside, Piece, Result, ResultTable, Verbs
from everstate.cli.standing import note
from everstate.config import Config
from everstate.errors import EverstateError, LogError
from everstate.log.bound import Bound, changelogs
from everstate.log.positions import Offsets
from everstate.log.topics import Topics
from everstate.runtime.claim import claimed
from everstate.serving import Reader
from everstate.serving.log_size import LogSize, log_size
from everstate.serving.log_state import LogReader, topic_states
from everstate.serving.words import duration_text, size_text
from everstate.sources.ways import truths_of, ways_in
from everstate.views.control import opened_control

log = Verbs(no_args_is_help=True, help="Show how large the log is, and begin a new one.")


@log.command("size")
def size(session: AppSession) -> Result:
    """Show how large the topics are, how fast they grow, and who is how far behind.

    Rates are those of the last day, or of the time since a topic's oldest record. Bytes are those
    of all replicas; a day of changes is also what one more day of retention costs. A reader that
    stops now has lost changes after the time in the last column.
    """
    config, project = session.connected()
    topics = topic_states(config)
    found, readers, notes = log_size(config, topics), list[LogReader](), list[Aside]()
    try:
        with Reader(config, project) as reader:
            control = reader.connection.standings(config.views.schema_name)
            readers = all_readers(config, project, control, topics, found)
    except EverstateError as error:
        notes.append(note(f"who reads the log is not known: {error.message}"))
    if found.unknown is not None:
        notes.append(note(found.unknown.message))
    readers.sort(key=lambda each: -(each.share or 0.0))
    names = ("broker", "folder", "usable_bytes")
    disks = [
        {**{name: getattr(disk, name) for name in names}, "full_in_s": full_s}
        for disk, full_s in found.disks
    ]
    lags = [{**asdict(each), "share": each.share, "holds_s": each.holds_s} for each in readers]
    value = {"topics": list(found.topics.values()), "disks": disks, "readers": lags}
    return Result(value, *_size_pieces(config, found, readers), notes=notes)


def _size_pieces(config: Config, found: LogSize, readers: Sequence[LogReader]) -> Iterator[Piece]:
    prefix = f"{config.log.prefix}."
    topics = [
        (
            *(each.name.removeprefix(prefix), size_text(each.bytes), each.changes_per_s),
            *(size_text(each.day_bytes), duration_text(each.holds_s)),
            "for ever" if each.keeps_s is None else duration_text(each.keeps_s),
        )
        for each in found.topics.values()
    ]
    sizes = ("topic", "size", "changes/s", "a day", "oldest", "keeps")
    yield ResultTable(sizes, topics, none="the log has no records of this project")
    lags = [
        (
            *(each.reader, each.topic.removeprefix(prefix), each.lag_changes),
            duration_text(each.lag_seconds) if each.lag_changes else None,
            None if each.share is None else f"{each.share:.0%}",
            "never" if each.holds_s is None else duration_text(each.holds_s),
        )
        for each in readers
    ]
    columns = ("reader", "topic", "unread", "oldest", "of keeps", "lost in")
    yield ResultTable(columns, lags, none="no reader of the log is known")
    for disk, full_s in found.disks:
        full = "never full" if full_s is None else f"full in {duration_text(full_s)}"
        said = f"{size_text(disk.usable_bytes)} free, {full} at this rate"
        said = "the broker does not report what is free" if disk.usable_bytes < 0 else said
        yield f"broker {disk.broker}, {disk.folder}: {said}"
    for each in found.topics.values():
        if each.partitions_needed > each.partitions:
            needs = f"its busiest hour needs about {each.partitions_needed}"
            yield f"{each.name}: {each.partitions} partitions, and {needs}"
    for concern in of_readers(readers, config.alerts):
        yield Text(f"{concern.text} {concern.advice}", "red")


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
