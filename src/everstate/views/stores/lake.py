"""The store `lake`: Delta tables beside the archive, which any program reads by their folder.

Readers of a view see the table `VIEW`. It has no files of its own: each of its commits names those
files of the published version that have rows to show. A version is a Delta table in the folder
`VIEW/_VIEW__v2_5f2b7c1e`. It is partitioned by whether a row is `now`, `past` or `gone`: a deletion
has a row, too, so that no older write brings its key back. A task writes a file to the folder
`_written` of a version, which takes a hundredth of the time of a commit and meets no conflict.
Whoever reads or shows the version merges these files into it first, and then deletes them: a kill
in between merges them again, which changes nothing.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from typing import Any, ClassVar, Final
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Schema, TableFeatures
from deltalake.exceptions import CommitFailedError, TableNotFoundError
from deltalake.fs import DeltaStorageHandler
from deltalake.transaction import AddAction, RemoveAction
from pyarrow.fs import FileSelector, FileSystem

from everstate.archive.layout import LakePath, options_of, table_path
from everstate.archive.sums import filesystem_of, is_table, local_folder, table_of
from everstate.config import Config
from everstate.errors import InvalidView, ViewRowsMissing
from everstate.retrying import within
from everstate.views.tables import KeptTable, Merge

_KEY, _VERSION, _STATE = "_key", "_version", "_lake_state"
_FROM, _TO = "valid_from", "valid_to"
_NOW, _PAST, _GONE = "now", "past", "gone"
_THERE: Final = "_lake_there"
_MERGE: Final = "everstate.merge"
"""Property of a version's table: how it is merged."""
_SHOWN: Final = "everstate.table"
"""What a commit to the readers' table says; see :func:`shown_version`."""
_WRITTEN: Final = "_written"
_PIECE: Final = 200
"""Files that are merged in one commit; each has some thousand rows at most."""
_FILES_MAX: Final = 40
"""A version with more files is compacted."""
_NEVER: Final = np.iinfo(np.int64).min
"""The end of a period that holds."""
_OF_VERSION: Final = re.compile(r"(.+)__v\d+(?:_\w+)?")
_VOID: Final = re.compile('[tT]ype":"void"')
_VACUUM_COMMITS: Final = 50
_KEPT_HOURS: Final = 1
"""How long a file stays for queries that began before it was replaced."""
_REST: Final = 20
"""So many times as long as a merge took, readers see its rows before there is another one."""
_AGAIN: Final = within(
    60.0, lambda each: isinstance(each, (CommitFailedError, FileNotFoundError)), pause_s=0.1
)
"""Repeats what another process has done first."""
_EMPTIED: Final = within(10.0, lambda each: "not empty" in str(each), pause_s=0.1)
"""Repeats what a store with folders refuses while a file in one of them is being deleted."""
_RESTS: Final[dict[str, float]] = {}
"""Folder of a readers' table → when its rest ends, on this process's clock."""
_PROPERTIES: Final[dict[str, str | None]] = {
    "delta.logRetentionDuration": f"interval {2 * _KEPT_HOURS} hours",
    "delta.deletedFileRetentionDuration": f"interval {_KEPT_HOURS} hours",
}


class LakeRows:
    """Views as Delta tables, in the folder or bucket of the archive or in another one."""

    merges: ClassVar[frozenset[Merge]] = frozenset({"row", "append", "periods"})
    call_s_max: ClassVar[float] = 600.0
    shown_every_s: ClassVar[float] = 10.0

    def __init__(self, config: Config) -> None:
        if (url := config.stores.server("lake").url) is not None:
            path = url if "://" in url else str(config.folder / url)
            config = config.replaced("archive", path=path)
        self._config, self._root = config, table_path(config, config.views.schema_name)

    def install(self, table: KeptTable, schema: pa.Schema) -> None:
        """Create the Delta table of a version; raises InvalidView for types that Delta lacks."""
        for field in schema:
            with suppress(Exception):  # deltalake's has no class of its own
                if not _VOID.search(Schema.from_arrow(pa.schema([field])).to_json()):
                    continue
            raise InvalidView(
                table.view,
                f"Delta has no such type, and its column {field.name!r} is {field.type}.",
                advice="Select another expression, or leave the store out.",
            )
        self._files()
        path = self._path(table.name)
        DeltaTable.create(
            path,
            schema.append(pa.field(_STATE, pa.string())),
            mode="ignore",
            partition_by=[_STATE],
            configuration={**_PROPERTIES, _MERGE: table.merge},
            storage_options=options_of(path),
            raise_if_key_not_exists=False,
        )

    def write(self, table: KeptTable, rows: pa.Table, gone: pa.Table) -> None:
        """Write a file of rows and deletions beside the version."""
        states = ((rows, _NOW), (gone, _GONE))
        given = [t.append_column(_STATE, pa.array([s] * len(t), pa.string())) for t, s in states]
        content = BytesIO()
        pq.write_table(pa.concat_tables(given, promote_options="default"), content)
        files = self._files()
        if not is_table(self._path(table.name)):
            raise ViewRowsMissing(table.view, self._path(table.name))
        name = f"{_place(table.name)}/{_WRITTEN}/{time.time_ns():020}-{uuid4().hex[:8]}.parquet"
        stream: Any
        if options_of(self._root) is None:
            # What `DeltaStorageHandler` opens refuses the buffers that pyarrow gives it.
            handler = DeltaStorageHandler(self._root)._handler  # noqa: SLF001
            stream = handler.open_output_stream(name, None)
        else:
            stream = files.open_output_stream(name)
        stream.write(content.getvalue())
        stream.close()

    def rows(self, table: KeptTable, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The rows to show, in no order, some thousand a batch."""
        lake = self._merged(table.view, table.name)
        shown = ds.field(_STATE) != _GONE
        for batch in _dataset(self._path(table.name), lake).to_batches(
            columns=schema.names, filter=shown, batch_size=10_000
        ):
            yield batch.cast(schema)

    def drop(self, name: str) -> None:
        """Delete the log of a version, so that nobody finds it, and then its files."""
        self._delete(f"{_place(name)}/_delta_log")
        self._delete(_place(name))

    def publish(self, view: str, name: str) -> None:
        """Let readers see the rows of a version that are written so far.

        Not at once again after a merge that took long, where readers see that version.
        """
        path, begun = self._path(view), time.monotonic()
        lake, shown = self._opened(view, name), shown_version(path)
        before, is_shown = lake.version(), (shown or "").startswith(f"{name}@")
        if is_shown and begun < _RESTS.get(path, 0.0):
            return
        lake = self._merged(view, name)
        with suppress(CommitFailedError):  # another process has merged; the next call does it
            if len(lake.file_uris()) > _FILES_MAX:
                lake.optimize.compact()
        if shown != f"{name}@{lake.version()}":
            _show(path, name, lake, is_shown=is_shown)
        if lake.version() // _VACUUM_COMMITS > before // _VACUUM_COMMITS:
            with suppress(CommitFailedError):
                lake.vacuum(_KEPT_HOURS, dry_run=False, enforce_retention_duration=False)
        _RESTS[path] = time.monotonic() + _REST * (time.monotonic() - begun)

    def unpublish(self, view: str) -> None:
        """Delete the log of the readers' table."""
        self._delete(f"{view}/_delta_log")

    def _path(self, name: str) -> LakePath:
        """Folder or URL of the table of a version, or of that which readers of a view see."""
        path = table_path(self._config, f"{self._config.views.schema_name}/{_place(name)}")
        if path.options is not None:  # The keeper tries again, and the other views wait for it.
            path.options["max_retries"] = "3"
        return path

    def _files(self) -> FileSystem:
        """The files of all views; raises OSError where there can be no folder."""
        if (folder := local_folder(self._root)) is not None:
            folder.mkdir(parents=True, exist_ok=True)
        return filesystem_of(self._root)

    def _delete(self, place: str) -> None:
        """Delete a folder with its files, if it is there."""
        with suppress(FileNotFoundError):
            _EMPTIED(self._files().delete_dir, place)
        if (folder := local_folder(f"{self._root}/{place}")) is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def _opened(self, view: str, name: str) -> DeltaTable:
        """The Delta table of a version; raises ViewRowsMissing."""
        self._files()
        try:
            return table_of(self._path(name))
        except TableNotFoundError as cause:
            raise ViewRowsMissing(view, self._path(name)) from cause

    @_AGAIN.wraps
    def _merged(self, view: str, name: str) -> DeltaTable:
        """The Delta table of a version, after all that was written is merged into it.

        Where another process did the same, the rest is merged again.
        """
        lake, files = self._opened(view, name), self._files()
        merge, schema = lake.metadata().configuration[_MERGE], pa.schema(lake.schema().to_arrow())
        folder = FileSelector(f"{_place(name)}/{_WRITTEN}", allow_not_found=True)
        found = sorted(each.path for each in files.get_file_info(folder))
        written = [path for path in found if path.endswith(".parquet")]
        for start in range(0, len(written), _PIECE):
            piece = written[start : start + _PIECE]
            # The first one comes last, and is chosen where a call was made again.
            read = [pq.read_table(files.open_input_file(path)) for path in reversed(piece)]
            given = pa.concat_tables(each.cast(schema) for each in read)
            _merge(self._path(name), lake, merge, given)
            for path in piece:
                with suppress(FileNotFoundError):
                    files.delete_file(path)
        return lake


def _place(name: str) -> str:
    """Folder of a version, in that of its view; or that of a view."""
    version = _OF_VERSION.fullmatch(name)
    return f"{version[1]}/_{name}" if version else name


def _dataset(path: str, lake: DeltaTable) -> ds.Dataset:
    """The rows of a table, by the filesystem that lets other threads go on."""
    return lake.to_pyarrow_dataset(filesystem=filesystem_of(path))


def _last(rows: pa.Table, *names: str) -> pa.Table:
    """The last one of the rows that have these values alike."""
    numbered = rows.select(names).append_column("place", pa.array(np.arange(len(rows))))
    return rows.take(numbered.group_by(names).aggregate([("place", "max")])["place_max"])


def _merge(path: str, lake: DeltaTable, merge: str, given: pa.Table) -> None:
    """Write rows and deletions over lower versions, or add them and end the states before them."""
    names = (_KEY,) if merge == "row" else (_KEY, _VERSION)
    if merge == "periods":
        rows = _ended(_dataset(path, lake), given)
    else:
        rows = _last(given.sort_by(_VERSION) if merge == "row" else given, *names)
    alike = " AND ".join(f"new.{name} = old.{name}" for name in names)
    # Streamed, it would take twice the memory, and skip no file by its statistics.
    merger = lake.merge(rows, alike, "new", "old", streamed_exec=False)
    if merge == "periods":
        merger.when_matched_update({name: f"new.{name}" for name in (_FROM, _TO, _STATE)})
    else:
        merger.when_matched_update_all("new._version > old._version")
    merger.when_not_matched_insert_all().execute()


def _ended(lake: ds.Dataset, given: pa.Table) -> pa.Table:
    """States and deletions that are not in a table, and other states of their keys that change.

    Times never decrease within a key: a change has the latest time up to its own. In whatever order
    changes come, the rows of their keys have the times that all changes so far give them.
    """
    keys, columns = pc.unique(given[_KEY]), [_KEY, _VERSION, _FROM, _TO, _STATE]
    # Not by a filter of the dataset, which cannot compare the texts of files that a merge wrote.
    scanned = lake.to_batches(columns=columns)
    mine = [batch.filter(pc.is_in(batch[_KEY], keys)) for batch in scanned]
    known = pa.Table.from_batches(mine, given.select(columns).schema)
    there = [t.append_column(_THERE, pa.repeat(t is known, len(t))) for t in (given, known)]
    every = _last(pa.concat_tables(there, promote_options="default"), _KEY, _VERSION)
    every = every.sort_by([(_KEY, "ascending"), (_VERSION, "ascending")])
    codes = every[_KEY].combine_chunks().dictionary_encode().indices.to_numpy().astype(np.int64)
    times, ranks = np.unique(_micros(every[_FROM]), return_inverse=True)
    # The running maximum of each key, in one pass: the ranks of a key are above those before it.
    begins = times[np.maximum.accumulate(codes * len(times) + ranks) - codes * len(times)]
    is_last = np.append(codes[1:] != codes[:-1], np.array([True]))
    ends = np.where(is_last, _NEVER, np.roll(begins, -1))
    is_same = (begins == _micros(every[_FROM])) & (ends == _micros(every[_TO]))
    state = pc.if_else(pc.equal(every[_STATE], _GONE), _GONE, pc.if_else(is_last, _NOW, _PAST))
    new = {_FROM: _moments(begins), _TO: _moments(ends), _STATE: state}
    is_changed = pa.array(~(every[_THERE].to_numpy() & is_same))
    for name, column in new.items():
        every = every.set_column(every.schema.get_field_index(name), name, column)
    return every.filter(is_changed).drop_columns(_THERE)


def _micros(moments: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """Microseconds since 1970, and :data:`_NEVER` for null."""
    found: npt.NDArray[np.int64] = moments.cast(pa.int64()).fill_null(_NEVER).to_numpy()
    return found


def _moments(micros: npt.NDArray[np.int64]) -> pa.Array:
    return pa.array(micros, mask=micros == _NEVER).cast(pa.timestamp("us", "UTC"))


def shown_version(path: str) -> str | None:
    """What readers see: the table of a version, `@`, and its commit; ``None``: no view."""
    if not is_table(path):
        return None
    found: str | None = table_of(path).history(1)[0].get(_SHOWN)
    return found


def _show(path: str, name: str, lake: DeltaTable, *, is_shown: bool) -> None:
    """Let the readers' table name the files of a version that have rows to show, in one commit.

    No file is removed and added by one commit: programs differ in what they make of that.
    """
    schema = Schema([field for field in lake.schema().fields if field.name != _STATE])
    table = DeltaTable.create(
        path,
        schema,
        mode="ignore",
        configuration=_PROPERTIES,
        storage_options=options_of(path),
    )
    if "timestamp_ntz" in schema.to_json() and "Ntz" not in str(table.protocol()):
        naive = TableFeatures.TimestampWithoutTimezone
        table.alter.add_feature(naive, allow_protocol_versions_increase=True)
    files = {f"_{name}/{each['path']}": each for each in _files_of(lake)}
    files = {place: e for place, e in files.items() if e[f"partition.{_STATE}"] != _GONE}
    named = {each["path"] for each in _files_of(table)} if is_shown else set[str]()
    actions: list[AddAction | RemoveAction] = [
        AddAction(
            place,
            files[place]["size_bytes"],
            partition_values={},
            modification_time=files[place]["modification_time"],
            data_change=True,
            stats=json.dumps({"numRecords": files[place]["num_records"]}),
        )
        for place in files.keys() - named
    ]
    now = time.time_ns() // 1_000_000
    actions += [RemoveAction(place, True, now) for place in named - files.keys()]
    note = CommitProperties({_SHOWN: f"{name}@{lake.version()}"})
    mode = "append" if is_shown else "overwrite"
    table.create_write_transaction(actions, mode, schema, commit_properties=note)


def _files_of(table: DeltaTable) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    return found
