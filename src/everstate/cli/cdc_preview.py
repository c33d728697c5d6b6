"""`everstate cdc preview` and `held`: results of cleaning raw rows, and rows that are held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

import typer

from everstate.cli.cdc_captures import capturing_of, connected
from everstate.cli.console import AppSession, err
from everstate.cli.results import Aside, Result, ResultTable
from everstate.serving.words import value_text
from everstate.sources.cdc.holding import HeldEntity, read_held
from everstate.sources.cdc.preview import preview as preview_rows

_RAW_SHOWN = 160


def preview(
    session: AppSession,
    name: Annotated[str, typer.Argument(help="Name of a capture that the app declares.")],
    rows: Annotated[int, typer.Option("--rows", min=1, help="Number of rows of each table.")] = 3,
) -> Result:
    """Show the newest raw rows of a capture and their cleaned form; writes nothing."""
    config, project = session.connected()
    found = preview_rows(config, project.capture_of(name), project.entities, rows)
    shown = (
        (
            *(one.table, f"{one.partition}@{one.offset}"),
            one.raw if len(one.raw) <= _RAW_SHOWN else one.raw[: _RAW_SHOWN - 1] + "…",
            *(one.outcome, one.key),
            ", ".join(f"{field}={value_text(value)}" for field, value in one.clean.items()),
        )
        for one in found
    )
    columns = ("table", "at", "raw", "outcome", "key", "clean")
    return Result(list(map(asdict, found)), ResultTable(columns, shown))


def held(
    session: AppSession,
    name: Annotated[str, typer.Argument(help="Name of a capture that the app declares.")],
    snapshot: Annotated[
        bool, typer.Option("--snapshot", help="Take a snapshot of each key that needs one.")
    ] = False,
) -> Result:
    """List entities whose rows are held or were refused, and what releases them."""
    from everstate.sources.cdc.asking import can_ask

    config, project = session.connected()
    capture = project.capture_of(name)
    found = read_held(config, capture.name)
    asks = can_ask(capture)
    if snapshot:
        _take_snapshots(session, name, found)
    value = [
        {
            "table": one.table,
            "entity": one.entity,
            "key": one.key,
            "columns": one.columns,
            "reason": one.reason,
            "since": datetime.fromtimestamp(one.since_s, UTC),
            "rows": len(one.rows),
            "waitsFor": one.waits_for,
            "needsSnapshot": one.needs_snapshot,
            "asksForSnapshot": asks and one.waits_for_state,
        }
        for one in found
    ]
    rows = (
        (
            *(one.table, one.key, len(one.rows), one.reason),
            "" if one.waits_for is None else " ".join(one.waits_for),
            _snapshot_of(one, asks=asks),
            datetime.fromtimestamp(one.since_s, UTC).isoformat(timespec="seconds"),
        )
        for one in found
    )
    told = ResultTable(("table", "key", "rows", "reason", "waits for", "snapshot", "since"), rows)
    if not any(one.needs_snapshot and not (asks and one.waits_for_state) for one in found):
        return Result(value, told)
    by_hand = f"run `everstate cdc held {name} --snapshot`"
    theirs = "have the capture's own connector read these rows again"
    how = by_hand if asks else theirs
    return Result(value, told, Aside(f"some rows need a snapshot that must be requested: {how}"))


def _snapshot_of(one: HeldEntity, *, asks: bool) -> str:
    """Whether a snapshot of its key is needed, and whether the clean role requests it."""
    if not one.needs_snapshot:
        return ""
    return "requested by clean" if asks and one.waits_for_state else "needed"


def _take_snapshots(session: AppSession, name: str, found: Sequence[HeldEntity]) -> None:
    """Request a snapshot of each key that needs one, one after the other."""
    from everstate.sources.cdc.snapshots import snapshot

    config, capturing = connected(session), capturing_of(session, name)
    for one in found:
        if one.needs_snapshot:
            key = {column: str(value) for column, value in one.columns.items()}
            done = snapshot(config, capturing, table=one.table, key=key)
            err.print(f"{one.table} {one.key}: {done.rows} rows were read", highlight=False)
