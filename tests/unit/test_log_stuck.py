"""A call of Kafka's driver that never comes back is left behind, and the caller is told."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from everstate.config import load
from everstate.errors import Unavailable
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
