"""Entities from files: JSON lines, CSV and Parquet, read in chunks with their row numbers.

A row is a line of JSON, a record of CSV after its header, a row of Parquet; the first is 1. NaN
becomes null, which is what a table means by it; an empty cell of CSV is null but in text columns.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from pydantic import BaseModel

from everstate.changes import EntityType
from everstate.errors import ImportFailed, InvalidChange

_Raw: TypeAlias = tuple[int, bytes | Mapping[str, Any], float]
"""Row number, state, share of the file that was read."""
_NOT_A_NUMBER: Final = frozenset({"", "nan", "NaN", "NAN"})
_PARQUET_ROWS: Final = 4096


class Chunk(NamedTuple):
    """Entities with the numbers of their rows; ``done`` is the share of the file read so far."""

    rows: list[int]
    entities: list[BaseModel]
    done: float


class UnreadableRow(Exception):
    """A row that is no entity of the type."""

    def __init__(self, row: int, reason: str) -> None:
        self.row, self.reason = row, reason
        super().__init__(f"row {row}: {reason}")


def read_file(
    path: Path, entity_type: EntityType, rows_max: int, first_row: int = 1
) -> Iterator[Chunk]:
    """Chunks of at most ``rows_max`` entities from ``first_row`` on; the ending tells the form.

    Raises ImportFailed for a file that cannot be read at all, UnreadableRow for a row that is no
    entity of the type. Memory: one chunk.
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ImportFailed(str(path), None, f"its ending is none of {', '.join(_READERS)}")
    chunk = Chunk([], [], 0.0)
    try:
        for row, state, done in reader(path, entity_type):
            if row < first_row:
                continue
            chunk.rows.append(row)
            chunk.entities.append(_entity(entity_type, row, state))
            if len(chunk.rows) >= rows_max:
                yield chunk._replace(done=done)
                chunk = Chunk([], [], done)
    except OSError as cause:
        raise ImportFailed(str(path), None, cause.strerror or str(cause)) from cause
    yield chunk._replace(done=1.0)


def _entity(entity_type: EntityType, row: int, state: bytes | Mapping[str, Any]) -> BaseModel:
    try:
        if isinstance(state, bytes):
            if b"NaN" not in state:
                return entity_type.validate_json(state)
            return entity_type.validate(_without_nan(json.loads(state)))
        return entity_type.validate(state)
    except InvalidChange as error:
        raise UnreadableRow(row, f"{error.field}: {error.reason}") from error
    except ValueError as error:
        raise UnreadableRow(row, str(error)) from error


def _read_jsonl(path: Path, _: EntityType) -> Iterator[_Raw]:
    size, read = max(1, path.stat().st_size), 0
    with path.open("rb") as lines:
        for row, line in enumerate(lines, 1):
            read += len(line)
            if line.strip():
                yield row, line, read / size


def _read_csv(path: Path, entity_type: EntityType) -> Iterator[_Raw]:
    size, read = max(1, path.stat().st_size), 0
    convert = _csv_columns(entity_type)
    # A byte that is no UTF-8 is carried as it is: the model refuses it, in the row where it is.
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
        records = csv.reader(text)
        header = next(records, None)
        row = 0
        try:
            for row, cells in enumerate(records, 1):
                assert header is not None
                if not cells:
                    continue
                if len(cells) != len(header):
                    raise UnreadableRow(row, f"{len(cells)} cells, but {len(header)} columns")
                state = {
                    name: convert[name](cell) if name in convert else cell
                    for name, cell in zip(header, cells, strict=True)
                }
                read += sum(map(len, cells)) + len(cells)
                yield row, state, min(1.0, read / size)
        except csv.Error as cause:
            raise UnreadableRow(row + 1, str(cause)) from cause
        except json.JSONDecodeError as cause:
            raise UnreadableRow(row, f"a nested column holds no JSON: {cause}") from cause


def _csv_columns(entity_type: EntityType) -> dict[str, Callable[[str], Any]]:
    """How cells become values; pydantic makes numbers and times of what is left as text."""
    import pyarrow as pa

    convert: dict[str, Callable[[str], Any]] = {}
    for column in entity_type.arrow_schema:
        if pa.types.is_nested(column.type):
            convert[column.name] = _nested
        elif not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
            convert[column.name] = _scalar
    return convert


def _nested(cell: str) -> Any:
    return None if cell == "" else _without_nan(json.loads(cell))


def _scalar(cell: str) -> str | None:
    return None if cell in _NOT_A_NUMBER else cell


def _read_parquet(path: Path, _: EntityType) -> Iterator[_Raw]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = 0
    try:
        with pq.ParquetFile(path) as file:
            total = max(1, file.metadata.num_rows)
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
                for state in batch.to_pylist():
                    row += 1
                    yield row, _without_nan(state), row / total
    except pa.ArrowException as cause:
        raise ImportFailed(str(path), row + 1, str(cause)) from cause


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, dict):
        return {name: _without_nan(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_without_nan(part) for part in value]
    return value


_READERS: Final[dict[str, Callable[[Path, EntityType], Iterator[_Raw]]]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
