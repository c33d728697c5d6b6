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
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow.fs import FileSystem

from everstate.archive.files import ArchiveFile
from everstate.archive.sums import CHECKED_PARQUET

RECORD_COLUMNS: Final = (
    *("partition", "offset", "timestamp", "timestamp_type"),
    *("raw_key", "raw_value", "raw_headers"),
)
"""Columns that make up a record of the log."""
RecordParts: TypeAlias = tuple[
    int, int, int, bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...], int
]
"""Partition, offset, milliseconds since 1970, key, value, headers, type of the timestamp."""
_PLACE: Final = ("generation", "partition", "offset")
_SLICE_ROWS: Final = 10_000
_DIRECT_ROWS: Final = 50_000
_DIRECT_BYTES: Final = 16 << 20
"""Compressed bytes of files that are read into memory at once."""
_MEMORY_BYTES: Final = 256 << 20
"""Decompressed bytes that are sorted at once: Arrow cannot sort 2 GiB of messages."""
_SLICE_BYTES: Final = 64 << 20
_BUCKET_OFFSETS: Final = 100_000
_SPILL_ROWS: Final = 200_000
_IPC: Final = pa.ipc.IpcWriteOptions(compression="lz4")


@dataclass(frozen=True, slots=True)
class Where:
    """A condition on archived records, and the columns that it names."""

    condition: ds.Expression
    columns: tuple[str, ...]


class _Span(NamedTuple):
    """Offsets ``[start, end)`` of a partition."""

    partition: int
    start: int
    end: int

    def cut(self, width: int) -> Iterator[_Span]:
        """Spans of at most ``width`` offsets."""
        for start in range(self.start, self.end, width):
            yield self._replace(start=start, end=min(self.end, start + width))


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A span, and all files that may hold some of its offsets."""

    span: _Span
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
        self._on_disk: dict[_Span, int] = {}
        """Decompressed bytes by span."""

    def close(self) -> None:
        """Delete temporary files."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def read(self) -> Iterator[pa.Table]:
        """Tables of at most 10,000 records of one partition, partition by partition, in order.

        Fewer at a time when messages are large.
        """
        for stretch in self._stretches:
            if stretch in self._spilled:
                yield from self._from_disk(stretch.span, _BUCKET_OFFSETS)
            elif stretch.is_small:
                yield from self._in_memory(stretch)
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

    def _in_memory(self, stretch: _Stretch) -> Iterator[pa.Table]:
        """The records of small files, by way of the disk when they are large decompressed."""
        scanned = self._dataset(stretch.files).scanner(
            filter=self._within([stretch]), columns=list(self._columns), batch_size=_SLICE_ROWS
        )
        found, size = list[pa.RecordBatch](), 0
        for batch in scanned.to_batches():
            found.append(batch)
            size += batch.nbytes
            if size > _MEMORY_BYTES:
                break
        if size <= _MEMORY_BYTES:
            yield from _slices(pa.Table.from_batches(found, scanned.projected_schema))
            return
        found.clear()
        self._spill([stretch])
        yield from self._from_disk(stretch.span, _BUCKET_OFFSETS)

    def _as_written(self, stretch: _Stretch) -> Iterator[pa.Table]:
        """The records of one file, which are in order."""
        (file,) = stretch.files
        with self._filesystem.open_input_file(file.path) as opened:
            parquet = pq.ParquetFile(opened, page_checksum_verification=True)
            groups = (parquet.metadata.row_group(at) for at in range(parquet.num_row_groups))
            rows = _slice_rows(file.rows, sum(group.total_byte_size for group in groups))
            for batch in parquet.iter_batches(batch_size=rows, columns=list(self._named)):
                found = pa.table(batch).filter(self._within([stretch])).select(self._columns)
                if found.num_rows:
                    yield found

    def _spill(self, stretches: Sequence[_Stretch]) -> None:
        """Read the files of some stretches once, and write their records to disk by offsets."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="everstate-")
        spans = [stretch.span for stretch in stretches]
        files = {file.path: file for stretch in stretches for file in stretch.files}
        scanned = self._dataset(files.values()).scanner(
            filter=self._within(stretches),
            columns=list(self._columns),
            batch_size=_SLICE_ROWS,
            batch_readahead=4,
            fragment_readahead=1,
        )
        waiting, rows, size = list[pa.RecordBatch](), 0, 0
        for batch in scanned.to_batches():
            if waiting and (rows >= _SPILL_ROWS or size + batch.nbytes > _MEMORY_BYTES):
                self._put_down(spans, _BUCKET_OFFSETS, pa.Table.from_batches(waiting))
                waiting, rows, size = [], 0, 0
            waiting.append(batch)
            rows += batch.num_rows
            size += batch.nbytes
        if waiting:
            self._put_down(spans, _BUCKET_OFFSETS, pa.Table.from_batches(waiting))

    def _put_down(self, spans: Iterable[_Span], width: int, records: pa.Table) -> None:
        """Write the records of some spans to files of at most ``width`` offsets."""
        partitions, offsets = records["partition"].to_numpy(), records["offset"].to_numpy()
        for span in spans:
            mine = np.flatnonzero(
                (partitions == span.partition) & (offsets >= span.start) & (offsets < span.end)
            )
            buckets = (offsets[mine] - span.start) // width
            for bucket in np.unique(buckets):
                part = records.take(pa.array(mine[buckets == bucket]))
                start = span.start + int(bucket) * width
                piece = span._replace(start=start, end=min(span.end, start + width))
                self._on_disk[piece] = self._on_disk.get(piece, 0) + part.nbytes
                # Each part is a stream of its own, appended to the file: no file stays open.
                with open(self._path(piece), "ab") as sink:
                    with pa.ipc.new_stream(sink, part.schema, options=_IPC) as writer:
                        writer.write_table(part)

    def _from_disk(self, span: _Span, width: int) -> Iterator[pa.Table]:
        """The records of a span that was written to files of at most ``width`` offsets."""
        for piece in span.cut(width):
            size, offsets = self._on_disk.pop(piece, 0), piece.end - piece.start
            if size > _MEMORY_BYTES and offsets > 1:
                # Half as large on average, so that hardly any must be divided once more.
                narrow = -(-offsets // (2 * -(-size // _MEMORY_BYTES)))
                for part in self._parts(piece):
                    self._put_down([piece], narrow, part)
                yield from self._from_disk(piece, narrow)
            elif size:
                yield from _slices(pa.concat_tables(self._parts(piece)))

    def _parts(self, piece: _Span) -> Iterator[pa.Table]:
        """The parts of a file as they were written; deletes it after the last one."""
        path = self._path(piece)
        size = path.stat().st_size
        with open(path, "rb") as source:
            while source.tell() < size:
                with pa.ipc.open_stream(source) as reader:
                    yield reader.read_all()
        path.unlink()

    def _path(self, piece: _Span) -> Path:
        assert self._folder is not None, "the folder was created before anything was written"
        return Path(self._folder.name) / "-".join(map(str, piece))

    def _dataset(self, files: Iterable[ArchiveFile]) -> ds.Dataset:
        paths = [file.path for file in files]
        schema = pa.schema([field for field in self._schema if field.name in self._named])
        return ds.dataset(paths, schema=schema, filesystem=self._filesystem, format=CHECKED_PARQUET)

    @cached_property
    def _schema(self) -> pa.Schema:
        """Columns of a record have the same types in all files."""
        path = self._stretches[0].files[0].path
        return pq.read_schema(path, filesystem=self._filesystem)

    def _within(self, stretches: Sequence[_Stretch]) -> ds.Expression:
        ranges = (
            (ds.field("partition") == partition)
            & (ds.field("offset") >= start)
            & (ds.field("offset") < end)
            for partition, start, end in (stretch.span for stretch in stretches)
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
            yield _Stretch(_Span(partition, start, min(end, last + 1)), tuple(together))
            together, start = [], last + 1
        together.append(file)
        last = max(last, file.offset_max)
    if together:
        yield _Stretch(_Span(partition, start, min(end, last + 1)), tuple(together))


def _slices(records: pa.Table) -> Iterator[pa.Table]:
    ordered = records.take(pc.sort_indices(records["offset"]))
    rows = _slice_rows(ordered.num_rows, ordered.nbytes)
    for start in range(0, ordered.num_rows, rows):
        yield ordered.slice(start, rows)


def _slice_rows(rows: int, size: int) -> int:
    """How many of so many rows are read at once, by their bytes."""
    return max(1, min(_SLICE_ROWS, rows * _SLICE_BYTES // max(1, size)))


def record_parts(rows: pa.RecordBatch | pa.Table) -> Iterator[RecordParts]:
    """The parts of each row's record, from the columns in :data:`RECORD_COLUMNS`.

    A timestamp is a number, because Kafka stores times that Python's dates do not reach.
    """
    millis = pc.divide(pc.cast(rows["timestamp"], pa.int64()), 1_000)
    columns: list[list[Any]] = [
        *(rows[name].to_pylist() for name in ("partition", "offset")),
        millis.to_pylist(),
        *(rows[name].to_pylist() for name in ("raw_key", "raw_value", "raw_headers")),
        rows["timestamp_type"].to_pylist(),
    ]
    for partition, offset, moment, key, value, headers, kind in zip(*columns, strict=True):
        named = tuple((header["key"], header["value"]) for header in headers or ())
        yield partition, offset, moment, key, value, named, kind
