"""Files into a store: validated, in order, a transaction for every few thousand rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from everstate.changes import Provenance
from everstate.errors import ImportFailed, InvalidChange
from everstate.sources.outbox.files import Chunk, UnreadableRow, read_file
from everstate.sources.outbox.rows import Row, prepare
from everstate.sources.outbox.store import EntityStore

CHUNK_ROWS: Final = 5_000


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import did so far; ``done`` is the share of the file that was read."""

    rows: int = 0
    changes: int = 0
    unchanged: int = 0
    done: float = 0.0


def import_file(
    store: EntityStore,
    path: Path | str,
    *,
    provenance: Provenance,
    first_row: int = 1,
    on_progress: Callable[[Imported], None] | None = None,
) -> Imported:
    """Put every row of a file (jsonl, csv, parquet) into a store, in the file's order.

    Each transaction takes 5,000 rows. A row that is no entity, or that the store refuses, ends
    the import: ImportFailed names it and the first row that was not committed, with which a
    mended file goes on. Importing it from the first row again writes nothing for a key that the
    file has once, and once more each state of a key that it has several times.
    """
    path, so_far, next_row = Path(path), Imported(), first_row
    try:
        for chunk in read_file(path, store.entity_type, CHUNK_ROWS, first_row):
            recorded_at = datetime.now(UTC)
            rows = _prepared(store, chunk, provenance, recorded_at)
            try:
                written = store.write_rows(rows, recorded_at)
            except InvalidChange as error:
                keys = [row.key for row in rows]
                at = keys.index(error.key) if error.key in keys else 0
                raise UnreadableRow(chunk.rows[at], f"{error.field}: {error.reason}") from error
            so_far = Imported(
                so_far.rows + len(rows),
                so_far.changes + written.changes,
                so_far.unchanged + written.unchanged,
                chunk.done,
            )
            if chunk.rows:
                next_row = chunk.rows[-1] + 1
            if on_progress is not None:
                on_progress(so_far)
    except UnreadableRow as error:
        raise ImportFailed(str(path), error.row, error.reason, so_far.rows, next_row) from error
    except ImportFailed as error:
        raise ImportFailed(error.path, error.row, error.reason, so_far.rows) from error
    return replace(so_far, done=1.0)


def _prepared(
    store: EntityStore, chunk: Chunk, provenance: Provenance, recorded_at: datetime
) -> list[Row]:
    rows: list[Row] = []
    try:
        for row in prepare(
            store.entity_type, chunk.entities, provenance=provenance, occurred_at=recorded_at
        ):
            rows.append(row)
    except InvalidChange as error:
        number = chunk.rows[len(rows)]
        raise UnreadableRow(number, f"{error.field}: {error.reason}") from error
    return rows
