"""A lake on S3: commits are created once, and a store that fails loses and doubles nothing."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from archive_cases import ORDER, Shop, open_shop
from everstate.archive import ArchiveLog, ArchiveReader, table_path
from everstate.errors import ArchiveUnreachable, EverstateError, Fenced
from everstate.parts import Journal, Part, run_parts
from everstate.pipeline.archiving.audit import audit
from everstate.pipeline.archiving.compact import compact
from everstate.pipeline.spark.object_store import LOG_STORE
from kit.faulty_s3 import COMMIT, FaultyS3, faulty_s3
from kit.served_s3 import LakeOfTest, ServedS3
from kit.settings import altered
from running_stack import RunningStack


@pytest.fixture
def proxy(s3: ServedS3) -> Iterator[FaultyS3]:
    """A proxy before the object store, without faults yet."""
    with faulty_s3(s3.port) as made:
        yield made


@pytest.fixture
def bucket(s3: ServedS3, spark: SparkSession, proxy: FaultyS3) -> str:
    """A new bucket that Spark reaches by the proxy."""
    name = f"b{uuid.uuid4().hex}"
    (s3.data / name).mkdir()
    hadoop_of(spark).set(f"fs.s3a.bucket.{name}.endpoint", proxy.endpoint)
    return name


@pytest.fixture
def behind(
    stack: RunningStack,
    spark: SparkSession,
    topic_prefix: str,
    s3: ServedS3,
    proxy: FaultyS3,
    bucket: str,
) -> Iterator[Shop]:
    """A shop whose lake is behind the proxy for Spark, and not for our readers."""
    settings = {**s3.section(), "path": f"s3://{bucket}/lake"}
    lake = LakeOfTest(settings, s3.data / bucket / "lake")
    with open_shop(stack.config, spark, topic_prefix, lake) as made:
        yield made


def hadoop_of(spark: SparkSession) -> Any:
    return spark.sparkContext._jsc.hadoopConfiguration()


def places(shop: Shop) -> list[tuple[int, int]]:
    """Each archived place, twice where it is there twice."""
    if not ArchiveLog(shop.config, "order").exists():
        return []
    rows = shop.table().to_pyarrow_table(columns=["partition", "offset"]).to_pylist()
    return sorted((row["partition"], row["offset"]) for row in rows)


def served(shop: Shop) -> list[tuple[int, int]]:
    ends = shop.offsets.stable_ends([shop.topic])
    return sorted((p, offset) for (_, p), end in ends.items() for offset in range(end))


@pytest.mark.parametrize("lake", ["s3"], indirect=True)
def test_an_archive_on_s3_is_written_compacted_proved_and_read(shop: Shop) -> None:
    for first in (1, 2, 3):
        shop.write_orders(keys=20, versions=1, first=first)
        assert shop.archiver().step() is not None
    done = compact(shop.spark, shop.config, "order", cluster=True)
    assert (done.files_before, done.files_after) == (9, 1)
    assert places(shop) == served(shop)
    report = audit(shop.spark, shop.config, "order", entity_type=ORDER)
    assert report.problems == []
    assert report.compared_with_log == report.rows == 60
    reader = ArchiveReader(shop.config, "order")
    found = reader.changes_of("o3", ["version"]).records.to_pylist()
    assert [row["version"] for row in found] == [1, 2, 3]
    assert list(shop.folder.glob("_delta_log/*.json")), "it is in the object store"


def written(spark: SparkSession, store: str, path: str, *lines: str) -> None:
    """Write a commit by a class of Delta's storage."""
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    content = gateway.jvm.java.util.ArrayList()
    for line in lines:
        content.add(line)
    jvm, hadoop = gateway.jvm, hadoop_of(spark)
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    given = gateway.new_array(jvm.java.lang.Object, 1)
    given[0] = hadoop
    made = loader.loadClass(store).getConstructors()[0].newInstance(given)
    made.write(jvm.org.apache.hadoop.fs.Path(path), content.iterator(), False, hadoop)


@pytest.mark.parametrize(
    ("store", "kept"), [(LOG_STORE, "theirs"), ("io.delta.storage.S3SingleDriverLogStore", "mine")]
)
def test_a_commit_of_another_process_is_not_replaced_as_by_deltas_own_class(
    spark: SparkSession, s3: ServedS3, proxy: FaultyS3, bucket: str, store: str, kept: str
) -> None:
    place = f"{bucket}/t/_delta_log/{0:020d}.json"

    def rival(_: str) -> None:
        """Another process commits after this one has looked, and before it writes."""
        with s3.files().open_output_stream(place) as file:
            file.write(b"theirs\n")

    proxy.add("PUT", COMMIT, before=rival)
    if kept == "theirs":
        with pytest.raises(Py4JJavaError, match="FileAlreadyExistsException"):
            written(spark, store, f"s3://{place}", "mine")
    else:
        written(spark, store, f"s3://{place}", "mine")
    assert s3.files().open_input_file(place).read() == f"{kept}\n".encode()


@pytest.mark.parametrize("content", [["a", "b"], ["a"], ["a", "b", "c"], ["a", "c"]])
def test_a_commit_that_is_there_is_ones_own_only_with_the_same_content(
    spark: SparkSession, bucket: str, content: list[str]
) -> None:
    path = f"s3://{bucket}/t/_delta_log/{0:020d}.json"
    written(spark, LOG_STORE, path, "a", "b")
    if content == ["a", "b"]:
        written(spark, LOG_STORE, path, *content)
        return
    with pytest.raises(Py4JJavaError, match="FileAlreadyExistsException"):
        written(spark, LOG_STORE, path, *content)


def test_c25_of_two_archivers_on_s3_the_second_is_fenced_and_no_record_is_there_twice(
    behind: Shop, proxy: FaultyS3
) -> None:
    behind.write_orders(keys=10, versions=1)
    slow, quick = behind.archiver(), behind.archiver()
    slow.step()
    behind.write_orders(keys=10, versions=1, first=2)
    race = proxy.add("PUT", COMMIT, before=lambda _: quick.step())
    with pytest.raises(Fenced, match="another process"):
        slow.step()
    assert race.seen == 1
    assert places(behind) == served(behind)
    assert [c.note.epoch for c in ArchiveLog(behind.config, "order").commits() if c.note] == [
        *range(3)
    ]


def test_a_commit_whose_answer_is_lost_is_recognised(behind: Shop, proxy: FaultyS3) -> None:
    behind.write_orders(keys=10, versions=1)
    archiver = behind.archiver()
    archiver.step()
    behind.write_orders(keys=10, versions=1, first=2)
    lost = proxy.add("PUT", COMMIT, loses_answer=True)
    batch = archiver.step()
    assert lost.seen == 1
    assert batch is not None
    assert batch.rows == 10
    assert places(behind) == served(behind)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("*", "", 503, "SlowDown"),
        ("*", "", 400, "ExpiredToken"),
        ("PUT", r"\.parquet$", 403, "AccessDenied"),
        ("PUT", COMMIT, 403, "AccessDenied"),
        ("PUT", "", 507, "XMinioStorageFull"),
    ],
)
def test_a_store_that_refuses_is_named_and_archiving_goes_on_later(
    behind: Shop, proxy: FaultyS3, method: str, path: str, status: int, code: str
) -> None:
    behind.write_orders(keys=10, versions=1)
    archiver = behind.archiver()
    archiver.step()
    behind.write_orders(keys=10, versions=1, first=2)
    fault = proxy.add(method, path, times=10_000, refusal=(status, code))
    with pytest.raises(EverstateError, match=rf"{code}|{status}") as raised:
        archiver.step()
    assert raised.value.retryable
    assert isinstance(raised.value, ArchiveUnreachable)
    assert fault.seen
    proxy.faults.clear()
    assert archiver.catch_up() == 10
    assert places(behind) == served(behind)


def test_a_store_that_is_busy_for_a_moment_is_asked_again(behind: Shop, proxy: FaultyS3) -> None:
    behind.write_orders(keys=10, versions=1)
    busy = proxy.add("*", "", times=2, refusal=(503, "SlowDown"))
    assert behind.archiver().catch_up() == 10
    assert busy.seen == 2
    assert places(behind) == served(behind)


def test_a_store_that_is_killed_at_a_commit_loses_and_doubles_nothing(
    behind: Shop, proxy: FaultyS3, s3: ServedS3
) -> None:
    behind.write_orders(keys=10, versions=1)
    archiver = behind.archiver()
    archiver.step()
    behind.write_orders(keys=10, versions=1, first=2)
    proxy.add("PUT", COMMIT, before=lambda _: s3.kill())
    try:
        with pytest.raises(ArchiveUnreachable, match="object store"):
            archiver.step()
    finally:
        s3.start()
    assert archiver.catch_up() == 10
    assert places(behind) == served(behind)
    report = audit(behind.spark, behind.config, "order", against_log=True)
    assert report.problems == []


def test_the_reason_is_in_the_state_and_archiving_goes_on_by_itself(
    behind: Shop, proxy: FaultyS3, tmp_path: Path
) -> None:
    journal, stop = Journal("pipeline", tmp_path), threading.Event()
    parts = {"archive": behind.archiver(trigger_s=0.2).run}
    role = threading.Thread(target=run_parts, args=(journal, parts, stop))

    def part() -> Part:
        return journal.state.parts["archive"]

    role.start()
    try:
        for version, code in enumerate(("SlowDown", "ExpiredToken", "AccessDenied"), start=1):
            proxy.add("PUT", "", times=10_000, refusal=(403, code))
            behind.write_orders(keys=10, versions=1, first=version)
            until(lambda code=code: code in (part().reason or ""))  # type: ignore[misc]
            proxy.faults.clear()
            until(lambda: part().state == "running" and places(behind) == served(behind))
    finally:
        stop.set()
        role.join(60)


def until(holds: Callable[[], bool]) -> None:
    """Wait for a minute at most."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_the_keys_of_a_user_are_in_no_setting_of_spark_and_in_no_message(
    spark: SparkSession, s3: ServedS3, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_keys = [name for name, _ in spark.sparkContext.getConf().getAll() if "key" in name]
    assert [name for name in set_keys if name.startswith("spark.hadoop.fs.s3a")] == []
    config = altered(shop.config, archive=s3.lake().settings)
    assert not ArchiveLog(config, "order").exists()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    path = table_path(config, "order")
    with pytest.raises(ArchiveUnreachable, match="SignatureDoesNotMatch") as raised:
        ArchiveLog(config, "order").version()
    assert "hush" not in f"{raised.value} {raised.value.__cause__} {path!r} {config!r}"
