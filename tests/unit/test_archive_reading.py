"""The archive is read in the order of offsets, and by key, whatever compaction has done to it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import MagicMock

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from everstate.archive import ArchiveReader, table_path
from everstate.archive import ordered as ordered_module
from everstate.config import Config, load
from everstate.errors import ArchiveError
from everstate.log.record import Record
from everstate.pipeline.keeping.spans import ArchivedOffsets
from everstate.views import source as source_module
from everstate.views.source import RecordSource, records_of
from hand_archive import HandArchive

KEYS = 40
PARTITIONS = 3


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load(tmp_path, archive={"path": str(tmp_path / "lake")})


def record(partition: int, offset: int) -> Record:
    """A record whose every part tells where it was; some cannot be read, some are tombstones."""
    key = f"k{(offset * 7 + partition) % KEYS:03}"
    value: bytes | None = b'{"key": "%b", "recordedAt": "2026-01-01T00:00:00Z", "at": %d}' % (
        key.encode(),
        offset,
    )
    if offset % 17 == 5:
        value = None if offset % 2 else b"not json"
    headers = (("ce_id", str(offset).encode()), ("empty", None))
    return Record("t", partition, offset, 1_700_000_000_000 + offset, key.encode(), value, headers)


def written(config: Config, offsets: int = 400) -> dict[int, list[Record]]:
    """Some commits; not every offset was served."""
    archive = HandArchive(config, "order")
    archive.begin(dict.fromkeys(range(PARTITIONS), 0))
    served = {p: [record(p, o) for o in range(offsets) if o % 11 != 3] for p in range(PARTITIONS)}
    for start in range(0, offsets, offsets // 4):
        end = start + offsets // 4
        mine = [r for records in served.values() for r in records if start <= r.offset < end]
        archive.append(mine, dict.fromkeys(range(PARTITIONS), end))
    return served


def read(config: Config, spans: dict[int, tuple[int, int]]) -> list[Record]:
    reader = ArchiveReader(config, "order")
    return [r for table in reader.records(1, spans) for r in records_of("t", table)]


def wanted(served: dict[int, list[Record]], spans: dict[int, tuple[int, int]]) -> list[Record]:
    return [
        r for p, (start, end) in sorted(spans.items()) for r in served[p] if start <= r.offset < end
    ]


@pytest.fixture(params=["as written", "mixed by key"])
def served(request: pytest.FixtureRequest, config: Config) -> dict[int, list[Record]]:
    found = written(config)
    if request.param == "mixed by key":
        archive = HandArchive(config, "order")
        archive.mix()
    return found


@pytest.fixture(params=["in memory", "as they come", "by way of the disk", "large"])
def _how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How much may be read at once: so little that the other ways have to be gone."""
    if request.param == "large":
        monkeypatch.setattr(ordered_module, "_MEMORY_BYTES", 3_000)
        monkeypatch.setattr(ordered_module, "_SLICE_BYTES", 1_000)
    elif request.param != "in memory":
        monkeypatch.setattr(ordered_module, "_DIRECT_ROWS", 1)
    if request.param == "by way of the disk":
        monkeypatch.setattr(ordered_module, "_BUCKET_OFFSETS", 50)
        monkeypatch.setattr(ordered_module, "_SPILL_ROWS", 70)


@pytest.mark.usefixtures("_how")
def test_records_come_whole_once_and_in_order(
    config: Config, served: dict[int, list[Record]]
) -> None:
    random = Random(4)
    spans: list[dict[int, tuple[int, int]]] = [
        {0: (0, 400), 1: (0, 400), 2: (0, 400)},
        {1: (100, 101)},
        {1: (3, 4)},
        {2: (399, 500)},
        *(
            {
                p: (start, start + random.randint(0, 200))
                for p, start in enumerate(random.sample(range(400), 3))
            }
            for _ in range(4)
        ),
    ]
    for each in spans:
        assert read(config, each) == wanted(served, each)


def test_no_more_records_are_read_than_are_wanted(
    config: Config, served: dict[int, list[Record]], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = {("t", partition): 400 for partition in range(PARTITIONS)}
    for name, found in (("Topics", {}), ("Offsets", {"beginnings": log, "stable_ends": log})):
        made = MagicMock()
        for asked, answer in found.items():
            getattr(made.return_value.__enter__.return_value, asked).return_value = answer
        monkeypatch.setattr(source_module, name, made)
    monkeypatch.setattr(source_module, "log_mark", MagicMock())
    monkeypatch.setattr(RecordSource, "_follow", lambda *_: [])
    source = RecordSource(config, "order")
    monkeypatch.setattr(source, "topic", "t")
    source.begin(dict.fromkeys(range(PARTITIONS), 0), {})
    read: dict[int, list[Record]] = {partition: [] for partition in range(PARTITIONS)}
    ends = dict.fromkeys(range(PARTITIONS), 0)
    while ends != dict.fromkeys(range(PARTITIONS), 400):
        for run in source.poll(0.0, ends, 7):
            assert len(run.records) <= 7
            assert run.start == ends[run.partition]
            ends[run.partition] = run.end
            read[run.partition] += run.records
    assert read == served


@pytest.mark.parametrize(("at", "end", "begins"), [(100, 100, 100), (100, 120, 0), (70, 120, 70)])
def test_without_an_archive_a_time_is_a_place_of_the_log(
    config: Config, monkeypatch: pytest.MonkeyPatch, at: int, end: int, begins: int
) -> None:
    """Unless the log has newer records only: those before them may be of that time, and are lost.

    Where retention has taken all and nothing came since, no record tells that one is missing.
    """
    source = source_of(config, monkeypatch, at, end, begins)
    monkeypatch.setitem(vars(source), "_archive", MagicMock(position=dict, begins=lambda _: {}))
    assert source.since(datetime.now(UTC)) == {0: 0 if begins == at != end else at}


@pytest.mark.parametrize(
    ("first", "found", "at", "end"),
    [
        *((0, 0, 0, 120), (0, 7, 7, 120), (5, 7, 7, 120), (5, 5, 0, 120)),
        *((0, None, 70, 120), (69, None, 70, 120), (70, None, 0, 120), (70, None, 70, 70)),
    ],
)
def test_a_time_before_all_that_the_archive_has_is_no_place_in_it(
    config: Config, monkeypatch: pytest.MonkeyPatch, first: int, found: Any, at: int, end: int
) -> None:
    """It began with a log whose first records had expired: they may be of that time, too."""
    source = source_of(config, monkeypatch, 70, end, 70)
    archive = MagicMock()
    archive.position.return_value = {1: {0: 90}}
    archive.begins.return_value = {0: first}
    archive.records.return_value = [pa.table({"offset": [] if found is None else [found, 60]})]
    monkeypatch.setitem(vars(source), "_archive", archive)
    assert source.since(datetime.now(UTC)) == {0: at}


def source_of(
    config: Config, monkeypatch: pytest.MonkeyPatch, at: int, end: int, begins: int
) -> RecordSource:
    """A log of one partition, which has a time at an offset."""
    answers = {"at_time": at, "beginnings": begins, "stable_ends": end}
    made = MagicMock()
    for asked, offset in answers.items():
        getattr(made.return_value.__enter__.return_value, asked).return_value = {("t", 0): offset}
    monkeypatch.setattr(source_module, "Offsets", made)
    for name in ("Topics", "log_mark"):
        monkeypatch.setattr(source_module, name, MagicMock())
    source = RecordSource(config, "order")
    monkeypatch.setattr(source, "topic", "t")
    return source


@pytest.mark.parametrize("direct_rows", [1, 50_000])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_large_messages_are_bounded_by_their_bytes(
    config: Config, monkeypatch: pytest.MonkeyPatch, direct_rows: int, is_mixed: bool
) -> None:
    """They are small on disk, and Arrow cannot sort more than 2 GiB of messages."""
    archive = HandArchive(config, "order")
    archive.begin({0: 0})
    message = b'{"key": "k%d", "recordedAt": "2026-01-01T00:00:00Z", "text": "%b"}'
    served = [
        Record("t", 0, n, n, b"k%d" % (n % 7), message % (n % 7, b"%05d" % n * 2_000), ())
        for n in range(300)
    ]
    archive.append(served, {0: 300})
    if is_mixed:
        archive.mix()
    slices, put_down, sizes = ordered_module._slices, ordered_module.OrderedRecords._put_down, [0]

    def sorted_(records: pa.Table) -> Any:
        sizes.append(records.nbytes)
        return slices(records)

    def written_(self: Any, spans: Any, width: int, records: pa.Table) -> None:
        sizes.append(records.nbytes)
        put_down(self, spans, width, records)

    monkeypatch.setattr(ordered_module, "_slices", sorted_)
    monkeypatch.setattr(ordered_module.OrderedRecords, "_put_down", written_)
    monkeypatch.setattr(ordered_module, "_DIRECT_ROWS", direct_rows)
    monkeypatch.setattr(ordered_module, "_MEMORY_BYTES", 400_000)
    monkeypatch.setattr(ordered_module, "_SLICE_BYTES", 100_000)
    monkeypatch.setattr(ordered_module, "_SLICE_ROWS", 20)
    found = list(ArchiveReader(config, "order").records(1, {0: (0, 300)}))
    assert [r for table in found for r in records_of("t", table)] == served
    assert max(sizes) <= 400_000
    assert max(table.nbytes for table in found) <= 110_000


def test_what_was_put_on_the_disk_is_gone_when_nobody_reads_on(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written(config)
    HandArchive(config, "order").mix()
    monkeypatch.setattr(ordered_module, "_DIRECT_ROWS", 1)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    reading: Any = ArchiveReader(config, "order").records(1, {0: (0, 400)})
    assert next(reading).num_rows > 0
    assert list(tmp_path.glob("everstate-*")) != []
    reading.close()
    assert list(tmp_path.glob("everstate-*")) == []


def test_a_file_whose_statistics_do_not_reach_into_a_range_is_not_opened(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(config)
    opened: list[str] = []
    stretches = ordered_module._stretches

    def noted(*arguments: Any) -> Any:
        for stretch in stretches(*arguments):
            opened.extend(file.path for file in stretch.files)
            yield stretch

    monkeypatch.setattr(ordered_module, "_stretches", noted)
    assert len(read(config, {1: (110, 120)})) > 5
    assert len(opened) == 1


def test_where_an_archive_begins_is_told_for_each_partition(config: Config) -> None:
    archive = HandArchive(config, "order")
    archive.begin({0: 0, 1: 70})
    archive.append([record(0, 1)], {0: 5, 1: 70})
    reader = ArchiveReader(config, "order")
    assert (reader.begins(1), reader.position()) == ({0: 0, 1: 70}, {1: {0: 5, 1: 70}})


def test_the_changes_of_a_key_are_found_and_files_without_it_are_not_opened(
    config: Config, served: dict[int, list[Record]]
) -> None:
    reader = ArchiveReader(config, "order")
    for key in ("k000", "k017", "k039"):
        found = reader.changes_of(key)
        mine = [
            r
            for records in served.values()
            for r in records
            if r.key == key.encode() and r.value is not None and r.value.startswith(b"{")
        ]
        assert list(records_of("t", found.records)) == sorted(mine, key=lambda r: r.offset)
        assert 0 < found.files_read <= found.files
    nothing = reader.changes_of("zzz")
    assert (nothing.records.num_rows, nothing.files_read) == (0, 0)
    assert reader.changes_of("zzz", ["offset"]).records.schema == pa.schema(
        [("offset", pa.int64())]
    )


def test_after_clustering_a_key_is_in_one_file(config: Config) -> None:
    written(config)
    HandArchive(config, "order").mix(files=8)
    assert ArchiveReader(config, "order").changes_of("k017").files_read <= 2


@pytest.mark.parametrize("spoilt", [b'{"commitInfo"', b"\xff\xfe\x00"])
def test_b10_a_commit_that_is_damaged_is_an_error_of_the_archive(
    config: Config, spoilt: bytes
) -> None:
    """Any other error would end the keeping of all entity types; Delta reads its checkpoint."""
    written(config)
    path = table_path(config, "order")
    DeltaTable(path).create_checkpoint()
    newest = max(Path(path, "_delta_log").glob("*.json"))
    newest.write_bytes(spoilt)
    newest.with_name(f".{newest.name}.crc").unlink()  # as an earlier release wrote it
    with pytest.raises(ArchiveError, match="archive of order"):
        ArchivedOffsets(config).of("order")
