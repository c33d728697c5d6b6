"""C5: a transaction that is left open is told, and no longer once it has ended."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from confluent_kafka import Producer

from everstate.log.positions import Offsets
from everstate.log.topics import Topics
from everstate.pipeline.hanging import HangingTransactions, finding_of
from kit.settings import altered
from kit.waiting import until


def test_c5_an_open_transaction_is_told_until_it_ends(
    stack: Any,
    topic_prefix: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The command line, which other tests of this process run, keeps our records to itself.
    monkeypatch.setattr(logging.getLogger("everstate"), "propagate", True)
    config = altered(stack.config, log={"prefix": topic_prefix})
    with Topics(config) as topics:
        topics.ensure(["order"])
        topic = topics.names.changes("order")
    writer = Producer(
        {"bootstrap.servers": stack.bootstrap_servers, "transactional.id": topic_prefix}
    )
    writer.init_transactions()
    writer.begin_transaction()
    writer.produce(topic, b"{}", b"o1", partition=2)
    writer.flush()
    with Offsets(config) as offsets:
        watch = HangingTransactions(offsets, [topic], alarm_s=30)
        with caplog.at_level(logging.WARNING):
            assert watch.look(1000.0) == {}
            assert watch.look(1029.0) == {}
            assert not caplog.records
            assert watch.look(1031.0) == {(topic, 2): 31.0}
            assert watch.look(1036.0) == {(topic, 2): 36.0}
            found = finding_of(watch.look(1037.0))
            assert found is not None
            assert f"{topic}[2]" in found.why
            assert len(caplog.records) == 1, "told once a minute"
            assert f"{topic}[2] cannot be read further for 31 s" in caplog.text
        writer.commit_transaction()
        # The broker writes the markers after it has answered.
        until(lambda: not watch.look(1041.0), 10, what=lambda: "still held back after the commit")
    assert finding_of({}) is None
