"""One flipped bit anywhere in a lake is detected, or changes no value that anybody reads."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from everstate.archive import ArchiveLog, ArchiveReader, Ledger, sums
from everstate.archive.layout import archive_errors
from everstate.archive.upkeep import delete_unneeded, forget_files, move_aside
from everstate.config import Config, load
from everstate.errors import ArchiveDamaged, ArchiveError
from everstate.log.record import Record
from everstate.pipeline.archiving.audit import audit
from hand_archive import HandArchive

FLIPS = 300
OFFSETS = 60


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A lake with data, commits and a ledger; it has the sums that Spark would have written."""
    config = load(tmp_path, archive={"path": str(tmp_path / "lake")})
    archive = HandArchive(config, "order")
    archive.begin({0: 0, 1: 0})
    for start in range(0, OFFSETS, 20):
        offsets = range(start, start + 20)
        records = [_record(p, o) for p in (0, 1) for o in offsets]
        archive.append(records, {0: start + 20, 1: start + 20})
    Ledger(config, "order").sync(ArchiveLog(config, "order"))
    return config


def _record(partition: int, offset: int) -> Record:
    key = f"k{offset % 7}".encode()
    value = b'{"key": "%b", "recordedAt": "2026-01-01T00:00:00Z", "at": %d}' % (key, offset)
    return Record("t", partition, offset, 1_700_000_000_000 + offset, key, value, ())


def _answers(config: Config) -> Iterator[Callable[[], object]]:
    """What each reader says of the archive."""
    reader, ledger = ArchiveReader(config, "order"), Ledger(config, "order")
    yield reader.position
    yield lambda: reader.begins(1)
    yield lambda: [t.to_pylist() for t in reader.records(1, {0: (0, OFFSETS), 1: (5, OFFSETS)})]
    yield lambda: reader.changes_of("k3").records.to_pylist()
    yield lambda: sorted(reader.values())
    yield lambda: (found := reader.locate(1, 1, 33)) and found[1].epoch
    yield lambda: [(r.epoch, r.partition, r.start, r.end, r.rows) for r in ledger.rows()]
    yield lambda: [(file.rows, file.unreadable) for file in reader.files()]


def _flips(config: Config) -> Iterator[Path]:
    """The file that has a flipped bit now; it is put back afterwards. Sums are flipped too."""
    random = Random(58)
    lake = Path(ArchiveReader(config, "order").path).parent
    files = sorted(file for file in lake.rglob("*") if file.is_file())
    for _ in range(FLIPS):
        file = random.choice(files)
        content = file.read_bytes()
        at, bit = random.randrange(len(content)), 1 << random.randrange(8)
        wrong = content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :]
        file.write_bytes(wrong)
        yield file
        file.write_bytes(content)


def _wrong(config: Config, right: list[object]) -> list[int]:
    """The readers that give another answer than the right one, and no error."""
    wrong = []
    for number, (answer, expected) in enumerate(zip(_answers(config), right, strict=True)):
        try:
            if answer() != expected:
                wrong.append(number)
        except ArchiveError:
            continue
    return wrong


def test_no_flipped_bit_changes_an_answer_in_silence(config: Config) -> None:
    right = [answer() for answer in _answers(config)]
    wrong = [(file.name, _wrong(config, right)) for file in _flips(config)]
    assert [(name, readers) for name, readers in wrong if readers] == []


@pytest.mark.parametrize(
    ("files", "before"),
    [("_delta_log/*.json", rb"\"positions\":{\"1\":{\"0\":"), ("*.parquet", b'{"key": "k')],
)
def test_a_flipped_bit_would_change_answers_if_nobody_asked_for_sums(
    files: str, before: bytes, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defect, planted. At random places Arrow aborts the process where nobody asks."""
    right = [answer() for answer in _answers(config)]
    file = sorted(Path(ArchiveReader(config, "order").path).glob(files))[-1]
    content = bytearray(file.read_bytes())
    content[content.index(before) + len(before)] ^= 1
    file.write_bytes(content)
    assert _wrong(config, right) == []
    monkeypatch.setattr(sums, "_sums_of", lambda file: file.with_name("no sums"))
    monkeypatch.setattr(sums, "_require_sums", lambda file: None)
    assert _wrong(config, right) != []


def test_each_flipped_bit_is_found_and_its_file_is_named(config: Config) -> None:
    reader, ledger = ArchiveReader(config, "order"), Ledger(config, "order")
    tables = [(reader.path, [f.path for f in reader.files()]), (ledger.path, ledger.files())]
    assert [sums.check_table(*table) for table in tables] == [({}, []), ({}, [])]
    for file in _flips(config):
        found = [str(each) for table in tables for each in sums.check_table(*table)[0].values()]
        name = file.name[1:].removesuffix(".crc") if file.name.startswith(".") else file.name
        assert len(found) == 1
        assert name in found[0]
        assert "`everstate archive repair` writes its records again" in found[0]


def test_a_page_is_compared_with_its_own_sum_where_a_file_has_no_other(tmp_path: Path) -> None:
    """As in an object store. Without sums of any kind a file is read, and said to have none."""
    lake = tmp_path / "lake"
    (lake / "_delta_log").mkdir(parents=True)
    rows = {"n": list(range(1_000))}
    pq.write_table(
        pa.table(rows), lake / "a.parquet", compression="none", write_page_checksum=True,
        use_dictionary=False,
    )  # fmt: skip
    assert sums.check_table(str(lake), ["a.parquet"]) == ({}, ["a.parquet"])
    content = bytearray((lake / "a.parquet").read_bytes())
    content[2_000] ^= 1
    (lake / "a.parquet").write_bytes(content)
    assert pq.read_table(lake / "a.parquet").to_pydict() != rows, "nobody asked for the sum"
    (damage,) = sums.check_table(str(lake), ["a.parquet"])[0].values()
    assert "a.parquet is damaged" in str(damage)
    with pytest.raises(ArchiveDamaged, match="differs from its sum"), archive_errors("reading"):
        sums.read_pages(sums.filesystem_of(str(lake)), "a.parquet")


def test_a_vacuum_leaves_no_commit_without_sums(config: Config) -> None:
    reader = ArchiveReader(config, "order")
    left = Path(reader.path) / "part-of-a-failed-append.parquet"
    left.write_bytes(b"PAR1")
    os.utime(left, (0, 0))
    assert delete_unneeded(config, "order") == 1
    assert not left.exists()
    assert sums.check_table(reader.path, [f.path for f in reader.files()]) == ({}, [])


def test_verify_names_a_damaged_file_before_spark_reads_it(config: Config) -> None:
    """It also says that a ledger has no sums, as an earlier release wrote it."""
    for written in Path(Ledger(config, "order").path).rglob(".*.crc"):
        written.unlink()
    reader = ArchiveReader(config, "order")
    file = Path(reader.path) / reader.files()[1].path
    content = file.read_bytes()
    file.write_bytes(content[:600] + bytes([content[600] ^ 1]) + content[601:])
    no_spark: Any = None
    report = audit(no_spark, config, "order")
    assert not report.holds
    assert [problem.rule for problem in report.problems] == ["damaged"]
    assert f"{file} is damaged: its bytes from 512 on differ" in report.problems[0].message
    assert report.problems[0].where == reader.path
    without, unread = report.not_read
    assert f"the sums of 2 files of {Ledger(config, 'order').path}: none (" in without
    assert unread == "records and offsets, because of the damaged files"


def test_a_file_without_sums_is_read_by_nobody(config: Config) -> None:
    """An object store and a ledger of an earlier release have none; Spark wrote them here."""
    reader = ArchiveReader(config, "order")
    file = Path(reader.path) / reader.files()[1].path
    file.with_name(sums.sums_name(file.name)).unlink()
    said = f"{file}: its sums, .{file.name}.crc, are gone"
    for read in (
        lambda: list(reader.records(1, {0: (0, OFFSETS), 1: (0, OFFSETS)})),
        lambda: reader.changes_of("k3"),
        lambda: list(reader.values()),
        lambda: sums.require_sums(reader.path),
    ):
        with pytest.raises(ArchiveDamaged, match=re.escape(said)):
            read()
    no_spark: Any = None
    (problem,) = audit(no_spark, config, "order").problems
    assert (problem.rule, said in problem.message) == ("no sums", True)


def test_damaged_files_are_moved_aside_and_then_forgotten(config: Config) -> None:
    """Until the table forgets them, nobody reads it without them; others are never forgotten."""
    reader = ArchiveReader(config, "order")
    names = [file.path for file in reader.files()]
    move_aside(config, "order", names[:1])
    aside = Path(reader.path) / "_damaged"
    assert {file.name for file in aside.iterdir()} == {names[0], sums.sums_name(names[0])}
    damaged, without = sums.check_table(reader.path, names)
    assert (list(damaged), without) == (names[:1], [])
    with pytest.raises(ArchiveDamaged, match=f"{names[0]}: its sums"):
        list(reader.values())
    with pytest.raises(ArchiveError, match=f"lacks {names[0]} now"):
        forget_files(config, "order", names[1:2])
    forget_files(config, "order", names[:1])
    assert [file.path for file in reader.files()] == names[1:]
    assert sums.check_table(reader.path, names[1:]) == ({}, [])
