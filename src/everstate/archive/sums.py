"""The bytes of a lake on a local disk are compared with the sums that were written beside them.

Spark writes a sum (CRC-32) of every 512 bytes of a file `NAME` to `.NAME.crc`. The readers here
compare with it whatever they read, and write such sums for the ledger. Sums in Parquet's pages are
compared too, where pages have them.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Final
from urllib.parse import unquote, urlsplit
from zlib import crc32

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError
from deltalake.fs import DeltaStorageHandler
from pyarrow.fs import (
    AwsStandardS3RetryStrategy,
    FileSystem,
    PyFileSystem,
    S3FileSystem,
    SubTreeFileSystem,
)

from everstate.archive.files import files_of
from everstate.archive.layout import LakePath, archive_errors, options_of
from everstate.errors import ArchiveDamaged

_HEAD: Final = struct.Struct(">4si")
_MAGIC: Final = b"crc\0"
_CHUNK: Final = 512
_LOG: Final = "_delta_log"
COMMITS: Final = f"{_LOG}/0*.json"
"""Names of the files of a table's commits."""

CHECKED_PARQUET: Final = ds.ParquetFileFormat(
    default_fragment_scan_options=ds.ParquetFragmentScanOptions(page_checksum_verification=True)
)
"""Parquet whose pages are compared with their sums, where they have one."""


def local_folder(path: str) -> Path | None:
    """The folder of a table on a local disk; ``None``: it is in an object store."""
    parts = urlsplit(path)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return None if "://" in path else Path(path)


def filesystem_of(path: str, *, by_spark: bool = False) -> FileSystem:
    """The filesystem that opens a table's files, given its folder or URL, by paths in its log.

    On S3 it is Arrow's own, which lets other threads go on while it waits for the store.
    Reading raises ArchiveDamaged where bytes differ from their sums, and where a file on a local
    disk has none although Spark wrote it (``by_spark``). Cost: 0.75 s a GiB of a core, where
    reading alone costs 0.1 s.
    """
    if isinstance(path, LakePath) and path.options is not None:
        again = AwsStandardS3RetryStrategy(5)
        # A file of less than 10 MB is written by one request.
        store = S3FileSystem(retry_strategy=again, allow_delayed_open=True, **path.files)
        return SubTreeFileSystem(path.removeprefix("s3://"), store)
    return PyFileSystem(_LakeFiles(path, by_spark))


def require_sums(path: str) -> None:
    """Raise ArchiveDamaged when a data file that Spark wrote to a local disk has no sums.

    Spark itself reads such a file in silence; it compares the others with their sums. Cost: reads
    the table's log, and asks the disk once for each file.
    """
    folder = local_folder(path)
    if folder is not None:
        with archive_errors(f"reading {path}"):
            files = files_of(table_of(path))
        for file in files:
            _require_sums(folder / unquote(file.path))


def table_of(path: str) -> DeltaTable:
    """The newest version of a table, once the part of its log that gives it has been checked.

    Raises ArchiveDamaged. Cost: reads the log's newest checkpoint and the commits since then.
    """
    folder = local_folder(path)
    if folder is not None:
        log = folder / _LOG
        names = sorted(file.name for file in log.glob("[0-9]*") if file.suffix != ".crc")
        newest = max((name[:20] for name in names if ".checkpoint." in name), default="")
        for name in names:
            if name[:20] >= newest:
                check_file(log / name)
    return DeltaTable(path, storage_options=options_of(path))


def is_table(path: str) -> bool:
    """Whether a table was ever written there. Cost: reads nothing on disk, the log on S3."""
    options = options_of(path)
    if options is None:
        return bool(DeltaTable.is_deltatable(path))
    try:  # That call would stop all threads of this process while it waits for the store.
        DeltaTable(path, storage_options=options)
    except TableNotFoundError:
        return False
    return True


def check_file(file: Path) -> bool:
    """Compare all of a file with its sums; returns whether it has any. Raises ArchiveDamaged."""
    if not _sums_of(file).exists():
        return False
    try:
        with _CheckedFile(file) as opened:
            while opened.read(1 << 20):
                pass
    except FileNotFoundError:  # Delta deletes commits that no version of the last month needs.
        return file.exists()
    return True


def check_table(path: str, files: list[str]) -> tuple[dict[str, ArchiveDamaged], list[str]]:
    """Compare the given files of a table and all of its log with their sums.

    Returns the damage by file, and the files without sums: of those the pages of Parquet are
    compared. The log of a table in an object store is left to that store. Cost: reads each file
    once.
    """
    folder, filesystem = local_folder(path), filesystem_of(path)
    of_log = (
        [] if folder is None else [file for file in (folder / _LOG).iterdir() if file.is_file()]
    )
    logged = sorted(f"{_LOG}/{file.name}" for file in of_log if file.name[0] != ".")
    damaged, without = dict[str, ArchiveDamaged](), list[str]()
    for name in [*files, *logged]:
        try:
            if folder is None or not check_file(folder / unquote(name)):
                if name.endswith(".parquet"):
                    read_pages(filesystem, name)
                without.append(name)
        except ArchiveDamaged as found:
            damaged[name] = found
        except (OSError, pa.ArrowException) as cause:
            damaged[name] = ArchiveDamaged(f"{name} is damaged: {cause}")
    return damaged, without


def read_pages(filesystem: FileSystem, name: str) -> None:
    """Read all of a file; raises OSError where a page of it differs from its sum."""
    with filesystem.open_input_file(name) as opened:
        for _ in pq.ParquetFile(opened, page_checksum_verification=True).iter_batches():
            pass


@contextmanager
def summed(path: str, *names: str) -> Iterator[None]:
    """Write sums for the files that the block adds to a table without Spark.

    ``names``: patterns of these files' names; Spark may add others meanwhile. Default: all.
    """
    before = set(_visible(path, names))
    yield
    for file in set(_visible(path, names)) - before:
        _write_sums(file)


def write_sums(path: str, names: Sequence[str]) -> None:
    """Write sums for files of a table on a local disk, by their paths in its log."""
    folder = local_folder(path)
    if folder is not None:
        for name in names:
            _write_sums(folder / unquote(name))


def _write_sums(file: Path) -> None:
    content = file.read_bytes()
    sums = (crc32(content[at : at + _CHUNK]) for at in range(0, len(content), _CHUNK))
    packed = b"".join(each.to_bytes(4) for each in sums)
    part = file.with_name(f".{file.name}.part")
    part.write_bytes(_HEAD.pack(_MAGIC, _CHUNK) + packed)
    part.replace(_sums_of(file))  # Others may be reading: they never find a part of the sums.


def _visible(path: str, names: Sequence[str]) -> Iterator[Path]:
    """Files that never change once they are there."""
    folder = local_folder(path)
    for name in names or ("*.parquet", f"{_LOG}/0*"):
        for file in () if folder is None else folder.glob(name):
            if not file.name.startswith("."):
                yield file


def _sums_of(file: Path) -> Path:
    return file.with_name(sums_name(file.name))


def sums_name(name: str) -> str:
    """Name of the file that has the sums of a file."""
    return f".{name}.crc"


def _require_sums(file: Path) -> None:
    if not _sums_of(file).exists():
        raise ArchiveDamaged(f"{file}: its sums, {sums_name(file.name)}, are gone.")


def _damaged(file: Path, at: int) -> ArchiveDamaged:
    return ArchiveDamaged(f"{file} is damaged: its bytes from {at:,} on differ from their sums.")


class _LakeFiles(DeltaStorageHandler):
    def __init__(self, path: str, by_spark: bool) -> None:
        super().__init__(path)
        self._folder, self._by_spark = local_folder(path), by_spark

    def open_input_file(self, path: str) -> pa.PythonFile:
        """A file whose bytes are compared with their sums, where it has any."""
        if self._folder is not None:
            file = self._folder / PurePosixPath(unquote(path))
            if _sums_of(file).exists():
                return pa.PythonFile(_CheckedFile(file), "r")
            if self._by_spark:
                _require_sums(file)
        return super().open_input_file(path)

    open_input_stream = open_input_file


class _CheckedFile(io.RawIOBase):
    """A file for reading; whatever is read has been compared with its sums."""

    def __init__(self, file: Path) -> None:
        self._path = file
        self._file = file.open("rb")
        self._at, self._size = 0, file.stat().st_size
        packed = _sums_of(file).read_bytes()
        count = -(-self._size // _CHUNK)
        if packed[: _HEAD.size] != _HEAD.pack(_MAGIC, _CHUNK):
            raise _damaged(file, 0)
        if len(packed) != _HEAD.size + 4 * count:
            raise _damaged(file, self._size)
        self._sums = struct.unpack(f">{count}I", packed[_HEAD.size :])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def size(self) -> int:
        """Bytes of the file."""
        return self._size

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        """The next bytes, fewer at the end. Raises ArchiveDamaged."""
        end = self._size if size < 0 else min(self._size, self._at + size)
        if self._at >= end:
            return b""
        first = self._at // _CHUNK
        start = first * _CHUNK
        wanted = min(self._size, -(-end // _CHUNK) * _CHUNK) - start
        self._file.seek(start)
        content = self._file.read(wanted)
        view = memoryview(content)
        for number, at in enumerate(range(0, wanted, _CHUNK), first):
            if crc32(view[at : at + _CHUNK]) != self._sums[number]:
                raise _damaged(self._path, number * _CHUNK)
        found = content[self._at - start : end - start]
        self._at = end
        return found

    def close(self) -> None:
        self._file.close()
        super().close()
