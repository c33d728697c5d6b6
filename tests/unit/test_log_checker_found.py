"""What the log checker finds wrong in records, without servers."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from everstate.config import Config, load
from everstate.log.record import Record
from everstate.testing import log_checker
from everstate.testing.log_checker import Committed, LogReport, check_changes, check_log

ENTITY = "order"


def committed(version: int, state: str, *, transaction: str | None = None) -> Committed:
    kind = "created" if version == 1 else "updated"
    before = None if version == 1 else state
    return Committed(f"id-{version}", ENTITY, "a", version, kind, before, state, transaction)


def message(row: Committed, *, block: dict[str, Any] | None = None) -> bytes:
    provenance = {} if block is None else {"transaction": block}
    before, after = row.before or "null", row.after or "null"
    return (
        f'{{"id":"{row.id}","entity":"{row.entity}","key":"{row.key}","version":{row.version},'
        f'"kind":"{row.kind}","provenance":{json.dumps(provenance)},'
        f'"originalEntityState":{before},"currentEntityState":{after}}}'
    ).encode()


def record(offset: int, value: bytes | None, *, partition: int = 0) -> Record:
    return Record("topic", partition, offset, 0, b"a", value, ())


class Log:
    """The records that the checker reads, in place of Kafka's."""

    def __init__(self) -> None:
        self.changes: list[Record] = []

    def read(self, _: Config, topic: str) -> list[Record]:
        if ".changes" in topic:
            return self.changes
        return [record(0, each.value) for each in self.changes if each.value][-1:]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log()
    monkeypatch.setattr(log_checker, "read_topic", log.read)
    return log


def problems(folder: Path, rows: list[Committed]) -> list[str]:
    report, blocks = LogReport(), defaultdict[str, list[tuple[int, int]]](list)
    check_changes(load(folder), ENTITY, rows, report, blocks)
    return report.problems


@pytest.mark.parametrize(
    ("state", "sent"),
    [
        ('{"n":1}', '{"n":true}'),
        ('{"n":1}', '{"n":1.0}'),
        ('{"n":9007199254740992.5}', '{"n":9007199254740993.0}'),
        ('{"n":0.123456789012345678901234567}', '{"n":0.12345678901234568}'),
    ],
)
def test_a_value_that_is_another_one_is_found(
    log: Log, tmp_path: Path, state: str, sent: str
) -> None:
    row = committed(1, state)
    log.changes = [record(0, message(row))]
    assert problems(tmp_path, [row]) == []
    log.changes = [record(0, message(row._replace(after=sent)))]
    (problem,) = problems(tmp_path, [row])
    assert problem.startswith("order 'a' version 1: current is ")


def test_versions_of_a_key_in_two_partitions_are_found(log: Log, tmp_path: Path) -> None:
    rows = [committed(1, '{"n":1}'), committed(2, '{"n":1}')]
    log.changes = [record(0, message(rows[0])), record(0, message(rows[1]), partition=1)]
    assert problems(tmp_path, rows) == ["order 'a' version 2: in partition 1, others in 0"]


def test_a_record_that_is_no_change_is_found_and_the_others_are_checked(
    log: Log, tmp_path: Path
) -> None:
    row = committed(1, "{}")
    log.changes = [record(0, None), record(1, b"{"), record(2, message(row))]
    assert problems(tmp_path, [row]) == ["order 0@0: not a change", "order 0@1: not a change"]


def test_a_transaction_with_other_entity_types_is_counted_with_them(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = committed(1, "{}", transaction="pg:7")
    other = mine._replace(id="id-9", entity="payment")

    class Connected:
        def __enter__(self) -> Connected:
            return self

        def __exit__(self, *_: object) -> None: ...

        def execute(self, _: str) -> Connected:
            return self

        def fetchall(self) -> list[tuple[Any, ...]]:
            return [(*each[:8], "{}", None, None) for each in (other, mine)]

    monkeypatch.setattr("everstate.testing.log_checker.connect", lambda _: Connected())
    config = load(tmp_path, store={"dsn": "postgresql://localhost/none"})
    for index, count, is_right in ((2, 2, True), (1, 2, False), (2, 1, False)):
        block = {"id": "pg:7", "index": index, "count": count}
        log.changes = [record(0, message(mine, block=block))]
        assert (check_log(config, [ENTITY]).problems == []) is is_right
