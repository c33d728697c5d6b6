"""Bits that flip in a lake: Spark's readers stop, and the log gives the records back."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import orjson
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from archive_cases import ORDER, Order, Shop, change
from everstate import App
from everstate.archive import ArchiveLog, ArchiveReader
from everstate.archive.sums import sums_name
from everstate.cli import cli
from everstate.errors import ArchiveDamaged, ArchiveError
from everstate.log.positions import Range
from everstate.pipeline.archiving import repair as repairing
from everstate.pipeline.archiving.audit import AuditReport, audit
from everstate.pipeline.archiving.compact import compact
from everstate.pipeline.archiving.repair import Repaired, repair
from everstate.pipeline.archiving.reparse import reparse
from everstate.pipeline.archiving.replay import replay
from everstate.pipeline.spark.archived import read_archive, read_archived
from everstate.pipeline.spark.session import spark_errors
from log_cases import forget
from tiers import counted

shop_app = App("shop")
shop_app.entity("order", key="order_id")(Order)
FLIPS = counted(12, full=300)


def filled(shop: Shop) -> list[Path]:
    """An archive of three appends; its data files."""
    for version in (1, 2, 3):
        shop.write_orders(keys=12, versions=1, first=version)
        shop.transact([shop.record(change(f"x{version}", 1))], commit=version > 1)
        shop.archiver().step()
    return files_of(shop)


def files_of(shop: Shop) -> list[Path]:
    """Data files with records; the largest first."""
    reader = ArchiveReader(shop.config, "order")
    found = sorted(reader.files(), key=lambda file: -file.bytes)
    return [Path(reader.path) / file.path for file in found if file.rows]


def ends_of(file: Path) -> dict[str, int]:
    """Where the values of each column end in a file of one row group."""
    group = pq.read_metadata(file).row_group(0)
    columns = [group.column(at) for at in range(group.num_columns)]
    return {
        each.path_in_schema: (each.dictionary_page_offset or each.data_page_offset)
        + each.total_compressed_size
        - 1
        for each in columns
    }


@contextmanager
def flipped(file: Path, at: int, bit: int = 1) -> Iterator[None]:
    content = file.read_bytes()
    file.write_bytes(content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :])
    try:
        yield
    finally:
        file.write_bytes(content)


def rows_of(shop: Shop) -> list[str]:
    with spark_errors("reading"):
        return sorted(map(str, read_archive(shop.spark, shop.config, ORDER).collect()))


def verified(shop: Shop) -> AuditReport:
    return audit(shop.spark, shop.config, "order", entity_type=ORDER)


def repaired(shop: Shop) -> Repaired:
    return repair(shop.spark, shop.config, ORDER, offsets=shop.offsets, topics=shop.topics)


def readers(shop: Shop) -> dict[str, Callable[[], object]]:
    """Every job that reads the lake with Spark; views, derived topics and proofs use the last."""
    spark, config = shop.spark, shop.config

    def some() -> object:
        spans = {partition: Range(0, 100) for partition in range(3)}
        with spark_errors("reading"):
            return read_archived(spark, config, ORDER, spans).collect()

    return {
        "compact": lambda: compact(spark, config, "order", cluster=True),
        "reparse": lambda: reparse(spark, config, ORDER),
        "replay": lambda: replay(spark, config, "order", f"{shop.topic}.again"),
        "ranges": some,
        "all": lambda: rows_of(shop),
    }


def test_each_job_of_spark_stops_at_a_damaged_file(shop: Shop) -> None:
    """It names the file, leaves it in its place, and writes nothing."""
    files = filled(shop)
    right, log = rows_of(shop), ArchiveLog(shop.config, "order")
    version = log.version()
    jobs = readers(shop).values()
    for file, read in zip(files[: len(jobs)], jobs, strict=True):
        with flipped(file, ends_of(file)["raw_value"]):
            with pytest.raises(ArchiveDamaged, match=re.escape(file.name)) as stopped:
                read()
            assert "everstate archive repair" in str(stopped.value)
            assert file.exists()
    shop.topics.delete([f"{shop.topic}.again"])
    assert (log.version(), rows_of(shop)) == (version, right)


def test_no_flipped_bit_changes_what_spark_reads(shop: Shop) -> None:
    files, random = filled(shop), Random(58)
    right, silent, named = rows_of(shop), list[str](), 0
    for _ in range(FLIPS):
        file = random.choice(files)
        with flipped(file, random.randrange(file.stat().st_size), 1 << random.randrange(8)):
            try:
                if rows_of(shop) != right:
                    silent.append(file.name)
            except ArchiveDamaged as found:
                named += file.name in str(found)
    assert silent == []
    assert named > 0


def test_no_job_of_spark_reads_a_file_whose_sums_are_gone(shop: Shop, tmp_path: Path) -> None:
    file = filled(shop)[1]
    config = shop.config
    (tmp_path / "everstate.toml").write_text(
        f'[log]\nbootstrap_servers = "{config.bootstrap_servers}"\nprefix = "{config.log.prefix}"\n'
        f'[store]\ndsn = "{config.store_dsn}"\n[archive]\npath = "{config.archive_path}"\n'
        f'[project]\napp = "{__name__}:shop_app"\n'
    )
    version = ArchiveLog(shop.config, "order").version()
    file.with_name(sums_name(file.name)).unlink()
    for read in readers(shop).values():
        with pytest.raises(ArchiveDamaged, match=f"{file.name}: its sums"):
            read()
    shop.topics.delete([f"{shop.topic}.again"])
    assert ArchiveLog(shop.config, "order").version() == version
    assert [problem.rule for problem in verified(shop).problems] == ["no sums"]
    verb = ["-C", str(tmp_path), "archive"]
    made = CliRunner().invoke(cli, [*verb, "repair", "--json"])
    assert [done["summed"] for done in orjson.loads(made.stdout)] == [[file.name]]
    assert CliRunner().invoke(cli, [*verb, "verify"]).exit_code == 0
    shown = CliRunner().invoke(cli, [*verb, "repair", "order"])
    assert (shown.exit_code, "damaged files" in shown.stdout) == (0, True)


def test_spark_compares_pages_where_a_file_has_no_other_sums(shop: Shop) -> None:
    """As in an object store."""
    file = filled(shop)[0]
    file.with_name(sums_name(file.name)).unlink()

    def read() -> int:
        with spark_errors("reading"):
            return len(shop.spark.read.parquet(str(file)).collect())

    assert read() > 0
    for at in list(ends_of(file).values())[::3]:
        with flipped(file, at), pytest.raises(ArchiveDamaged, match=file.name):
            read()


def test_a_damaged_file_is_named_and_its_records_are_written_again(shop: Shop) -> None:
    """A file of one append, and one that a compaction wrote."""
    filled(shop)
    damage_and_repair(shop)
    compact(shop.spark, shop.config, "order")
    shop.write_orders(keys=12, versions=1, first=4)
    assert shop.archiver().step() is not None
    damage_and_repair(shop)
    assert verified(shop).problems == []


def damage_and_repair(shop: Shop) -> None:
    before, position = rows_of(shop), ArchiveReader(shop.config, "order").position()
    file = files_of(shop)[0]
    content = bytearray(file.read_bytes())
    content[600] ^= 1
    file.write_bytes(content)
    (problem,) = verified(shop).problems
    assert (problem.rule, str(file) in problem.message) == ("damaged", True)
    done = repaired(shop)
    assert done.files == [file.name]
    assert done.records > 0
    report = verified(shop)
    assert (report.problems, report.rows) == ([], len(before))
    assert report.compared_with_log == len(before)
    assert rows_of(shop) == before
    assert ArchiveReader(shop.config, "order").position() == position
    assert repaired(shop).files == []


class _Killed(BaseException):
    pass


def _kill(*_: object) -> None:
    raise _Killed


def test_a_repair_that_was_killed_goes_on(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each of its steps; readers get errors meanwhile."""
    filled(shop)
    before = rows_of(shop)
    for step in ("move_aside", "_append", "forget_files"):
        file = files_of(shop)[0]
        content = bytearray(file.read_bytes())
        content[600] ^= 1
        file.write_bytes(content)
        with monkeypatch.context() as planted:
            planted.setattr(repairing, step, _kill)
            with pytest.raises(_Killed):
                repaired(shop)
        with pytest.raises(ArchiveDamaged, match=file.name):
            rows_of(shop)
        assert repaired(shop).files == [file.name]
        report = verified(shop)
        assert (report.problems, report.rows) == ([], len(before))
        assert rows_of(shop) == before


def test_nothing_is_changed_when_the_log_lacks_a_record(shop: Shop) -> None:
    files = filled(shop)
    forget(shop.config, shop.topic, dict.fromkeys(range(3), 2))
    version = ArchiveLog(shop.config, "order").version()
    oldest = min(files, key=lambda each: each.stat().st_mtime_ns)
    with flipped(oldest, 600):
        with pytest.raises(ArchiveError, match=r"the log has [0-9]+ of the [0-9]+ records"):
            repaired(shop)
        assert oldest.exists()
    assert ArchiveLog(shop.config, "order").version() == version
    assert verified(shop).problems == []
