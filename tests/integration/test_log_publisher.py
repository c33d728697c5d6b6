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

from everstate.config import Config
from everstate.errors import Fenced, LogError, RecordRefused, Unavailable
from everstate.log.consumer import Consumer
from everstate.log.positions import Offsets
from everstate.log.producer import Producer
from everstate.log.publisher import OncePublisher, PublishedProgress
from everstate.log.record import OutRecord
from everstate.log.topics import Topics

pytestmark = pytest.mark.settings(log={"partitions": 2}, database=False)

RECORDS = 50
# The table of the child is a file: a line is added when the batch is flagged published.
CHILD = f"""
import os, signal, sys, time
from pathlib import Path
from everstate.config import load
from everstate.log.producer import Producer
from everstate.log.publisher import OncePublisher
from everstate.log.record import OutRecord

servers, prefix, topic, table, point, batches = sys.argv[1:]
config = load(".", log={{"bootstrap_servers": servers, "prefix": prefix}})
done = len(Path(table).read_text().split())

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def produce_and_die(self, timeout_s=60):
    self.flush()
    die()

def commit_and_die(self, timeout_s=60, commit=Producer.commit):
    commit(self, timeout_s)
    die()

with OncePublisher(config, "relay") as publisher:
    publisher.open()
    print("open", flush=True)
    for batch in range(done + 1, int(batches) + 1):
        if batch == done + 3:
            if point == "before begin":
                Producer.begin = die
            elif point == "after produce":
                Producer.commit = produce_and_die
            elif point == "after commit":
                Producer.commit = commit_and_die
        records = [
            OutRecord(topic, b"k%d" % (n % 7), b"%d-%d" % (batch, n)) for n in range({RECORDS})
        ]
        publisher.publish(batch, records, b"note %d" % batch)
        with open(table, "a") as file:
            file.write(str(batch) + "\\n")
"""


@pytest.fixture
def topic(config: Config) -> Iterator[str]:
    with Topics(config) as topics:
        topics.ensure(["order"])
        names = topics.names
        yield names.changes("order")
        entity_topics = [names.changes("order"), names.state("order"), names.dead("order")]
        topics.delete([*entity_topics, names.dead_unknown, names.progress])


def settle(config: Config, topic: str) -> None:
    """Wait until no transaction is open on the topic."""
    deadline = time.monotonic() + 20
    with Offsets(config) as offsets:
        while offsets.stable_ends([topic]) != offsets.high_watermarks([topic]):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def values(config: Config, topic: str) -> list[bytes]:
    settle(config, topic)
    with Consumer(config) as consumer:
        return [record.value or b"" for record in consumer.read_topic(topic)]


def batch_of(topic: str, *texts: bytes) -> list[OutRecord]:
    return [OutRecord(topic, b"k", text) for text in texts]


def test_batches_and_progress_survive_the_publisher(config: Config, topic: str) -> None:
    with OncePublisher(config, "relay") as publisher:
        assert publisher.open() is None
        assert publisher.publish(1, iter(batch_of(topic, b"a", b"b")), b"rows 1-2") is True
        assert publisher.publish(2, [], b"nothing") is True
        assert publisher.publish(5, batch_of(topic, b"c"), b"\xff\x00") is True
    with OncePublisher(config, "relay") as publisher:
        assert publisher.open() == PublishedProgress(5, b"\xff\x00")
    with OncePublisher(config, "other") as publisher:
        assert publisher.open() is None
    assert sorted(values(config, topic)) == [b"a", b"b", b"c"]


def test_a_batch_that_the_log_has_is_not_sent_again(config: Config, topic: str) -> None:
    with OncePublisher(config, "relay") as publisher:
        publisher.publish(1, batch_of(topic, b"a"), b"one")
    with OncePublisher(config, "relay") as publisher:
        assert publisher.publish(1, batch_of(topic, b"a"), b"one") is False
        with pytest.raises(
            Fenced, match="the log already has batch 1, which another process wrote"
        ):
            publisher.publish(1, batch_of(topic, b"z"), b"another batch of that number")
        with pytest.raises(Fenced, match="restored from a backup"):
            publisher.publish(0, batch_of(topic, b"z"), b"older")
    assert values(config, topic) == [b"a"]


def test_progress_is_found_behind_many_batches_of_others(
    config: Config, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstate.log.publisher._WINDOW_RECORDS", 2)
    with OncePublisher(config, "quiet") as quiet:
        quiet.publish(7, [], b"seven")
    with OncePublisher(config, "busy") as busy:
        for batch in range(1, 21):
            busy.publish(batch, [], b"")
    with OncePublisher(config, "quiet") as quiet:
        assert quiet.open() == PublishedProgress(7, b"seven")


@pytest.mark.parametrize("point", ["before begin", "after produce", "after commit"])
def test_c3_a_publisher_killed_at_any_point_neither_loses_nor_doubles(
    config: Config, topic: str, tmp_path: Path, point: str
) -> None:
    table = tmp_path / "table"
    table.touch()
    assert finish(run_child(config, topic, table, point, batches=9)) == -signal.SIGKILL
    assert table.read_text().split() == ["1", "2"]
    assert finish(run_child(config, topic, table, "never", batches=9)) == 0
    assert_each_once(config, topic, range(1, 10))


@pytest.mark.slow
def test_c3_a_publisher_killed_at_random_moments_neither_loses_nor_doubles(
    config: Config, topic: str, tmp_path: Path
) -> None:
    table = tmp_path / "table"
    table.touch()
    moments = random.Random(3)
    for _ in range(4):
        child = run_child(config, topic, table, "never", batches=10_000)
        assert child.stdout is not None
        assert child.stdout.readline() == b"open\n"
        time.sleep(moments.uniform(0.02, 0.6))
        child.kill()
        child.wait(30)
        child.stdout.close()
    done = len(table.read_text().split())
    assert finish(run_child(config, topic, table, "never", batches=done + 3)) == 0
    assert_each_once(config, topic, range(1, done + 4))


def run_child(
    config: Config, topic: str, table: Path, point: str, *, batches: int
) -> subprocess.Popen[bytes]:
    arguments = [config.bootstrap_servers, config.log.prefix, topic, str(table), point]
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments, str(batches)],
        cwd=table.parent,
        stdout=subprocess.PIPE,
    )


def finish(child: subprocess.Popen[bytes]) -> int:
    child.communicate(timeout=60)
    return child.returncode


def assert_each_once(config: Config, topic: str, batches: range) -> None:
    wanted = sorted(b"%d-%d" % (batch, n) for batch in batches for n in range(RECORDS))
    assert sorted(values(config, topic)) == wanted


def test_c3_an_older_instance_is_fenced_for_good(config: Config, topic: str) -> None:
    with OncePublisher(config, "relay") as old, OncePublisher(config, "relay") as new:
        old.publish(1, batch_of(topic, b"old 1"), b"1")
        assert new.open() == PublishedProgress(1, b"1")
        for _ in range(2):
            with pytest.raises(Fenced, match="another process took over"):
                old.publish(2, batch_of(topic, b"old 2"), b"2")
        with pytest.raises(Fenced):
            old.open()
        new.publish(2, batch_of(topic, b"new 2"), b"2")
    assert values(config, topic) == [b"old 1", b"new 2"]


def test_c3_an_open_transaction_of_the_older_instance_is_aborted(
    config: Config, topic: str
) -> None:
    old = Producer(config, transactional_id=f"{config.log.prefix}.relay")
    old.init()
    old.begin()
    old.send_many(batch_of(topic, b"torn"))
    old.flush()
    with OncePublisher(config, "relay") as publisher:
        assert publisher.open() is None
        publisher.publish(1, batch_of(topic, b"whole"), b"")
    assert values(config, topic) == [b"whole"]
    with pytest.raises(Fenced):
        old.commit()
    old.discard()


def test_c3_progress_hidden_by_another_open_transaction_is_waited_for(
    config: Config, topic: str
) -> None:
    progress = Topics(config).names.progress
    hanging = Producer(config, transactional_id=f"{config.log.prefix}.hanging")
    hanging.init()
    hanging.begin()
    hanging.send(OutRecord(progress, b"hanging", b"", [("batch", b"1")]))
    hanging.flush()
    with OncePublisher(config, "relay") as publisher:
        # Its progress is committed at once, but no reader sees it yet: behind the open one.
        with pytest.raises(Unavailable, match="because of an open transaction"):
            publisher.open(timeout_s=2)
        closing = threading.Timer(1, hanging.abort)
        closing.start()
        assert publisher.open() is None
        closing.join()
    hanging.discard()


def test_a_refused_record_takes_its_whole_batch_back_and_holds_nobody_up(
    config: Config, topic: str
) -> None:
    with OncePublisher(config, "relay") as publisher:
        publisher.publish(1, batch_of(topic, b"a"), b"1")
        big = OutRecord(topic, b"big", b"x" * 3_145_728)
        with pytest.raises(RecordRefused, match="'big'"):
            publisher.publish(2, [*batch_of(topic, b"torn"), big], b"2")
        settle(config, topic)
        assert publisher.publish(2, batch_of(topic, b"b"), b"2 without it") is True
    assert values(config, topic) == [b"a", b"b"]


def test_c2_changes_state_and_progress_are_visible_together_or_not_at_all(
    config: Config, topic: str
) -> None:
    state = topic.replace(".changes.", ".state.")
    whole = [OutRecord(topic, b"k", b"1"), OutRecord(state, b"k", b"1")]
    torn = [OutRecord(topic, b"k", b"2"), OutRecord(state, b"k", b"x" * 3_145_728)]
    with OncePublisher(config, "relay") as publisher:
        publisher.publish(1, whole, b"1")
        with pytest.raises(RecordRefused):
            publisher.publish(2, torn, b"2")
    assert values(config, topic) == values(config, state) == [b"1"]
    with OncePublisher(config, "relay") as publisher:
        assert publisher.open() == PublishedProgress(1, b"1")


def test_a_batch_that_fails_in_the_making_is_taken_back(config: Config, topic: str) -> None:
    def torn() -> Iterator[OutRecord]:
        yield OutRecord(topic, b"k", b"torn")
        raise ValueError("the row cannot be read")

    class Lazy(list[OutRecord]):
        def __iter__(self) -> Iterator[OutRecord]:
            return torn()

    with OncePublisher(config, "relay") as publisher:
        with pytest.raises(ValueError, match="cannot be read"):
            publisher.publish(1, Lazy(), b"1")
        settle(config, topic)
        publisher.publish(1, batch_of(topic, b"whole"), b"1")
    assert values(config, topic) == [b"whole"]


def test_a_missing_progress_topic_is_told(config: Config) -> None:
    with OncePublisher(config, "relay") as publisher, pytest.raises(LogError, match="progress"):
        publisher.open()


def test_a_commit_with_unknown_outcome_is_asked_for_and_not_sent_again(
    config: Config, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = []
    commit = Producer.commit

    def commit_unheard(self: Producer, timeout_s: float = 60.0) -> None:
        commits.append(1)
        commit(self, timeout_s)
        if len(commits) == 1:
            raise Unavailable("the answer was lost.")

    with OncePublisher(config, "relay") as publisher:
        monkeypatch.setattr(Producer, "commit", commit_unheard)
        assert publisher.publish(1, batch_of(topic, b"a"), b"1") is True
        assert publisher.publish(2, batch_of(topic, b"b"), b"2") is True
    assert len(commits) == 2
    assert values(config, topic) == [b"a", b"b"]


def test_a_broker_away_for_seconds_only_delays_a_batch(
    stack: Any, config: Config, topic: str
) -> None:
    broker = stack.servers.pid("kafka")
    with OncePublisher(config, "relay") as publisher:
        publisher.publish(1, batch_of(topic, b"a"), b"1")
        os.kill(broker, signal.SIGSTOP)
        resume = threading.Timer(6, os.kill, (broker, signal.SIGCONT))
        resume.start()
        try:
            with pytest.raises(Unavailable, match="is sent again"):
                publisher.publish(2, batch_of(topic, b"b"), b"2", timeout_s=1)
            assert publisher.publish(2, batch_of(topic, b"b"), b"2") is True
        finally:
            resume.join()
            os.kill(broker, signal.SIGCONT)
    assert values(config, topic) == [b"a", b"b"]


class KilledHalfway(list[OutRecord]):
    """Records of a batch: the broker is killed when half of them have been sent, once."""

    def __init__(self, records: list[OutRecord], kill: Callable[[], None]) -> None:
        super().__init__(records)
        self._kill: Callable[[], None] | None = kill

    def __iter__(self) -> Iterator[OutRecord]:
        for number, record in enumerate(super().__iter__()):
            if number == len(self) // 2 and self._kill is not None:
                kill, self._kill = self._kill, None
                kill()
            yield record


@pytest.mark.full
@pytest.mark.slow
def test_c3_a_broker_killed_within_a_batch_neither_loses_nor_doubles_it(
    stack: Any, config: Config, topic: str
) -> None:
    """The broker comes back while the batch is asked for, and while it is sent again."""
    restarts: list[threading.Timer] = []

    def kill() -> None:
        stack.servers.kill("kafka")
        restarts.append(threading.Timer(1.5, stack.servers.restart, ("kafka",)))
        restarts[-1].start()

    with OncePublisher(config, "relay") as publisher:
        for batch in range(1, 31):
            records = [OutRecord(topic, b"k", b"%d-%d" % (batch, n)) for n in range(RECORDS)]
            if batch in (10, 20):
                records = KilledHalfway(records, kill)
            publisher.publish(batch, records, b"%d" % batch)
    for restart in restarts:
        restart.join()
    assert len(restarts) == 2
    assert_each_once(config, topic, range(1, 31))
