"""Finds one key's changes in many files; file statistics exclude most of them.

A file that may hold the key is read in two steps: first its keys, then the other columns of the
row groups that contain the key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow.fs import FileSystem

from everstate.archive.files import ArchiveFile

_THREADS: Final = 8


@dataclass(frozen=True, slots=True)
class KeyRecords:
    """The readable records of one key in log order, and how many files were read for them."""

    records: pa.Table
    files_read: int
    """Files that were opened."""
    files: int
    """Files that the archive has."""
    seconds: float


def records_of_key(
    filesystem: FileSystem, files: Iterable[ArchiveFile], key: str, columns: Sequence[str]
) -> list[pa.Table]:
    """Readable records of a key from the given files, in no order."""

    def read(file: ArchiveFile) -> list[pa.Table]:
        with filesystem.open_input_file(file.path) as opened:
            parquet = pq.ParquetFile(opened, pre_buffer=False, page_checksum_verification=True)
            return _of_file(parquet, key, columns)

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="lookup") as threads:
        return [part for parts in threads.map(read, files) for part in parts]


def _of_file(file: pq.ParquetFile, key: str, columns: Sequence[str]) -> list[pa.Table]:
    found = []
    for group in range(file.num_row_groups):
        if not _may_hold(file.metadata.row_group(group), key):
            continue
        keys = file.read_row_group(group, columns=["key"], use_threads=False)["key"]
        rows = pc.indices_nonzero(pc.equal(keys, key))
        if len(rows):
            found.append(file.read_row_group(group, columns=list(columns)).take(rows))
    return found


def _may_hold(group: Any, key: str) -> bool:
    for place in range(group.num_columns):
        column = group.column(place)
        if column.path_in_schema == "key":
            known = column.statistics
            if known is None or not known.has_min_max:
                return True
            return bool(known.min <= key <= known.max)
    return True
