"""`everstate import`: entities from a file into the store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from everstate.changes import EntityType, Provenance
from everstate.cli.console import READING, AppSession, err
from everstate.cli.results import Aside, Piece, Result, ResultTable, fails
from everstate.config import Config
from everstate.local import resolve
from everstate.sources.stores.postgres import (
    Checked,
    EntityStore,
    Imported,
    Missing,
    check_file,
    guesses,
    import_file,
)

_REFUSED = 2
MissingOption = Annotated[
    Missing,
    typer.Option(
        "--missing",
        help="What becomes of fields that a row does not have, where the stored entity has values "
        "in them: refuse the row, keep them, or reset them to the model's defaults.",
    ),
]


def import_(
    session: AppSession,
    entity: Annotated[str, typer.Argument(help="Name of the entity type.")],
    file: Annotated[Path, typer.Argument(help="A .jsonl, .csv or .parquet file.")],
    service: Annotated[
        str, typer.Option("--provenance-service", help="Service name of the writer.")
    ] = "everstate-import",
    identifier: Annotated[
        str | None, typer.Option("--provenance-identifier", help="Default: the file's name.")
    ] = None,
    api_version: Annotated[str, typer.Option("--api-version", help="API version.")] = "v1",
    first_row: Annotated[
        int | None,
        typer.Option(
            "--from-row",
            min=1,
            help="First row to import. Default: 1, or where an import of the same file ended that "
            "did not come to its end.",
        ),
    ] = None,
    ignored: Annotated[
        list[str] | None,
        typer.Option("--ignore", help="Column to leave out; repeatable."),
    ] = None,
    missing: MissingOption = "refuse",
    check: Annotated[
        bool,
        typer.Option("--check", help="List all invalid rows; write nothing, and use no server."),
    ] = False,
) -> Result:
    """Put every row of FILE into the store; a row that changes nothing is not written.

    An invalid row stops the import and is reported; a transaction has up to 5,000 rows. A column
    that the entity type does not have is refused, unless it is ignored.
    """
    config = session.config
    entity_type = session.app().check_source(entity, "store")
    for guess in guesses(file, entity_type) if file.is_file() else ():
        err.print(guess, highlight=False)
    if check:
        return _check(config, entity_type, file, first_row or 1, ignored or (), missing)
    provenance = Provenance(
        api_version=api_version, service_name=service, identifier=identifier or file.name
    )
    config = resolve(config, needs=READING)
    with (
        EntityStore(config, entity_type, connections_max=1) as store,
        _bar(f"import {entity}") as show,
    ):
        store.install()
        imported = import_file(
            store,
            file,
            provenance=provenance,
            first_row=first_row,
            ignored=ignored or (),
            missing=missing,
            on_progress=show,
            on_resume=partial(_say_resumed, file),
        )
    rows, changes, unchanged = imported.rows, imported.changes, imported.unchanged
    return Result(
        {"rows": rows, "changes": changes, "unchanged": unchanged},
        f"{rows:,} rows of {file.name}: {changes:,} changes, {unchanged:,} unchanged",
    )


def _say_resumed(file: Path, row: int, committed: int) -> None:
    err.print(
        f"An import of {file.name} did not come to its end: {committed:,} rows were committed, and "
        f"this one goes on with row {row:,}. --from-row 1 imports all rows.",
        highlight=False,
    )


def _check(
    config: Config,
    entity_type: EntityType,
    file: Path,
    first_row: int,
    ignored: list[str] | tuple[str, ...],
    missing: Missing,
) -> Result:
    with _bar(f"check {entity_type.name}") as show:
        found = check_file(
            entity_type,
            file,
            message_bytes_max=config.log.message_bytes_max,
            first_row=first_row,
            ignored=ignored,
            on_progress=show,
        )
    bad = [{"row": row, "reason": reason} for row, reason in found.bad]
    part = {"partial_rows": found.partial_rows, "absent": found.absent}
    return Result(
        {"rows": found.rows, "bad_rows": found.bad_rows, "bad": bad, **part},
        *_pieces(file, found, missing),
        then=fails(_REFUSED if found.bad_rows else 0),
    )


def _pieces(file: Path, found: Checked, missing: Missing) -> Iterator[Piece]:
    if found.bad:
        yield ResultTable(("row", "reason"), found.bad)
    if found.bad_rows > len(found.bad):
        yield Aside(f"… and {found.bad_rows - len(found.bad):,} more")
    refused = f"{found.bad_rows:,} cannot be imported; nothing was written"
    yield f"{found.rows:,} rows of {file.name}: {refused}"
    if found.partial_rows and missing == "refuse":
        yield Aside(
            f"{found.partial_rows:,} rows do not have {', '.join(found.absent)}: the import "
            "refuses those whose entity is stored with another value there than the model's "
            "default; --missing keep or --missing reset takes them"
        )


@contextmanager
def _bar(what: str) -> Iterator[Callable[[Imported | Checked], None]]:
    """A bar while the block runs; it is moved by the function that the block gets."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rows]:,} rows, {task.fields[rate]:,.0f}/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    ) as bar:
        task = bar.add_task(what, total=1.0, rows=0, rate=0.0)

        def show(seen: Imported | Checked) -> None:
            elapsed_s = bar.tasks[0].elapsed or 0.0
            rate = seen.rows / elapsed_s if elapsed_s else 0.0
            bar.update(task, completed=seen.done, rows=seen.rows, rate=rate)

        yield show
