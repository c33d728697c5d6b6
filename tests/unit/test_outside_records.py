"""Records that others write to the topics of a project: each is read, or refused with a reason."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import outside_app as project
from clean_cases import CONFIG, Numbered
from everstate.changes import ChangeCodec
from everstate.errors import InvalidChange
from everstate.log.dead_letters import _letter
from everstate.log.record import Record
from everstate.log.topics import TopicNames
from everstate.sources.cdc.composing import dead_letter
from everstate.sources.cdc.reading import RawReader
from everstate.sources.cdc.restoring import Restoring
from everstate.sources.commands.parked import _parked
from everstate.sources.commands.restoring import _answer_of, _state_rows
from everstate.sources.commands.seen import _rows_of
from outside_doors import KafkaDoor

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 20))]
NAMES = TopicNames(CONFIG.log.prefix)
NOW_S = 1_800_000_000.0


def records(seed: int, count: int) -> Iterator[Record]:
    door = KafkaDoor(CONFIG, seed)
    for offset in range(count):
        topic, key, value, headers = door.record()
        yield Record(topic, 0, offset, 1, key, value, tuple(headers))


def is_read(codec: ChangeCodec, record: Record) -> bool:
    try:
        codec.decode(record.value or b"")
    except InvalidChange:
        return False
    return True


@pytest.mark.parametrize("seed", SEEDS)
def test_no_reader_of_our_own_topics_is_stopped(seed: int) -> None:
    logging.disable(logging.CRITICAL)
    topics: Any = SimpleNamespace(names=NAMES)
    states = Restoring(CONFIG, project.app.captures["shop"], topics)._rows_of
    codecs = [ChangeCodec(each) for each in project.app.entities.values()]
    seen = Counter[str]()
    try:
        for record in records(seed, 1_000):
            for read in (_state_rows, _answer_of, _parked, _rows_of):
                read(record)
            _letter(None, record)
            for codec in codecs:
                seen["read" if is_read(codec, record) else "refused"] += 1
            states(Record(NAMES.state("item"), 0, 7, 1, record.key, record.value, ()))
    finally:
        logging.disable(logging.NOTSET)
    assert seen.keys() == {"read", "refused"}


@pytest.mark.parametrize("seed", SEEDS)
def test_no_capture_is_stopped(seed: int) -> None:
    capture, raw = project.app.captures["shop"], NAMES.raw("shop", "item")
    reader = RawReader(capture, {"item": project.app.entities["item"]})
    rig = Numbered(reader, CONFIG, restarts=False)
    seen = Counter[str]()
    for record in records(seed, 1_500):
        if record.topic != raw:
            continue
        headers = dict(record.headers)
        given = [headers.get(name) for name in reader.header_names]
        rows = rig.read(("item", record.key, record.value), headers=given)
        batch = rig.run(rows, NOW_S)
        seen["changes"] += batch.changes
        for refused in batch.refused:
            assert refused.reason.strip()
            letter = dead_letter(CONFIG, refused, record.key, record.value)
            assert len(letter.value or b"") < 2 * CONFIG.log.message_bytes_max
            seen["refused"] += 1
    assert min(seen["changes"], seen["refused"]) > 0
