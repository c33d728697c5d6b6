"""`everstate views query`: any view at an earlier time."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from everstate.app import App
from everstate.cli.asking import ask_pipeline, control_of
from everstate.cli.console import READING, AppSession, Telling, working
from everstate.cli.get import AtOption, RecordedAtOption, moment_of
from everstate.cli.results import Aside, Result, records
from everstate.config import Config
from everstate.errors import UnknownView
from everstate.pipeline.requests.moment import Moment
from everstate.views.control import QUERY
from everstate.views.project import known_views

if TYPE_CHECKING:
    from everstate.pipeline.requests.query import QueryResult


def query(
    session: AppSession,
    name: Annotated[str, typer.Argument(help="Name of the view, or of an entity type.")],
    at: AtOption = None,
    recorded_at: RecordedAtOption = None,
    position: Annotated[
        str | None, typer.Option("--position", help="Show it as readers saw it at this token.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Largest number of rows.")] = 50,
) -> Result:
    """Show a view as it was at a time or a position, computed by its SQL over the archive.

    The rows are cached in a file, and computed again only if newer changes affect them.
    """
    config, project = session.connected(needs=READING)
    if name in project.refused_views:
        raise project.refused_views[name]
    if name not in (known := known_views(project)):
        raise UnknownView(name, known)
    moment = Moment(moment_of(at), moment_of(recorded_at), position)
    with working(f"asking for {name}") as tell:
        found = _ask(config, project, name, moment, tell)
    shown = found.head(limit)
    rows = [tuple(row.values()) for row in shown.to_pylist()]
    kept = "kept from before" if found.from_cache else f"computed in {found.seconds:.1f} s"
    more = f", of {found.rows:,}" if found.rows > len(rows) else ""
    said = f"{len(rows):,} rows{more}, {kept}; all are in {found.file}"
    return records(shown.column_names, rows, notes=[Aside(said)])


def _ask(config: Config, project: App, name: str, moment: Moment, tell: Telling) -> QueryResult:
    """A cached result if valid; else computed by the running pipeline, or in a new session."""
    # Imported here: Arrow and the lake take a second that other verbs should not pay.
    from everstate.pipeline.requests.query import Queries

    queries = Queries(config, project)
    if (found := queries.cached(name, moment)) is not None:
        return found
    with control_of(config) as control:
        if control.is_on_duty("answers"):
            asked = {"view": name, "moment": msgspec.to_builtins(moment)}
            began = time.monotonic()
            ask_pipeline(control, QUERY, asked, tell)
            # A pipeline on another machine caches in another folder.
            if (found := queries.cached(name, moment)) is not None:
                return replace(found, from_cache=False, seconds=time.monotonic() - began)
    from everstate.pipeline.spark.session import own_spark

    tell("starting Spark")
    with own_spark(config, app_name="everstate views query") as spark:
        return queries.compute(spark, name, moment, lambda seen: tell.now(seen.text))
