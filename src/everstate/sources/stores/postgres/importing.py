"""Imports files into a store: validated, in order, one transaction for each 5,000 rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from pydantic import BaseModel

from everstate.changes import EntityType, Provenance
from everstate.errors import ImportFailed, InvalidChange
from everstate.sources.stores.postgres.files import Chunk, UnreadableRow, read_file, read_rows
from everstate.sources.stores.postgres.progress import ImportProgress, import_id
from everstate.sources.stores.postgres.settling import Missing, Settling, repeated_keys
from everstate.sources.stores.postgres.store import EntityStore
from everstate.sources.stores.rows import ENVELOPE_BYTES, PreparedRow, prepare
from everstate.sources.stores.store import WrittenMany

CHUNK_ROWS: Final = 5_000
BAD_ROWS_MAX: Final = 1_000
"""Maximum number of bad rows that a check lists; all are counted."""
_NOBODY: Final = Provenance(api_version="v1", service_name="check", identifier="check")


@dataclass(frozen=True, slots=True)
class Imported:
    """Progress of an import; ``done`` is the share of the file that was read."""

    rows: int = 0
    changes: int = 0
    unchanged: int = 0
    done: float = 0.0


@dataclass(frozen=True, slots=True)
class Checked:
    """Result of a check; ``bad`` are the first rows that cannot be imported, with the reasons."""

    rows: int = 0
    bad_rows: int = 0
    bad: tuple[tuple[int, str], ...] = ()
    done: float = 0.0
    partial_rows: int = 0
    """Valid rows that do not have all fields of the model: without ``missing`` an import refuses
    those whose entity is stored with other values in them, which a check does not know."""
    absent: tuple[str, ...] = ()
    """Fields that such a row does not have."""


def check_file(
    entity_type: EntityType,
    path: Path | str,
    *,
    message_bytes_max: int,
    first_row: int = 1,
    ignored: Collection[str] = (),
    on_progress: Callable[[Checked], None] | None = None,
) -> Checked:
    """Read a file as :func:`import_file` does, and list the rows that it would refuse.

    Needs no server and writes nothing. A change is larger than its state: a state with a size near
    ``message_bytes_max`` may still be refused when it is written. Raises ImportFailed for a file
    that cannot be read at all.
    """
    rows, count, done, bad = 0, 0, 0.0, list[tuple[int, str]]()
    partial, absent, fields = 0, set[str](), entity_type.model.model_fields.keys()
    for row, entity, reason, done in read_rows(Path(path), entity_type, first_row, ignored):
        rows += 1
        if entity is not None:
            reason = _refused(entity_type, entity, message_bytes_max)
        if reason is not None:
            count += 1
            if len(bad) < BAD_ROWS_MAX:
                bad.append((row, reason))
        elif entity is not None and (lacks := fields - entity.model_fields_set):
            partial += 1
            absent |= lacks
        if on_progress is not None and rows % CHUNK_ROWS == 0:
            on_progress(Checked(rows, count, (), done))
    return Checked(rows, count, tuple(bad), 1.0, partial, tuple(sorted(absent)))


def _refused(entity_type: EntityType, entity: BaseModel, message_bytes_max: int) -> str | None:
    """Why the store would refuse an entity; ``None``: it would not."""
    try:
        prepared = prepare(entity_type, [entity], provenance=_NOBODY, occurred_at=datetime.now(UTC))
        size = len((next(iter(prepared)).state or "").encode()) + ENVELOPE_BYTES
    except InvalidChange as error:
        return f"{error.field}: {error.reason}"
    if size > message_bytes_max:
        return f"size: the change is over {size:,} bytes; the limit is {message_bytes_max:,}"
    return None


def import_file(
    store: EntityStore,
    path: Path | str,
    *,
    provenance: Provenance,
    first_row: int | None = None,
    ignored: Collection[str] = (),
    missing: Missing = "refuse",
    on_progress: Callable[[Imported], None] | None = None,
    on_resume: Callable[[int, int], None] | None = None,
) -> Imported:
    """Put every row of a file (jsonl, csv, parquet) into a store, in the file's order.

    Each transaction takes 5,000 rows. An invalid row, or one that the store refuses, ends the
    import: ImportFailed names it and the first row that was not committed, from which to resume
    with the corrected file. ``ignored`` are fields of the file that are not imported; any other
    field that the entity type does not have is an error. ``missing`` says what becomes of fields
    that a row does not have, where the stored entity has a value in them. Importing a file again
    from the first row writes nothing. A key may come several times in it: each state is a version,
    unless the last of them is stored already.

    An import that did not come to its end goes on when it is repeated with the same file and the
    same arguments: ``on_resume`` is called with its first row, and with the number of rows that are
    committed before it.
    """
    path, so_far = Path(path), Imported()
    same = import_id(store.entity_type.name, path, first_row, ignored, missing)
    progress = ImportProgress(store, path, same, first_row or 1)
    try:
        last: Mapping[str, bytes] = {}
        if not progress.is_resumed:
            last = repeated_keys(path, store.entity_type, progress.next_row, ignored, missing)
        elif on_resume is not None:
            on_resume(progress.next_row, progress.rows)
        # The rows after those that are committed are new, even if a state of one of them is stored.
        settling = Settling(store.entity_type, missing, last)
        for chunk in read_file(path, store.entity_type, CHUNK_ROWS, progress.next_row, ignored):
            written = _write(store, chunk, provenance, settling, progress)
            so_far = Imported(
                so_far.rows + len(chunk.rows),
                so_far.changes + written.changes,
                so_far.unchanged + written.unchanged,
                chunk.done,
            )
            if on_progress is not None:
                on_progress(so_far)
    except UnreadableRow as error:
        raise ImportFailed(
            str(path), error.row, error.reason, progress.rows, progress.next_row
        ) from error
    except ImportFailed as error:
        raise ImportFailed(
            error.path, error.row, error.reason, progress.rows, advice=error.advice
        ) from error
    progress.finish()
    return replace(so_far, done=1.0)


def _write(
    store: EntityStore,
    chunk: Chunk,
    provenance: Provenance,
    settling: Settling,
    progress: ImportProgress,
) -> WrittenMany:
    """Write a chunk and the import's progress, in one transaction; raises UnreadableRow."""
    recorded_at, count = datetime.now(UTC), len(chunk.rows)
    rows = _prepared(store, chunk, provenance, recorded_at)
    next_row = chunk.rows[-1] + 1 if chunk.rows else progress.next_row
    settle, advance = settling.of_chunk(chunk), progress.advance(next_row, count)
    try:
        written = store.write_rows(rows, recorded_at, settle=settle, also=advance)
    except InvalidChange as error:
        keys = [row.key for row in rows]
        at = keys.index(error.key) if error.key in keys else 0
        raise UnreadableRow(chunk.rows[at], f"{error.field}: {error.reason}") from error
    progress.advanced(next_row, count)
    return written


def _prepared(
    store: EntityStore, chunk: Chunk, provenance: Provenance, recorded_at: datetime
) -> list[PreparedRow]:
    rows: list[PreparedRow] = []
    try:
        for row in prepare(
            store.entity_type, chunk.entities, provenance=provenance, occurred_at=recorded_at
        ):
            rows.append(row)
    except InvalidChange as error:
        number = chunk.rows[len(rows)]
        raise UnreadableRow(number, f"{error.field}: {error.reason}") from error
    return rows
