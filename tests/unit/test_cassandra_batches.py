"""What the publisher of Cassandra puts into one batch, without servers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4

import pytest

from clean_cases import CONFIG
from everstate.cassandra import Database
from everstate.changes import ChangeCodec
from everstate.errors import LogTruncated, RecordRefused
from everstate.log.publisher import PublishedProgress, check_progress
from everstate.log.record import OutRecord
from everstate.sources.stores.cassandra import publisher as module
from everstate.sources.stores.cassandra.publisher import Publisher
from everstate.sources.stores.cassandra.unpublished import Announcement
from everstate.testing.store_contract import ORDER
from kit.settings import altered

PROVENANCE = '{"api_version":"v1","service_name":"shop","identifier":"x"}'


def row_of(key: str, version: int, head: int, note: str) -> Any:
    state = f'{{"order_id":"{key}","note":"{note}"}}'
    return SimpleNamespace(
        head_version=head,
        version=version,
        change_id=UUID(int=version),
        kind="created" if version == 1 else "updated",
        schema_version=1,
        occurred_at="2026-01-01T00:00:00+00:00",
        recorded_at="2026-01-01T00:00:00+00:00",
        provenance=PROVENANCE,
        event=None,
        after=state,
        before=None,
        chained=True,
    )


class Tables:
    """The tables in memory; counts the rows that were read."""

    keyspace = "k"

    def __init__(self, versions: Mapping[str, int], note: str = "") -> None:
        self.rows = {
            key: [row_of(key, number, head, note) for number in range(1, head + 1)]
            for key, head in versions.items()
        }
        self.published: dict[tuple[str, str], int] = {}
        self.read = 0

    def execute_many(self, statement: str, each: Iterable[Sequence[Any]]) -> list[list[Any]]:
        return [self._answer(statement, values) for values in each]

    def stream(self, statement: str, values: Sequence[Any], rows: int) -> Iterator[Any]:
        for row in self._answer(statement, values, 0):
            self.read += 1
            yield row

    def _answer(self, statement: str, values: Sequence[Any], counted: int = 1) -> list[Any]:
        if statement.startswith("INSERT"):
            entity, key, version, _ = values
            self.published[entity, key] = max(version, self.published.get((entity, key), 0))
            return []
        if ".published " in statement:
            version = self.published.get((values[0], values[1]))
            return [] if version is None else [SimpleNamespace(version=version)]
        key, first, limit = values
        found = self.rows[key][first - 1 : first - 1 + limit]
        self.read += counted * len(found)
        return found


class Log:
    """Takes batches, and refuses those that have a record of this key."""

    def __init__(self, refuses: str | None = None) -> None:
        self.refuses = refuses
        self.batches: list[list[OutRecord]] = []

    def publish(self, number: int, records: list[OutRecord], note: bytes, **_: Any) -> bool:
        if any(record.key == (self.refuses or "").encode() for record in records):
            raise RecordRefused(records[0].topic, (records[0].key or b"").decode(), "too large")
        self.batches.append(records)
        return True

    def sent(self) -> list[tuple[str, int]]:
        """Key and version of every change, in the order of the log."""
        changes = [r for batch in self.batches for r in batch if ".changes." in r.topic]
        return [((r.key or b"").decode(), version_of(r.value or b"")) for r in changes]


def version_of(value: bytes) -> int:
    return ChangeCodec(ORDER).decode(value).version


def publisher_of(tables: Tables, log: Log, announced: list[Announcement], **more: Any) -> Publisher:
    config = altered(CONFIG, cassandra=more)
    made = Publisher(config, [ORDER], database=cast(Database, tables))
    made._is_open = True
    made._publisher = cast(Any, log)
    made._unpublished = cast(
        Any, SimpleNamespace(open=lambda: list(announced), settle=announced.remove)
    )
    return made


def announcement(key: str, version: int, again_from: int | None = None) -> Announcement:
    return Announcement(1, uuid4(), ORDER.name, key, version, again_from, 0.0, 0.0)


def steps(publisher: Publisher, most: int = 500) -> int:
    for count in range(most):
        if not publisher.step():
            return count
    raise AssertionError(f"not at the end after {most} batches")


def test_a_key_with_very_many_changes_goes_out_in_parts_of_a_bounded_size() -> None:
    tables, log = Tables({"a": 5_000, "b": 1}), Log()
    announced = [announcement("a", 5_000), announcement("b", 1)]
    publisher = publisher_of(tables, log, announced, batch_changes=400)
    steps(publisher)
    assert log.sent().count(("b", 1)) == 1
    assert [n for key, n in log.sent() if key == "a"] == list(range(1, 5_001))
    assert max(len(batch) for batch in log.batches) <= 400 + 3
    assert tables.read < 5_000 + 20 * len(log.batches)
    assert announced == []


def test_a_key_with_large_changes_goes_out_in_parts_of_a_bounded_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_BATCH_BYTES_MAX", 10_000)
    tables, log = Tables({"a": 60}, note="x" * 3_000), Log()
    steps(publisher_of(tables, log, [announcement("a", 60)]))
    assert [n for _, n in log.sent()] == list(range(1, 61))
    assert max(len(batch) for batch in log.batches) <= 6


def test_changes_that_are_sent_again_come_to_an_end_too() -> None:
    tables, log = Tables({"a": 1_000}), Log()
    announced = [announcement("a", 1_000)]
    publisher = publisher_of(tables, log, announced, batch_changes=100)
    steps(publisher)
    announced.append(announcement("a", 1_000, again_from=1))
    log.batches.clear()
    steps(publisher)
    assert [n for _, n in log.sent()] == list(range(1, 1_001))
    assert tables.published[ORDER.name, "a"] == 1_000
    assert announced == []


def test_an_event_goes_to_the_log_with_all_digits() -> None:
    tables, log, data = Tables({"a": 1}), Log(), '{"amount":12345678901234567890.12}'
    tables.rows["a"][0].event = f'{{"type":"Paid","data":{data}}}'
    steps(publisher_of(tables, log, [announcement("a", 1)]))
    (batch,) = log.batches
    assert all(f'"data":{data}'.encode() in (record.value or b"") for record in batch)


def test_what_the_log_refuses_blocks_its_own_key_only() -> None:
    """Kafka's error names the first record of the batch, which is another one."""
    tables, log = Tables(dict.fromkeys("abcdefgh", 2)), Log(refuses="f")
    for row in tables.rows["f"]:
        row.after = row.after.replace('"note":""', f'"note":"{"x" * 500}"')
    announced = [announcement(key, 2) for key in tables.rows]
    publisher = publisher_of(tables, log, announced)
    for _ in range(4):
        publisher.step()
    assert sorted({key for key, _ in log.sent()}) == list("abcdegh")
    assert list(publisher._blocked) == [(ORDER.name, "f")]


@pytest.mark.parametrize(
    ("in_log", "marked", "begun", "lost"),
    [
        (None, 0, 0, False),
        (7, 7, 0, False),
        (8, 7, 0, False),
        (40, 50, 0, True),
        (None, 50, 0, True),
        (None, 50, 50, False),
        (40, 51, 50, True),
    ],
)
def test_C8_a_log_without_the_batches_that_were_published_is_noticed(
    in_log: int | None, marked: int, begun: int, lost: bool
) -> None:
    progress = None if in_log is None else PublishedProgress(in_log, b"")
    if not lost:
        check_progress("relay main", progress, marked, begun)
        return
    with pytest.raises(LogTruncated, match="lost its newest records"):
        check_progress("relay main", progress, marked, begun)
