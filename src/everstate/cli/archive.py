"""`everstate archive`: prove the lake, repair it, compact it, and look at it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from everstate.archive import ArchiveReader
from everstate.cli.console import AppSession, Session, working
from everstate.cli.results import Piece, Result, ResultTable, Verbs
from everstate.errors import InvalidConfig, VerificationFailed
from everstate.local import resolve

if TYPE_CHECKING:
    from everstate.pipeline.archiving.audit import AuditReport

archive = Verbs(no_args_is_help=True, help="Prove, compact and list the archive in the lake.")

EntitiesArgument = Annotated[
    str | None, typer.Argument(help="Entity type. Default: all of the app.")
]


@archive.command("verify")
def verify(
    session: AppSession,
    entity: EntitiesArgument = None,
    against_log: Annotated[
        bool,
        typer.Option(
            "--against-log/--no-against-log",
            help="Also compare with the records that the log still has.",
        ),
    ] = True,
) -> Result:
    """Prove that the archive has each offset once, and each version with its predecessor."""
    from everstate.pipeline.archiving.audit import audit
    from everstate.pipeline.spark.session import own_spark

    names = _entities(entity, session)
    known = session.app(views=False).entities if session.has_app else {}
    config = resolve(session.config, needs=("kafka",))
    reports = []
    with working("starting Spark") as tell, own_spark(config) as spark:
        for name in names:
            tell(f"reading the archive of {name}, and its log")
            of = known.get(name)
            reports.append(audit(spark, config, name, against_log=against_log, entity_type=of))
    return Result(
        [report.to_dict() for report in reports],
        *(each for report in reports for each in _told(report)),
        then=partial(_check, reports),
    )


def _check(reports: Sequence[AuditReport]) -> None:
    failed = [report.entity for report in reports if not report.holds]
    if failed:
        raise VerificationFailed(f"the proof of the archive failed: {', '.join(failed)}.")


@archive.command("repair")
def repair(session: AppSession, entity: EntitiesArgument = None) -> Result:
    """Write the records of damaged files again, while the log has them.

    The damaged files are moved to the folder `_damaged` of the table. A file without sums gets
    some, when those of its pages are right. Afterwards `archive verify` compares all records with
    those of the log.
    """
    from everstate.log.positions import Offsets
    from everstate.log.topics import Topics
    from everstate.pipeline.archiving.repair import repair as repair_one
    from everstate.pipeline.spark.session import own_spark

    entities = session.app(views=False).entities
    names = _entities(entity, session)
    config = resolve(session.config, needs=("kafka",))
    done = []
    with (
        working("starting Spark") as tell,
        own_spark(config) as spark,
        Offsets(config) as offsets,
        Topics(config) as topics,
    ):
        for name in names:
            tell(f"reading the archive of {name}")
            of = entities[name]
            done.append(repair_one(spark, config, of, offsets=offsets, topics=topics))
    rows = (
        (one.entity, "\n".join(one.files), one.records, len(one.summed), round(one.seconds, 1))
        for one in done
    )
    columns = ("entity", "damaged files", "records written again", "files with new sums", "seconds")
    return Result(done, ResultTable(columns, rows))


@archive.command("compact")
def compact(
    session: AppSession,
    entity: EntitiesArgument = None,
    cluster: Annotated[
        bool | None,
        typer.Option(
            "--cluster/--no-cluster",
            help="Sort all files by key. Default: when the archive doubled since the last time.",
        ),
    ] = None,
) -> Result:
    """Compact small files into larger ones; reading and appending continue meanwhile."""
    from everstate.pipeline.archiving.compact import compact as compact_one
    from everstate.pipeline.spark.session import own_spark

    names, done = _entities(entity, session), []
    with working("starting Spark") as tell, own_spark(session.config) as spark:
        for name in names:
            tell(f"compacting the archive of {name}")
            done.append(compact_one(spark, session.config, name, cluster=cluster))
    rows = (
        (
            *(one.entity, one.files_before, one.files_after, one.bytes / 2**20, one.clustered),
            round(one.seconds, 1),
        )
        for one in done
    )
    columns = ("entity", "files before", "after", "MiB", "clustered", "seconds")
    return Result(done, ResultTable(columns, rows))


@archive.command("reparse")
def reparse(session: AppSession, entity: EntitiesArgument = None) -> Result:
    """Write the typed columns again from the messages, by the present models.

    After a change of a model, or when `archive verify` found wrong columns. The messages stay byte
    for byte; reading and appending continue meanwhile. The column of a field that the model no
    longer has becomes NULL.
    """
    from everstate.pipeline.archiving.reparse import reparse as reparse_one
    from everstate.pipeline.spark.session import own_spark

    entities = session.app(views=False).entities
    names, done = _entities(entity, session), []
    with working("starting Spark") as tell, own_spark(session.config) as spark:
        for name in names:
            tell(f"parsing the archive of {name}")
            done.append(reparse_one(spark, session.config, entities[name]))
    rows = ((one.entity, one.records, one.unreadable, round(one.seconds, 1)) for one in done)
    return Result(done, ResultTable(("entity", "records", "unreadable", "seconds"), rows))


@archive.command("files")
def files(session: Session, entity: Annotated[str, typer.Argument(help="Entity type.")]) -> Result:
    """List the path and the data files of an archive; needs no server and no Spark."""
    reader = ArchiveReader(session.config, entity)
    found = reader.files()
    rows = (
        (
            *(file.path, file.bytes / 2**20, file.rows, file.unreadable),
            _span(file.partition_min, file.partition_max),
            _span(file.offset_min, file.offset_max),
            _span(file.key_min, file.key_max),
        )
        for file in found
    )
    columns = ("file", "MiB", "records", "unreadable", "partitions", "offsets", "keys")
    value = {"path": reader.path, "position": reader.position(), "files": found}
    return Result(value, ResultTable(columns, rows, title=reader.path))


def _entities(entity: str | None, session: AppSession) -> Sequence[str]:
    """The requested entity type, or all of the app; an unknown name is refused."""
    if entity is None:
        return list(session.app().entities)
    if session.has_app:
        return [session.app().entity_type(entity).name]
    if "/" in entity or not entity:
        raise InvalidConfig("ENTITY", entity, "the name of an entity type")
    return [entity]


def _told(report: AuditReport) -> Iterator[Piece]:
    yield ResultTable(("", report.entity), report.lines())
    if report.problems:
        problems = ((problem.rule, problem.where, problem.message) for problem in report.problems)
        yield ResultTable(("rule", "where", "what"), problems)
    if report.conflict_rows:
        columns = list(report.conflict_rows[0])
        rows = ([row[name] for name in columns] for row in report.conflict_rows)
        yield ResultTable(columns, rows, title="conflicts")
    if report.runs:
        runs = (
            (f"g{run.generation}[{run.partition}]", run.start, run.end, run.kind)
            for run in report.runs
        )
        yield ResultTable(("not served", "from", "to", "kind"), runs)


def _span(low: object, high: object) -> str | None:
    if low is None:
        return None
    return str(low) if low == high else f"{low} – {high}"
