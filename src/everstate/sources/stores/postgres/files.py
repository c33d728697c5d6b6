"""Entities from files: JSON lines, CSV and Parquet, read row by row with their row numbers.

A row is a line of JSON, a record of CSV after its header, or a row of Parquet; the first is 1. NaN
becomes null, because tables use it for missing values; infinity is refused. An empty cell of CSV is
null; in a text column that may not be null it is an empty text. What separates the cells of CSV,
and the case of its column names, are guessed by the fields of the entity type; :func:`guesses` says
so.
"""

from __future__ import annotations

import codecs
import csv
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from everstate.changes import EntityType
from everstate.changes.accepting import NotAccepted, accept
from everstate.changes.depth import TOO_DEEP
from everstate.changes.fields import tree_of
from everstate.changes.json_numbers import WrittenNumber, encode, number_of
from everstate.changes.unknown import EXTRA
from everstate.errors import ImportFailed

_NOT_A_NUMBER: Final = frozenset({"", "nan", "NaN", "NAN"})
_PARQUET_ROWS: Final = 4096
_CELL_MAX: Final = 64 * 1024 * 1024
_SEPARATORS: Final = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
_NOT_UTF_8: Final = "it is not UTF-8"


class UnreadableRow(Exception):
    """A row that is no entity of the type."""

    def __init__(self, row: int, reason: str) -> None:
        self.row, self.reason = row, reason
        super().__init__(f"row {row}: {reason}")


class Read(NamedTuple):
    """One row: its entity, or the reason why it is not a valid one."""

    row: int
    entity: BaseModel | None
    reason: str | None
    done: float
    """Share of the file that was read."""


class Chunk(NamedTuple):
    """Entities with the numbers of their rows; ``done`` is the share of the file read so far."""

    rows: list[int]
    entities: list[BaseModel]
    done: float


_Raw: TypeAlias = tuple[int, bytes | Mapping[str, Any] | UnreadableRow, float]
"""Row number, state, share of the file that was read."""


class _Form(NamedTuple):
    """How a file is read: its rows, and its columns where every row has the same."""

    read: Callable[[Path, EntityType], Iterator[_Raw]]
    columns: Callable[[Path, EntityType], Sequence[str]] | None


def read_file(
    path: Path,
    entity_type: EntityType,
    rows_max: int,
    first_row: int = 1,
    ignored: Collection[str] = (),
) -> Iterator[Chunk]:
    """Chunks of at most ``rows_max`` entities from ``first_row`` on; format by the file's suffix.

    Raises ImportFailed for a file that cannot be read at all, UnreadableRow for a row that is no
    entity of the type. Memory: one chunk.
    """
    chunk = Chunk([], [], 0.0)
    for row, entity, reason, done in read_rows(path, entity_type, first_row, ignored):
        if entity is None:
            raise UnreadableRow(row, reason or "")
        chunk.rows.append(row)
        chunk.entities.append(entity)
        if len(chunk.rows) >= rows_max:
            yield chunk._replace(done=done)
            chunk = Chunk([], [], done)
    yield chunk._replace(done=1.0)


def read_rows(
    path: Path, entity_type: EntityType, first_row: int = 1, ignored: Collection[str] = ()
) -> Iterator[Read]:
    """Each row from ``first_row`` on, including invalid ones; columns in ``ignored`` are dropped.

    Raises ImportFailed for a file that cannot be read at all, or whose columns do not match.
    """
    form = _form_of(path)
    try:
        if path.stat().st_size == 0:
            raise ImportFailed(str(path), None, "it is empty, without even a header or a line")
        columns = None if form.columns is None else form.columns(path, entity_type)
        _check_columns(path, columns, ignored)
        for row, state, done in form.read(path, entity_type):
            if row < first_row:
                continue
            if isinstance(state, UnreadableRow):
                yield Read(row, None, state.reason, done)
                continue
            try:
                yield Read(row, _entity(entity_type, state, ignored), None, done)
            except NotAccepted as cause:
                errors = cause.errors
                if columns is not None and any(map(_is_of_header, errors)):
                    raise _misfit(path, entity_type, columns, errors) from cause
                yield Read(row, None, _invalid_reason(cause, state), done)
            except ValueError as cause:
                yield Read(row, None, str(cause), done)
    except OSError as cause:
        raise ImportFailed(str(path), None, cause.strerror or str(cause)) from cause


def read_raw(path: Path, entity_type: EntityType) -> Iterator[_Raw]:
    """Each row as it is in the file; for one from which :func:`read_rows` has read a row."""
    return _form_of(path).read(path, entity_type)


def _form_of(path: Path) -> _Form:
    form = _FORMS.get(path.suffix.lower())
    if form is None:
        raise ImportFailed(str(path), None, f"its ending is none of {', '.join(_FORMS)}")
    return form


def _entity(
    entity_type: EntityType, state: bytes | Mapping[str, Any], ignored: Collection[str]
) -> BaseModel:
    """The entity of a row; raises NotAccepted, or ValueError for invalid JSON."""
    if isinstance(state, bytes) and (ignored or b"NaN" in state):
        try:
            given = json.loads(state, parse_float=WrittenNumber)
            if isinstance(given, dict):
                kept = {name: part for name, part in given.items() if name not in ignored}
                state = encode(_row_without_nan(kept))
        except RecursionError as cause:
            raise ValueError(TOO_DEEP) from cause
    if isinstance(state, Mapping):
        kept = {name: value for name, value in state.items() if name not in ignored}
        state = _row_without_nan(kept)
    return accept(entity_type.model, state)


def _invalid_reason(refused: NotAccepted, state: bytes | Mapping[str, Any]) -> str:
    """Why a row is no valid entity: the field and the reason."""
    if refused.errors[0]["type"] == "json_invalid" and isinstance(state, bytes):
        try:
            state.decode()
        except UnicodeDecodeError:
            return _NOT_UTF_8
    return ": ".join(refused.problems("state")[0])


def _check_columns(path: Path, columns: Sequence[str] | None, ignored: Collection[str]) -> None:
    """Raise ImportFailed for duplicate column names, or ignored columns that do not exist."""
    if columns is None:
        return
    twice = sorted({name for name in columns if list(columns).count(name) > 1})
    if twice:
        raise ImportFailed(str(path), None, f"two of its columns are called {', '.join(twice)}")
    if missing := sorted(set(ignored) - set(columns)):
        raise ImportFailed(
            str(path), None, f"it has no column {', '.join(missing)} to ignore{_listed(columns)}"
        )


def _is_of_header(error: ErrorDetails) -> bool:
    """Whether an error is caused by the columns, and therefore occurs in every row."""
    return len(error["loc"]) == 1 and error["type"] in (EXTRA, "missing")


def _misfit(
    path: Path, entity_type: EntityType, columns: Sequence[str], errors: Sequence[ErrorDetails]
) -> ImportFailed:
    """The error for columns that are not the fields of the entity type."""
    unknown = [str(error["loc"][0]) for error in errors if error["type"] == EXTRA]
    missing = [str(error["loc"][0]) for error in errors if error["type"] == "missing"]
    problems = []
    if unknown:
        problems.append(f"{entity_type.name} has no field {', '.join(unknown)}")
    if missing:
        problems.append(f"{entity_type.name} needs {', '.join(missing)}")
    advice = f"Its fields are {', '.join(entity_type.field_names)}."
    if unknown:
        advice += f" Columns that are not wanted: --ignore {' --ignore '.join(unknown)}"
    return ImportFailed(str(path), None, f"{'; '.join(problems)}{_listed(columns)}", advice=advice)


def _listed(columns: Sequence[str]) -> str:
    return f" (its columns are {', '.join(columns)})"


def _read_jsonl(path: Path, _: EntityType) -> Iterator[_Raw]:
    size, read = max(1, path.stat().st_size), 0
    with path.open("rb") as lines:
        for row, line in enumerate(lines, 1):
            read += len(line)
            if row == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield row, line, read / size


class _Header(NamedTuple):
    """The names of a CSV file's columns as fields, and what they and the separator are by guess."""

    separator: str
    columns: Sequence[str]
    guesses: tuple[str, ...]


def guesses(path: Path, entity_type: EntityType) -> tuple[str, ...]:
    """What is guessed of a file, each as a sentence; only CSV needs guesses."""
    return _csv_header(path, entity_type).guesses if path.suffix.lower() == ".csv" else ()


def _csv_header(path: Path, entity_type: EntityType) -> _Header:
    fields = _input_names(entity_type)
    by_case = {name.lower(): name for name in fields}

    def known(separator: str) -> int:
        cells = _header_cells(path, separator, strict=False)
        return sum(_plain_name(cell) in by_case for cell in cells)

    separator = max(_SEPARATORS, key=known)  # of equal ones the first
    header, said = _header_cells(path, separator, strict=True), []
    if separator != ",":
        said.append(f"The cells of {path.name} are separated by {_SEPARATORS[separator]}.")
    columns = []
    for cell in header:
        meant = by_case.get(_plain_name(cell), cell)
        if cell in fields or meant in header:
            meant = cell
        if meant != cell:
            said.append(f"The column {cell!r} of {path.name} is the field {meant}.")
        columns.append(meant)
    return _Header(separator, columns, tuple(said))


def _plain_name(cell: str) -> str:
    return cell.strip().lower()


def _input_names(entity_type: EntityType) -> set[str]:
    """The names under which a file may have the fields of a model."""
    return {name for each in entity_type.columns for name in (each.name, each.written, *each.read)}


def _header_cells(path: Path, separator: str, *, strict: bool) -> list[str]:
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
        try:
            header = next(_csv_records(text, separator, strict=strict), [])
        except csv.Error as cause:
            raise ImportFailed(str(path), None, f"its header: {_csv_reason(cause)}") from cause
    if not _is_utf_8("".join(header)):
        raise ImportFailed(str(path), None, f"its header: {_NOT_UTF_8}")
    return header


def _csv_records(
    text: Iterable[str], separator: str, *, strict: bool = True
) -> Iterator[list[str]]:
    """Records of CSV; raises csv.Error for a quote that is never closed, or is inside a cell."""
    csv.field_size_limit(_CELL_MAX)
    return csv.reader(text, delimiter=separator, strict=strict)


def _csv_reason(cause: csv.Error) -> str:
    """Why a record cannot be read, in words for people."""
    if "unexpected end of data" in str(cause):
        return "a quote is never closed"
    if "expected after" in str(cause):
        return "a quoted cell has text after its closing quote"
    if "field limit" in str(cause):
        return f"a cell is longer than {_CELL_MAX:,} characters, or a quote is never closed"
    return str(cause)


def _read_csv(path: Path, entity_type: EntityType) -> Iterator[_Raw]:
    size, read = max(1, path.stat().st_size), 0
    convert = _csv_columns(entity_type)
    # An invalid UTF-8 byte is kept as a surrogate, so that the error can name its row.
    separator, header, _ = _csv_header(path, entity_type)
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
        records = _csv_records(text, separator)
        next(records, None)
        row = 0
        try:
            for row, cells in enumerate(records, 1):
                if not cells:
                    continue
                read += sum(map(len, cells)) + len(cells)
                yield row, _csv_state(row, header, cells, convert), min(1.0, read / size)
        except csv.Error as cause:
            yield (
                row + 1,
                UnreadableRow(row + 1, f"{_csv_reason(cause)}; what follows was not read"),
                1.0,
            )


def _csv_state(
    row: int,
    header: Sequence[str],
    cells: Sequence[str],
    convert: Mapping[str, Callable[[str], Any]],
) -> Mapping[str, Any] | UnreadableRow:
    if not _is_utf_8("".join(cells)):
        return UnreadableRow(row, _NOT_UTF_8)
    if len(cells) != len(header):
        return UnreadableRow(row, f"{len(cells)} cells, but {len(header)} columns")
    try:
        return {
            name: convert[name](cell) if name in convert else cell
            for name, cell in zip(header, cells, strict=True)
        }
    except RecursionError:
        return UnreadableRow(row, f"a nested column: {TOO_DEEP}")
    except ValueError as cause:
        return UnreadableRow(row, f"a nested column holds no JSON: {cause}")


def _is_utf_8(text: str) -> bool:
    """Whether text that was read with `surrogateescape` was UTF-8."""
    return text.isascii() or not any("\udc80" <= sign <= "\udcff" for sign in text)


def _csv_columns(entity_type: EntityType) -> dict[str, Callable[[str], Any]]:
    """Converters of CSV cells by column; pydantic parses numbers and times from text itself."""
    convert: dict[str, Callable[[str], Any]] = {}
    for each in tree_of(entity_type.model).fields:
        if each.tree.type in ("struct", "list", "map"):
            converter: Callable[[str], Any] = _nested
        elif each.tree.type != "text":
            converter = _scalar
        elif each.takes_null:
            converter = _optional_text
        else:
            continue
        convert.update(dict.fromkeys((each.name, each.written, *each.read), converter))
    return convert


def columns_of(entity_type: EntityType) -> dict[str, str]:
    """Field of the model → its name in a state."""
    return {each.name: each.written for each in tree_of(entity_type.model).fields}


def _nested(cell: str) -> Any:
    return None if cell == "" else _without_nan(json.loads(cell, parse_float=number_of))


def _scalar(cell: str) -> str | None:
    return None if cell in _NOT_A_NUMBER else cell


def _optional_text(cell: str) -> str | None:
    return cell or None


def _parquet_columns(path: Path, _: EntityType) -> Sequence[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return tuple(pq.read_schema(path).names)
    except pa.ArrowException as cause:
        raise ImportFailed(str(path), None, str(cause)) from cause


def _read_parquet(path: Path, _: EntityType) -> Iterator[_Raw]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = 0
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            total = max(1, file.metadata.num_rows)
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
                for state in batch.to_pylist():
                    row += 1
                    yield row, state, row / total
    except (pa.ArrowException, OSError) as cause:  # OSError: a page differs from its sum
        raise ImportFailed(str(path), row + 1, str(cause)) from cause
    except ValueError as cause:
        # Without pandas, Arrow refuses parts of a microsecond, and does not say in which row.
        raise ImportFailed(str(path), None, str(cause)) from cause


def _row_without_nan(state: Mapping[str, Any]) -> dict[str, Any]:
    """The row with null for NaN; raises ValueError for a value that cannot be kept as it is."""
    kept = {}
    for name, value in state.items():
        try:
            kept[name] = _without_nan(value)
        except ValueError as cause:
            raise ValueError(f"{name}: {cause}") from cause
    return kept


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        if math.isinf(value):
            raise ValueError("infinity is no number in JSON")
        return None if math.isnan(value) else value
    # The times of pandas, which Arrow makes, hold what a microsecond does not.
    if isinstance(value, datetime) and getattr(value, "nanosecond", None):
        raise ValueError(f"{value} has parts of a microsecond, which no time here can hold")
    if isinstance(value, dict):
        return {name: _without_nan(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_without_nan(part) for part in value]
    return value


_FORMS: Final[dict[str, _Form]] = {
    ".jsonl": _Form(_read_jsonl, None),
    ".ndjson": _Form(_read_jsonl, None),
    ".csv": _Form(_read_csv, lambda path, entity: _csv_header(path, entity).columns),
    ".parquet": _Form(_read_parquet, _parquet_columns),
}
