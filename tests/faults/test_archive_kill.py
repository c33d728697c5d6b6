"""Killed anywhere, or out of room, the archive has each record once and goes on by itself."""

from __future__ import annotations

import logging
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from pyspark.sql import SparkSession

from archive_cases import Shop, change
from everstate.archive import ArchiveReader, table_path
from everstate.errors import ArchiveFull, PipelineError
from everstate.pipeline.archiving.audit import audit
from java_settings import both_compilers
from kit.settings import altered
from kit.waiting import until
from tiers import kills

HERE = Path(__file__).parent
KILLS = kills(2, full=20)
SEED = int(os.environ.get("FAULT_SEED") or time.time_ns() % 2**32)
MOMENTS = random.Random(SEED)


class Child:
    """An archiver and its JVM in a process group of their own."""

    def __init__(self, shop: Shop, folder: Path) -> None:
        config = altered(
            shop.config,
            archive={"batch_changes_max": 60, "trigger_s": 0.05},
            pipeline={"driver_memory": "1g"},
        )
        settings = folder / "settings.json"
        settings.write_text(config.model_dump_json())
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "archive_child.py"), str(settings)],
            env={**both_compilers(), "PYTHONPATH": str(HERE.parent)},
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )

    def wait_for_batches(self, count: int) -> None:
        assert self._process.stdout is not None
        for _ in range(count):
            assert self._process.stdout.readline(), "the archiver ended"

    def kill(self) -> None:
        """SIGKILL to Python and to Spark's JVM at once."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()


def uncommitted(shop: Shop) -> set[str]:
    """Data files that no commit names."""
    folder = Path(table_path(shop.config, "order"))
    log = "".join(path.read_text() for path in (folder / "_delta_log").glob("*.json"))
    return {path.name for path in folder.glob("part-*.parquet") if path.name not in log}


def between_write_and_commit(shop: Shop) -> None:
    """Return in the moment when rows are written and not yet committed."""
    old = uncommitted(shop)
    until(lambda: uncommitted(shop) - old, 60, 0, what=lambda: "no such moment came")


def at_a_random_moment(shop: Shop) -> None:
    time.sleep(MOMENTS.uniform(0, 2))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "moment",
    [between_write_and_commit, pytest.param(at_a_random_moment, marks=pytest.mark.full)],
)
def test_c25_killed_the_archive_has_each_record_once(
    shop: Shop, tmp_path: Path, moment: Callable[[Shop], None]
) -> None:
    print(f"FAULT_SEED={SEED}")
    written = 0
    for kill in range(KILLS // 2):
        written += shop.write_orders(keys=300, versions=3, first=3 * kill + 1)
        child = Child(shop, tmp_path)
        try:
            child.wait_for_batches(2)
            moment(shop)
        finally:
            child.kill()
    shop.archiver().catch_up()
    report = audit(shop.spark, shop.config, "order", against_log=True)
    assert report.problems == []
    assert (report.rows, report.compared_with_log) == (written, written)


class SmallDisk:
    """The archive's folder is a file system of 2 MiB, until there is room."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        self.works = self._mount("size=2m")

    def give_room(self) -> None:
        assert self._mount("size=64m,remount")

    def close(self) -> None:
        if self.works:
            # Spark may still hold a file that it was writing when the disk was full.
            subprocess.run(["umount", "--lazy", str(self._folder)], check=True)

    def _mount(self, options: str) -> bool:
        mount = ["mount", "-t", "tmpfs", "-o", options, "everstate-test", str(self._folder)]
        return subprocess.run(mount, capture_output=True, check=False).returncode == 0


class Quota:
    """No process of Spark may write a file of more than 256 KiB, until there is room.

    The kernel refuses the write in the middle of a file (EFBIG); no right is needed for that.
    """

    def __init__(self, spark: SparkSession) -> None:
        gateway = spark.sparkContext._gateway
        assert gateway is not None
        self._jvm = psutil.Process(gateway.proc.pid)
        self._before = resource.prlimit(self._jvm.pid, resource.RLIMIT_FSIZE)
        self._limit(256 * 1024)

    def give_room(self) -> None:
        self._limit(self._before[0])

    def close(self) -> None:
        self._limit(self._before[0])

    def _limit(self, size: int) -> None:
        resource.prlimit(self._jvm.pid, resource.RLIMIT_FSIZE, (size, self._before[1]))


@pytest.fixture(params=["disk", "quota"])
def limited(
    request: pytest.FixtureRequest, tmp_path: Path, spark: SparkSession
) -> Iterator[SmallDisk | Quota]:
    """Too little room for the archive; where mounting is not allowed, both are the quota."""
    disk = SmallDisk(tmp_path / "archive") if request.param == "disk" else None
    small = disk if disk is not None and disk.works else Quota(spark)
    print(f"limited by {type(small).__name__}")
    yield small
    small.close()


@pytest.mark.full
def test_a_full_disk_is_told_nothing_is_half_done_and_work_goes_on_when_there_is_room(
    limited: SmallDisk | Quota, shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    shop.write_orders(keys=20, versions=1)
    archiver = shop.archiver(trigger_s=0.2)
    archiver.step()
    before = ArchiveReader(shop.config, "order").position()
    noise = random.Random(1)
    shop.write(
        [
            shop.record(change(f"big{key}", 1, extra={"noise": noise.randbytes(4096).hex()}))
            for key in range(900)
        ]
    )
    with pytest.raises(ArchiveFull, match="disk is full"):
        archiver.step()
    assert ArchiveReader(shop.config, "order").position() == before
    assert rows_of(shop) == 20
    stop = threading.Event()
    runner = threading.Thread(target=archiver.run, args=(stop,))
    with caplog.at_level(logging.WARNING, "everstate.archive"):
        runner.start()
        try:
            until(lambda: "the disk is full" in caplog.text)
            limited.give_room()
            until(lambda: rows_of(shop) == 920)
        finally:
            stop.set()
            runner.join(60)
    report = audit(shop.spark, shop.config, "order", against_log=True)
    assert report.problems == []
    assert report.rows == 920


def rows_of(shop: Shop) -> int:
    """Records of the archive, by its statistics."""
    return sum(file.rows for file in ArchiveReader(shop.config, "order").files())


def test_sparks_error_of_a_full_disk_is_ours() -> None:
    from everstate.pipeline.spark.session import translate

    for reason in ("No space left on device", "Disk quota exceeded", "File too large"):
        text = f"Job aborted.\nCaused by: java.io.IOException: {reason}"
        assert isinstance(translate(RuntimeError(text), "archiving x"), ArchiveFull)
    other = translate(RuntimeError("org.apache.spark.SparkException: odd"), "archiving x")
    assert isinstance(other, PipelineError)
    assert str(other) == "archiving x: SparkException: odd"
