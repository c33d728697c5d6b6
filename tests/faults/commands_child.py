"""A handler of commands in a process of its own, to be killed; or one with a planted defect."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from confluent_kafka import TopicPartition

import command_cases as bank
from everstate.config import load
from everstate.log.attempt import Attempt, Incoming
from everstate.log.loop import Send
from everstate.log.producer import Producer
from everstate.sources.commands import CommandHandler
from everstate.sources.commands.store import state_row
from everstate.sources.commands.worker import CommandWork

_BATCHES_BEFORE_DEATH = 8


def die() -> None:
    """Gone, as by kill -9."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(point: str, handler: CommandHandler) -> None:
    """Die around the commit of some batch with changes: all is sent, or all is committed."""
    commit, batches = Producer.commit, 0

    def deadly(self: Producer, timeout_s: float = 60.0) -> None:
        nonlocal batches
        batches += any(each.open for each in handler.work._partitions.values())
        if point == "before commit" and batches > _BATCHES_BEFORE_DEATH:
            self.flush()
            die()
        commit(self, timeout_s)
        if point == "after commit" and batches > _BATCHES_BEFORE_DEATH:
            die()

    Producer.commit = deadly  # type: ignore[method-assign]


def plant(defect: str, handler: CommandHandler) -> None:
    """Break what the checker must see."""
    if defect == "offsets outside":

        def outside(
            _: Producer, offsets: Mapping[tuple[str, int], int], _group: Any, _s: float = 60.0
        ) -> None:
            places = [TopicPartition(topic, part, at) for (topic, part), at in offsets.items()]
            handler._consumer.commit(offsets=places, asynchronous=False)

        Producer.send_offsets = outside  # type: ignore[method-assign,assignment]
    elif defect == "state ahead":
        handle = CommandWork.handle

        def ahead(
            self: CommandWork, batch: Sequence[Incoming], send: Send, attempt: Attempt
        ) -> None:
            handle(self, batch, send, attempt)
            for partition in self._partitions.values():
                for key, held in partition.open.items():
                    partition.batch.states[key] = state_row(
                        held.version, held.text, held.recorded_at
                    )
                # Answers of an older time would be forgotten, and a repeated command decided anew.
                partition.store.write(partition.batch, int(time.time() * 1000))
                # Without this a kill takes it back: the copy has no log of its own.
                partition.store.copy._db.flush()

        CommandWork.handle = ahead  # type: ignore[method-assign]


def main() -> None:
    """Run until killed."""
    servers, prefix, folder, point, defect = sys.argv[1:]
    config = load(
        folder,
        log={"bootstrap_servers": servers, "prefix": prefix, "partitions": 3},
        commands={"batch_wait_ms": 5},
    )
    with CommandHandler(config, bank.app) as handler:
        if point:
            die_at(point, handler)
        plant(defect, handler)
        handler.run(threading.Event())


if __name__ == "__main__":
    main()
