"""`everstate import`: entities from a file into the store."""

from __future__ import annotations

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

from everstate.changes import Provenance
from everstate.cli.console import AppOption, JsonOption, config_of, err, load_app, out, print_json
from everstate.local import connect
from everstate.sources.outbox import EntityStore, Imported, import_file


def register(cli: typer.Typer) -> None:
    """Add the verb."""
    cli.command("import")(import_entities)


def import_entities(
    context: typer.Context,
    entity: Annotated[str, typer.Argument(help="Name of the entity type.")],
    file: Annotated[Path, typer.Argument(help="A .jsonl, .csv or .parquet file.")],
    service: Annotated[
        str, typer.Option("--provenance-service", help="Who writes: serviceName.")
    ] = "everstate-import",
    identifier: Annotated[
        str | None, typer.Option("--provenance-identifier", help="Default: the file's name.")
    ] = None,
    api_version: Annotated[str, typer.Option("--api-version", help="apiVersion.")] = "v1",
    first_row: Annotated[
        int, typer.Option("--from-row", min=1, help="Go on where an import ended; the first is 1.")
    ] = 1,
    app: AppOption = None,
    as_json: JsonOption = False,
) -> None:
    """Put every row of FILE into the store; equal states are no changes.

    A row that is no entity ends the import and is told; up to 5,000 rows are one transaction.
    """
    project = config_of(context)
    entity_type = load_app(app, project).check_source(entity, "store")
    provenance = Provenance(
        api_version=api_version, service_name=service, identifier=identifier or file.name
    )
    config = connect(project)
    with EntityStore(config, entity_type, connections_max=1) as store, _bar() as bar:
        store.install()
        task = bar.add_task(f"import {entity}", total=1.0, rows=0, rate=0.0)

        def show(imported: Imported) -> None:
            elapsed_s = bar.tasks[0].elapsed or 0.0
            rate = imported.rows / elapsed_s if elapsed_s else 0.0
            bar.update(task, completed=imported.done, rows=imported.rows, rate=rate)

        imported = import_file(
            store, file, provenance=provenance, first_row=first_row, on_progress=show
        )
    if as_json:
        print_json(
            {
                "rows": imported.rows,
                "changes": imported.changes,
                "unchanged": imported.unchanged,
            }
        )
        return
    out.print(
        f"{imported.rows:,} rows of {file.name}: {imported.changes:,} changes, "
        f"{imported.unchanged:,} unchanged",
        highlight=False,
    )


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rows]:,} rows, {task.fields[rate]:,.0f}/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )
