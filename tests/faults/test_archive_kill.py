"""Killed anywhere, or out of room, the archive has each record once and goes on by itself."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.readwriter import DataFrameWriter

from archive_cases import Shop, change, open_shop
from everstate.archive import ArchiveLog, ArchiveReader, table_path
from everstate.errors import ArchiveFull, PipelineError
from everstate.pipeline.audit import audit

HERE = Path(__file__).parent
KILLS = 20 if os.environ.get("EVERSTATE_FULL") else 2


@pytest.fixture
def shop(stack: Any, spark: SparkSession, topic_prefix: str, tmp_path: Path) -> Iterator[Shop]:
    with open_shop(stack.config, spark, topic_prefix, tmp_path) as shop:
        yield shop


class Child:
    """An archiver and its JVM in a process group of their own."""

    def __init__(self, shop: Shop, folder: Path) -> None:
        archive = shop.config.archive.model_copy(
            update={"batch_changes_max": 60, "trigger_s": 0.05}
        )
        pipeline = shop.config.pipeline.model_copy(update={"driver_memory": "1g"})
        config = shop.config.model_copy(update={"archive": archive, "pipeline": pipeline})
        settings = folder / "settings.json"
        settings.write_text(config.model_dump_json())
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "archive_child.py"), str(settings)],
            env={**os.environ, "PYTHONPATH": str(HERE.parent)},
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
    deadline = time.monotonic() + 60
    while not uncommitted(shop) - old:
        assert time.monotonic() < deadline, "no such moment came"


def at_a_random_moment(shop: Shop) -> None:
    time.sleep(random.uniform(0, 2))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("moment", [between_write_and_commit, at_a_random_moment])
def test_c25_killed_the_archive_has_each_record_once(
    shop: Shop, tmp_path: Path, moment: Callable[[Shop], None]
) -> None:
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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], bool]]:
    """Makes ``tmp_path/archive`` a file system of so many MiB; False where that is not allowed."""
    folder = tmp_path / "archive"
    folder.mkdir()
    mounted = False

    def resize(mib: int) -> bool:
        nonlocal mounted
        options = f"size={mib}m" + (",remount" if mounted else "")
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "everstate-test", str(folder)],
            capture_output=True,
            check=False,
        )
        mounted = mounted or done.returncode == 0
        return done.returncode == 0

    yield resize
    if mounted:
        # Spark may still hold a file that it was writing when the disk was full.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_is_told_nothing_is_half_done_and_work_goes_on_when_there_is_room(
    small_disk: Callable[[int], bool], shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = small_disk(2)
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
    if not limited:
        no_room(monkeypatch)
    with pytest.raises(ArchiveFull, match="no room"):
        archiver.step()
    assert ArchiveReader(shop.config, "order").position() == before
    assert ArchiveReader(shop.config, "order").counts().rows == 20
    stop = threading.Event()
    runner = threading.Thread(target=archiver.run, args=(stop,))
    runner.start()
    try:
        time.sleep(2)
        monkeypatch.undo()
        if limited:
            assert small_disk(64)
        deadline = time.monotonic() + 60
        while ArchiveReader(shop.config, "order").counts().rows < 920:
            assert time.monotonic() < deadline
            time.sleep(0.2)
    finally:
        stop.set()
        runner.join(60)
    report = audit(shop.spark, shop.config, "order", against_log=True)
    assert report.problems == []
    assert report.rows == 920
    assert ArchiveLog(shop.config, "order").last() is not None


def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where mounting is not allowed: the error that Spark's file system raises."""

    def save(*_: object, **__: object) -> None:
        raise ArchiveFull("archiving order: there is no room on the disk (simulated).")

    monkeypatch.setattr(DataFrameWriter, "save", save)


def test_sparks_error_of_a_full_disk_is_ours() -> None:
    from everstate.pipeline.session import translate

    text = "Job aborted.\nCaused by: java.io.IOException: No space left on device"
    assert isinstance(translate(RuntimeError(text), "archiving x"), ArchiveFull)
    other = translate(RuntimeError("org.apache.spark.SparkException: odd"), "archiving x")
    assert isinstance(other, PipelineError)
    assert str(other) == "archiving x: SparkException: odd"
