"""The loop of transactions: what its members are told and what becomes of their work."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from everstate.config import Config
from everstate.errors import Fenced, Unavailable
from everstate.log.attempt import Attempt, Incoming
from everstate.log.loop import LogPartition, Membership, Send, TransactionalLoop
from everstate.log.producer import Producer
from everstate.log.topics import Topics
from everstate.testing.log_checker import read_topic

pytestmark = pytest.mark.settings(database=False)


class Copy:
    """Writes each record again; ``trouble`` makes a batch fail after it was sent."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.trouble: list[Exception] = []
        self.opened: list[tuple[LogPartition, int | None]] = []
        self.settled = 0
        self.refused: list[bytes] = []

    def open(self, place: LogPartition, committed: int | None, alive: Callable[[], None]) -> int:
        alive()
        self.opened.append((place, committed))
        return committed or 0

    def shut(self) -> None:
        return

    def handle(self, batch: Sequence[Incoming], send: Send, attempt: Attempt) -> None:
        for message in batch:
            value, reason = message.value(), attempt.refused(message)
            if reason is not None:
                assert "larger than Kafka accepts" in reason
                self.refused.append((message.value() or b"")[:2])
                value = b"refused"
            send(self.target, message.key(), value)
        if self.trouble:
            raise self.trouble.pop()

    def settle(self) -> None:
        self.settled += 1

    def is_due(self) -> bool:
        return False


@pytest.fixture
def topics(config: Config) -> Iterator[tuple[str, str]]:
    names = f"{config.log.prefix}.in", f"{config.log.prefix}.out"
    with Topics(config) as made:
        for name in names:
            made.create(name, 2, {})
        yield names
        made.delete(names)


def loop(config: Config, topics: tuple[str, str]) -> tuple[TransactionalLoop, Copy]:
    work = Copy(topics[1])
    member = Membership(group=f"{config.log.prefix}.copy", instance="one", session_timeout_s=6)
    made = TransactionalLoop(
        config, work, [topics[0]], member, batch_records_max=10, batch_wait_s=0.01
    )
    return made, work


def fill(config: Config, topic: str, values: Sequence[bytes]) -> None:
    with Producer(config) as producer:
        for value in values:
            producer.send_raw(topic, value, value)


def run_until(made: TransactionalLoop, records: int) -> None:
    while made.records < records:
        made.step(0.2)


def copied(config: Config, topics: tuple[str, str]) -> list[bytes]:
    return sorted(record.value or b"" for record in read_topic(config, topics[1]))


def test_a_batch_that_fails_leaves_nothing_and_is_done_again(
    config: Config, topics: tuple[str, str]
) -> None:
    values = [b"%d" % number for number in range(10, 40)]
    fill(config, topics[0], values)
    made, work = loop(config, topics)
    with made:
        run_until(made, 5)
        work.trouble.append(Unavailable("a server of the work's own is away"))
        with pytest.raises(Unavailable):
            run_until(made, 30)
        made.close()
        run_until(made, 30)
    assert copied(config, topics) == values
    assert work.settled == made.batches
    # What was begun is remembered even where nothing was read: the group has an offset.
    assert {committed for _, committed in work.opened[:2]} == {None}
    assert None not in {committed for _, committed in work.opened[2:]}


def test_a_record_that_the_broker_refuses_is_found_and_refused_alone(
    config: Config, topics: tuple[str, str]
) -> None:
    """The topic's own limit is lower than that of the producers."""
    with Topics(config) as made:
        made.set_config(topics[1], {"max.message.bytes": "20000"})
    values = [b"%d" % number for number in range(10, 30)]
    large = {b"17": random.Random(1).randbytes(60_000)}
    with Producer(config) as producer:
        for value in values:
            producer.send_raw(topics[0], value, value + large.get(value, b""))
    runner, work = loop(config, topics)
    with runner:
        while runner.records < len(values):
            try:
                runner.step(0.2)
            except Unavailable:
                runner.close()
    assert work.refused == [b"17"]
    assert copied(config, topics) == sorted({*values, b"refused"} - {b"17"})


def test_C3_a_second_process_of_the_same_name_ends_the_first(
    config: Config, topics: tuple[str, str]
) -> None:
    first, _ = loop(config, topics)
    second, _ = loop(config, topics)
    stop = threading.Event()
    fill(config, topics[0], [b"a", b"b"])
    with first, second, ThreadPoolExecutor(2) as pool:
        run_until(first, 2)
        ending = pool.submit(first.run, stop)
        taking_over = pool.submit(second.run, stop)
        with pytest.raises(Fenced, match="took over its partitions"):
            ending.result(60)
        fill(config, topics[0], [b"c"])
        while second.records < 1:
            assert not taking_over.done()
        stop.set()
        taking_over.result(30)
    assert copied(config, topics) == [b"a", b"b", b"c"]
