"""Archived records in the order of their offsets, with bounded memory.

Statistics show which files hold which offsets. Files of an append are in order already and are
read directly. Where compaction has mixed offsets, overlapping files are sorted together: in memory
when they are small, else on local disk, in one pass for all partitions.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import or_
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow.fs import FileSystem

from everstate.archive.files import ArchiveFile

RECORD_COLUMNS: Final = (
    *("partition", "offset", "timestamp", "timestamp_type"),
    *("raw_key", "raw_value", "raw_headers"),
)
"""Columns that make up a record of the log."""
_PLACE: Final = ("generation", "partition", "offset")
_SLICE_ROWS: Final = 10_000
_DIRECT_ROWS: Final = 50_000
_DIRECT_BYTES: Final = 16 << 20
"""Compressed bytes of files that are read into memory at once."""
_BUCKET_OFFSETS: Final = 100_000
_SPILL_ROWS: Final = 200_000
_IPC: Final = pa.ipc.IpcWriteOptions(compression="lz4")


@dataclass(frozen=True, slots=True)
class Where:
    """A condition on archived records, and the columns that it names."""

    condition: ds.Expression
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Offsets ``[start, end)`` of a partition, and all files that may hold some of them."""

    partition: int
    start: int
    end: int
    files: tuple[ArchiveFile, ...]

    @property
    def is_small(self) -> bool:
        """Whether its files fit into memory."""
        rows, size = sum(f.rows for f in self.files), sum(f.bytes for f in self.files)
        return rows <= _DIRECT_ROWS and size <= _DIRECT_BYTES


class OrderedRecords:
    """The records of some ranges of one generation; call :meth:`read`, then :meth:`close`."""

    def __init__(
        self,
        filesystem: FileSystem,
        files: Iterable[ArchiveFile],
        generation: int,
        spans: Mapping[int, tuple[int, int]],
        columns: Sequence[str] = RECORD_COLUMNS,
        where: Where | None = None,
    ) -> None:
        self._filesystem, self._generation, self._columns = filesystem, generation, tuple(columns)
        self._where = where
        self._named = tuple(dict.fromkeys((*columns, *_PLACE, *(where.columns if where else ()))))
        held = [file for file in files if file.rows]
        self._stretches = [
            stretch
            for partition, (start, end) in sorted(spans.items())
            for stretch in _stretches(held, partition, start, end)
        ]
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def close(self) -> None:
        """Delete temporary files."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def read(self) -> Iterator[pa.Table]:
        """Tables of at most 10,000 records of one partition, partition by partition, in order."""
        for stretch in self._stretches:
            if stretch in self._spilled:
                yield from self._from_disk(stretch)
            elif stretch.is_small:
                found = self._dataset(stretch.files).to_table(
                    filter=self._within([stretch]), columns=list(self._columns)
                )
                yield from _slices(found)
            else:
                yield from self._as_written(stretch)

    @cached_property
    def _spilled(self) -> frozenset[_Stretch]:
        """Stretches that are sorted on disk; the first access does that."""
        large = [s for s in self._stretches if not s.is_small and not self._is_in_order(s)]
        if large:
            self._spill(large)
        return frozenset(large)

    def _is_in_order(self, stretch: _Stretch) -> bool:
        if len(stretch.files) > 1:
            return False
        files = self._dataset(stretch.files)
        places = files.to_table(filter=self._within([stretch]), columns=["offset"])
        offsets = places["offset"].to_numpy()
        return bool(np.all(offsets[1:] > offsets[:-1]))

    def _as_written(self, stretch: _Stretch) -> Iterator[pa.Table]:
        """The records of one file, which are in order."""
        (file,) = stretch.files
        with self._filesystem.open_input_file(file.path) as opened:
            parquet = pq.ParquetFile(opened)
            for batch in parquet.iter_batches(batch_size=_SLICE_ROWS, columns=list(self._named)):
                found = pa.table(batch).filter(self._within([stretch])).select(self._columns)
                if found.num_rows:
                    yield found

    def _spill(self, stretches: Sequence[_Stretch]) -> None:
        """Read the files of some stretches once, and write their records to disk by offsets."""
        self._folder = tempfile.TemporaryDirectory(prefix="everstate-")
        files = {file.path: file for stretch in stretches for file in stretch.files}
        scanned = self._dataset(files.values()).scanner(
            filter=self._within(stretches),
            columns=list(self._columns),
            batch_readahead=4,
            fragment_readahead=1,
        )
        waiting, rows = list[pa.RecordBatch](), 0
        for batch in scanned.to_batches():
            waiting.append(batch)
            rows += batch.num_rows
            if rows >= _SPILL_ROWS:
                self._put_down(stretches, pa.Table.from_batches(waiting))
                waiting, rows = [], 0
        if waiting:
            self._put_down(stretches, pa.Table.from_batches(waiting))

    def _put_down(self, stretches: Sequence[_Stretch], records: pa.Table) -> None:
        partitions, offsets = records["partition"].to_numpy(), records["offset"].to_numpy()
        for stretch in stretches:
            mine = np.flatnonzero(
                (partitions == stretch.partition)
                & (offsets >= stretch.start)
                & (offsets < stretch.end)
            )
            buckets = (offsets[mine] - stretch.start) // _BUCKET_OFFSETS
            for bucket in np.unique(buckets):
                part = records.take(pa.array(mine[buckets == bucket]))
                # Each part is a stream of its own, appended to the file: no file stays open.
                with open(self._bucket(stretch, int(bucket)), "ab") as sink:
                    with pa.ipc.new_stream(sink, part.schema, options=_IPC) as writer:
                        writer.write_table(part)

    def _from_disk(self, stretch: _Stretch) -> Iterator[pa.Table]:
        for bucket in range((stretch.end - stretch.start - 1) // _BUCKET_OFFSETS + 1):
            path = self._bucket(stretch, bucket)
            if not path.exists():
                continue
            parts, size = [], path.stat().st_size
            with open(path, "rb") as source:
                while source.tell() < size:
                    with pa.ipc.open_stream(source) as reader:
                        parts.append(reader.read_all())
            path.unlink()
            yield from _slices(pa.concat_tables(parts))

    def _bucket(self, stretch: _Stretch, bucket: int) -> Path:
        assert self._folder is not None, "the folder was created before anything was written"
        return Path(self._folder.name) / f"{stretch.partition}-{stretch.start}-{bucket}"

    def _dataset(self, files: Iterable[ArchiveFile]) -> ds.Dataset:
        paths = [file.path for file in files]
        schema = pa.schema([field for field in self._schema if field.name in self._named])
        return ds.dataset(paths, schema=schema, filesystem=self._filesystem, format="parquet")

    @cached_property
    def _schema(self) -> pa.Schema:
        """Columns of a record have the same types in all files."""
        path = self._stretches[0].files[0].path
        return pq.read_schema(path, filesystem=self._filesystem)

    def _within(self, stretches: Sequence[_Stretch]) -> ds.Expression:
        ranges = (
            (ds.field("partition") == stretch.partition)
            & (ds.field("offset") >= stretch.start)
            & (ds.field("offset") < stretch.end)
            for stretch in stretches
        )
        here = (ds.field("generation") == self._generation) & reduce(or_, ranges)
        return here if self._where is None else here & self._where.condition


def _stretches(
    files: Sequence[ArchiveFile], partition: int, start: int, end: int
) -> Iterator[_Stretch]:
    """Cut a range at offsets that no file spans."""
    mine = sorted(
        (f for f in files if f.may_hold(partition, start, end)), key=lambda f: f.offset_min or 0
    )
    together: list[ArchiveFile] = []
    last = -1
    for file in mine:
        assert file.offset_min is not None
        assert file.offset_max is not None
        if together and file.offset_min > last:
            yield _Stretch(partition, start, min(end, last + 1), tuple(together))
            together, start = [], last + 1
        together.append(file)
        last = max(last, file.offset_max)
    if together:
        yield _Stretch(partition, start, min(end, last + 1), tuple(together))


def _slices(records: pa.Table) -> Iterator[pa.Table]:
    ordered = records.take(pc.sort_indices(records["offset"]))
    for start in range(0, ordered.num_rows, _SLICE_ROWS):
        yield ordered.slice(start, _SLICE_ROWS)
