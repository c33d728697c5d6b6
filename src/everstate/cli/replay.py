"""`everstate replay`: writes changes of the archive again, to a topic or a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from everstate.cli.console import Session, Telling, working
from everstate.cli.get import moment_of
from everstate.cli.results import Aside, Result, ResultTable
from everstate.config import Config
from everstate.errors import InvalidQuery
from everstate.local import resolve
from everstate.serving.words import moment_text

if TYPE_CHECKING:
    from everstate.pipeline.archiving.selection import Replayed, Selection


_To = Annotated[str | None, typer.Option("--to", help="Topic to write to: a new or an empty one.")]
_File = Annotated[
    Path | None, typer.Option("--file", help="New file to write to: .jsonl or .parquet.")
]
_Key = Annotated[str | None, typer.Option("--key", help="Only this key.")]
_From = Annotated[
    str | None, typer.Option("--from", help="Only changes that occurred then or later.")
]
_Until = Annotated[str | None, typer.Option("--until", help="Only changes that occurred before.")]
_RecordedFrom = Annotated[
    str | None, typer.Option("--recorded-from", help="Only changes recorded then or later.")
]
_RecordedUntil = Annotated[
    str | None, typer.Option("--recorded-until", help="Only changes recorded before.")
]
_By = Annotated[
    list[str] | None,
    typer.Option("--by", help="Only of a provenance: service_name=importer; once for each field."),
]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Count the records, and write nothing.")]
_Append = Annotated[bool, typer.Option("--append", help="Accept a topic that has records.")]


def replay(
    session: Session,
    entity: Annotated[str, typer.Argument(help="Entity type.")],
    to: _To = None,
    file: _File = None,
    key: _Key = None,
    from_: _From = None,
    until: _Until = None,
    recorded_from: _RecordedFrom = None,
    recorded_until: _RecordedUntil = None,
    by: _By = None,
    dry_run: _DryRun = False,
    append: _Append = False,
    generation: Annotated[
        int, typer.Option("--generation", min=1, help="Generation of the changelog.")
    ] = 1,
) -> Result:
    """Write archived changes again: all, one key, a time range, or those of a provenance.

    Records are written byte for byte, to another topic or a file; without a condition, unreadable
    records too. Consumers that check versions treat changes that they have already as duplicates.
    """
    # Imported here: Arrow and the lake take a second that other verbs should not pay.
    from everstate.pipeline.archiving.selection import Selection

    selection = Selection(
        key=key,
        from_=moment_of(from_),
        until=moment_of(until),
        recorded_from=moment_of(recorded_from),
        recorded_until=moment_of(recorded_until),
        provenance=_provenance(by or ()),
    )
    config = session.config
    if dry_run:
        return _preview(config, entity, selection, generation)
    if (to is None) == (file is None):
        raise InvalidQuery("give --to TOPIC or --file FILE.")
    if append and file is not None:
        raise InvalidQuery("--append is for --to: a file is always a new one.")
    with working(f"reading the archive of {entity}") as tell:
        done = _written(config, entity, selection, to, file, generation, append, tell)
    restamped = (
        f"{done.restamped:,} records have the timestamp 0, which Kafka's client cannot send; "
        "they have the time of writing now"
    )
    row = (done.entity, done.to, done.records, done.partitions, round(done.seconds, 1))
    return Result(
        done,
        ResultTable(("entity", "to", "records", "partitions", "seconds"), [row]),
        notes=[Aside(restamped)] if done.restamped else [],
    )


def _preview(config: Config, entity: str, selection: Selection, generation: int) -> Result:
    """Show which changes would be written."""
    from everstate.pipeline.archiving.selection import preview

    with working(f"reading the archive of {entity}"):
        parts = preview(config, entity, selection, generation=generation)
    rows = (
        (
            *(part.partition, part.records, part.first_offset, part.last_offset),
            part.first_recorded_at and moment_text(part.first_recorded_at),
            part.last_recorded_at and moment_text(part.last_recorded_at),
        )
        for part in parts
    )
    columns = ("partition", "records", "first offset", "last", "first recorded", "last recorded")
    written = f"{sum(part.records for part in parts):,} records would be written; nothing was"
    return Result(parts, ResultTable(columns, rows), Aside(written))


def _written(
    config: Config,
    entity: str,
    selection: Selection,
    to: str | None,
    file: Path | None,
    generation: int,
    append: bool,
    tell: Telling,
) -> Replayed:
    from everstate.pipeline.archiving.selection import Selection, replay_to_file, replay_to_topic

    def told(written: int) -> None:
        tell.now(f"{written:,} records written")

    if file is not None:
        return replay_to_file(
            config, entity, selection, file, generation=generation, on_written=told
        )
    assert to is not None, "it is one of the two"
    running = resolve(config, needs=("kafka",))
    if selection != Selection() or append:
        how = {"generation": generation, "append": append}
        return replay_to_topic(running, entity, selection, to, **how, on_written=told)  # type: ignore[arg-type]
    # Without conditions: one task for each partition.
    from everstate.pipeline.archiving.replay import replay as replay_all
    from everstate.pipeline.spark.session import own_spark

    tell("starting Spark")
    with own_spark(running) as spark:
        tell(f"writing {to}")
        return replay_all(spark, running, entity, to, generation=generation)


def _provenance(given: Sequence[str]) -> dict[str, str]:
    """Field of the provenance → its value; a change has one value of each."""
    found: dict[str, str] = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not separator:
            raise InvalidQuery(f"--by {text}: write it as service_name=importer.")
        if name.strip() in found:
            raise InvalidQuery(
                f"--by {name.strip()} is given twice, and no change has two of them.",
                advice="Replay them one after the other: `--to` a topic with --append.",
            )
        found[name.strip()] = value
    return found
