"""A call of Kafka's driver that never comes back is left behind, and the caller is told."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError

from everstate.config import load
from everstate.errors import Fenced, Unavailable
from everstate.log import producer as module
from everstate.log.producer import Producer


class Stuck:
    """A driver whose call hangs until the test ends."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.calls: list[str] = []

    def send_offsets_to_transaction(self, *_: Any) -> None:
        self.calls.append("send_offsets")
        self.ended.wait(60)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.calls.append(name)


def test_a_call_that_hangs_is_unavailable_and_the_producer_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_GRACE_S", 0.1)
    producer, driver = (
        Producer(load(tmp_path, log={"bootstrap_servers": "127.0.0.1:1"}), transactional_id="t"),
        Stuck(),
    )
    monkeypatch.setattr(producer, "_client", driver)
    try:
        with pytest.raises(Unavailable, match="does not return"):
            producer.send_offsets({("t", 0): 1}, None, 0.1)
        with pytest.raises(Unavailable, match="cannot be used"):
            producer.abort()
        producer.discard()
        assert driver.calls == ["send_offsets"], "nothing else is asked of a driver that hangs"
    finally:
        driver.ended.set()


@pytest.mark.parametrize(
    ("open_s", "said"),
    [
        (1.0, "committing: another process took over this role. Stop this one"),
        (
            12.5,
            "committing: the transaction was open for 12.5 s, and the broker ends one after 10 s",
        ),
    ],
)
def test_a_fenced_producer_says_whether_its_own_transaction_took_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_s: float, said: str
) -> None:
    config = load(tmp_path, log={"bootstrap_servers": "127.0.0.1:1"})
    producer = Producer(config, transactional_id="t", transaction_timeout_ms=10_000)
    monkeypatch.setattr(producer, "_client", Stuck())
    producer.begin()
    assert producer._begun_at is not None
    producer._begun_at -= open_s
    error = producer._transaction_error(KafkaError(KafkaError._FENCED), "committing")
    assert isinstance(error, Fenced)
    assert str(error).startswith(said)
