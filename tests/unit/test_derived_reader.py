"""The reader of a derived topic, over a log in memory: nothing is lost, and nothing comes twice."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from everstate.changes.row_json import row_json
from everstate.cli import views
from everstate.config import Config, load
from everstate.errors import DataLoss, InvalidToken, Unavailable
from everstate.log import derived
from everstate.log.derived import DerivedNote, DerivedReader
from everstate.log.publisher import PublishedProgress
from everstate.log.record import Record
from everstate.log.topics import TopicIdentity, TopicNames

NAME = "flight_patches"
LONG = b"12345678901234567890.12"


class Log:
    """Topics in memory, and what the reader asks of the brokers."""

    def __init__(self, prefix: str) -> None:
        self.names = TopicNames(prefix)
        self.records: dict[str, dict[int, list[Record]]] = {}
        self.ids: dict[str, str] = {}
        self.published, self.batch = 1, 1
        self.failures: list[Exception] = []
        """Raised by the next polls, after they have fetched."""

    def create(self, version: int, *, partitions: int = 1) -> None:
        topic = self.names.derived(NAME, version)
        self.records[topic] = {partition: [] for partition in range(partitions)}
        self.ids[topic] = f"id-{len(self.ids)}-{self.ids.get(topic, 'new')}"

    def delete(self, version: int) -> None:
        del self.records[self.names.derived(NAME, version)]

    def append(
        self,
        version: int,
        *versions: int,
        key: str = "a",
        partition: int = 0,
        value: bytes = b"[]",
        first: int | None = None,
    ) -> None:
        """A record for each version of an entity; ``first``: offset of the first change."""
        for number, each in enumerate(versions):
            place = each if first is None else first + number
            headers = {
                "everstate_version": str(each),
                "everstate_kind": "updated",
                "everstate_offset": str(place),
                "ce_id": f"{key}-{each}",
            }
            self._add(version, partition, key.encode(), value, headers)

    def barrier(self, ended: int, **told: Any) -> None:
        """A barrier in partition 0; ``told``: what its value says."""
        value = json.dumps({"next": self.names.derived(NAME, told["version"]), **told})
        self._add(ended, 0, None, value.encode(), {"everstate_barrier": str(told["version"])})

    def _add(
        self, version: int, partition: int, key: bytes | None, value: bytes, told: dict[str, str]
    ) -> None:
        topic = self.names.derived(NAME, version)
        held = self.records[topic][partition]
        headers = tuple((name, text.encode()) for name, text in told.items())
        held.append(Record(topic, partition, len(held), 0, key, value, headers))

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        """It stays."""

    def existing(self) -> set[str]:
        return set(self.records)

    def identities(self, topics: Sequence[str]) -> dict[str, TopicIdentity]:
        return {
            topic: TopicIdentity("cluster", self.ids[topic], len(self.records[topic]))
            for topic in topics
        }

    def beginnings(self, topics: Iterable[str]) -> dict[tuple[str, int], int]:
        return {(topic, part): 0 for topic in topics for part in self.records[topic]}

    def stable_ends(self, topics: Iterable[str]) -> dict[tuple[str, int], int]:
        return {
            (topic, part): len(held)
            for topic in topics
            for part, held in self.records[topic].items()
        }

    def progress(self, _config: Config, _name: str) -> PublishedProgress:
        return PublishedProgress(self.batch, DerivedNote(published=self.published).written)

    def follow(
        self, _config: Config, starts: Mapping[tuple[str, int], int], *, client_id: str
    ) -> Following:
        return Following(self, dict(starts))


class Following:
    """Gives all records after its starts, partition by partition."""

    def __init__(self, log: Log, at: dict[tuple[str, int], int]) -> None:
        self._log, self._at = log, at

    def poll(self, records_max: int, wait_s: float) -> list[Record]:
        found: list[Record] = []
        for (topic, part), at in self._at.items():
            held = self._log.records[topic][part]
            found += held[at:]
            self._at[topic, part] = max(at, len(held))
        if self._log.failures:
            raise self._log.failures.pop()
        return found

    def close(self) -> None:
        """Nothing to give up."""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load(tmp_path, log={"prefix": "t"})


@pytest.fixture
def log(config: Config, monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log(config.log.prefix)
    log.create(1)
    monkeypatch.setattr(derived, "Topics", lambda _config: log)
    monkeypatch.setattr(derived, "Offsets", lambda _config: log)
    monkeypatch.setattr(derived, "Follower", log.follow)
    monkeypatch.setattr(derived, "read_progress", log.progress)
    return log


def versions(reader: DerivedReader) -> list[int]:
    """Versions of the records that a loop returns from here on."""
    return [record.version for record in reader.records(idle_s=0)]


def test_a_loop_that_is_left_and_begun_again_loses_no_record(config: Config, log: Log) -> None:
    log.append(1, *range(1, 9))
    with DerivedReader(config, NAME) as reader:
        first = [record.version for record in islice(reader.records(idle_s=0), 2)]
        token = reader.token
        assert first + versions(reader) == list(range(1, 9))
    with DerivedReader(config, NAME, token=token) as resumed:
        assert versions(resumed) == list(range(3, 9)), "the token says what was handed out"


def test_a_reader_that_was_closed_within_a_loop_goes_on_where_it_was(
    config: Config, log: Log
) -> None:
    log.append(1, 1, 2, 3)
    reader = DerivedReader(config, NAME)
    assert [record.version for record in islice(reader.records(idle_s=0), 1)] == [1]
    reader.close()
    assert versions(reader) == [2, 3]


def test_a_record_that_cannot_be_read_is_not_passed_by_the_next_loop(
    config: Config, log: Log
) -> None:
    log.append(1, 1)
    log.append(1, 2, value=b"no JSON")
    log.append(1, 3)
    with DerivedReader(config, NAME) as reader:
        loop = reader.records(idle_s=0)
        assert next(loop).version == 1
        for attempt in (loop, reader.records(idle_s=0)):
            with pytest.raises(ValueError, match="JSON"):
                next(attempt)


def test_what_was_fetched_when_the_broker_failed_is_fetched_again(config: Config, log: Log) -> None:
    log.append(1, 1, 2)
    log.failures = [Unavailable("no broker")]
    with DerivedReader(config, NAME) as reader:
        with pytest.raises(Unavailable):
            versions(reader)
        assert versions(reader) == [1, 2]


def test_what_was_fetched_before_a_barrier_is_read_on_behind_it(config: Config, log: Log) -> None:
    log.create(1, partitions=2)
    log.create(2, partitions=2)
    log.append(1, 1, 2)
    log.barrier(1, version=2, offset=2)
    log.append(1, 1, 2, 3, key="b", partition=1)
    log.append(2, 1, 2, 3)
    log.append(2, 1, 2, 3, key="b", partition=1)
    found = defaultdict(list)
    with DerivedReader(config, NAME) as reader:
        for turn in range(2):
            for record in islice(reader.records(idle_s=0), None if turn else 3):
                found[record.key].append(record.version)
    assert found == {"a": [1, 2, 3], "b": [1, 2, 3]}


def test_a_raw_reader_has_a_version_that_comes_after_a_higher_one(config: Config, log: Log) -> None:
    log.append(1, 1, 3, 2)
    with DerivedReader(config, NAME, is_raw=True) as reader:
        assert versions(reader) == [1, 3, 2]


def test_a_raw_reader_returns_a_version_that_was_sent_twice_once(config: Config, log: Log) -> None:
    log.append(1, 1, 2, 3)
    log.append(1, 2, 3, 4)
    log.append(1, 1, key="b")
    with DerivedReader(config, NAME, is_raw=True) as reader:
        assert versions(reader) == [1, 2, 3, 4, 1]


def test_a_raw_reader_remembers_a_bounded_number_of_records(
    config: Config, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(derived, "_SEEN_MAX", 3)
    log.append(1, 1, 2, 3, 4, 4, 2)
    with DerivedReader(config, NAME, is_raw=True) as reader:
        assert versions(reader) == [1, 2, 3, 4]
        log.append(1, 1)
        assert versions(reader) == [1], "the oldest is forgotten, and comes again"
        assert reader._seen is not None
        assert len(reader._seen) == 3


def test_behind_a_raw_barrier_a_reader_goes_on_where_it_was(config: Config, log: Log) -> None:
    log.append(1, 7, 8, key="b", first=5)
    log.append(1, 1, 2, 3, first=10)
    with DerivedReader(config, NAME, is_raw=True) as reader:
        assert versions(reader) == [7, 8, 1, 2, 3]
        token = reader.token
    now = DerivedReader(config, NAME, is_raw=True, start="now")
    log.append(1, 4, first=13)
    log.create(2)
    log.append(2, 7, 8, key="b", first=5)
    log.append(2, 1, 2, 3, 4, 5, first=10)
    log.barrier(1, version=2, offset=0, changes_from=13, turn=2)
    with now, DerivedReader(config, NAME, is_raw=True, token=token) as resumed:
        for each in (now, resumed):
            assert versions(each) == [4, 5]


def test_a_version_that_was_undone_leads_no_reader_in_a_circle(config: Config, log: Log) -> None:
    for is_raw in (True, False):
        log.create(1)
        log.create(2)
        log.append(1, 1, 2, first=0)
        log.barrier(1, version=2, offset=0 if is_raw else 2, changes_from=2 * is_raw, turn=2)
        log.append(2, 1, 2, 3, first=0)
        log.append(1, 3, first=2)
        start = 0 if is_raw else 4
        log.barrier(2, version=1, offset=start, changes_from=3 * is_raw, turn=3)
        log.append(1, 4, first=3)
        log.published, log.batch = 1, 1
        with DerivedReader(config, NAME, is_raw=is_raw) as old:
            assert [each.version for each in islice(old.records(idle_s=0), 9)] == [1, 2, 3, 4]
        log.batch = 3
        log.delete(2)
        with DerivedReader(config, NAME, is_raw=is_raw) as new:
            assert [each.version for each in islice(new.records(idle_s=0), 9)] == [1, 2, 3, 4]


def test_a_value_is_read_with_all_digits_and_written_with_them(config: Config, log: Log) -> None:
    log.append(1, 1, value=b'[{"value":%b}]' % LONG)
    with DerivedReader(config, NAME) as reader:
        (record,) = reader.records(idle_s=0)
    assert b'"value":[{"value":%b}]' % LONG in row_json([asdict(record)])


@pytest.mark.parametrize("json", [True, False])
def test_views_show_prints_all_digits_of_a_record(
    config: Config,
    log: Log,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    json: bool,
) -> None:
    monkeypatch.setattr(views, "_TOPIC_IDLE_S", 0)
    log.append(1, 1, value=b'[{"value":%b}]' % LONG)
    views._topic_shown(DerivedReader(config, NAME), 5).show(json)
    assert LONG.decode() in capsys.readouterr().out


def test_each_partition_that_ends_has_a_barrier_with_its_own_offsets() -> None:
    common = derived.Barrier("t.derived.d.v2", 2, 0, turn=7)
    ended = derived.barriers("t.derived.d.v1", common, {0: 3, 1: 4}, {0: 30, 1: 40})
    assert [(each.topic, each.partition, json.loads(each.value or b"")) for each in ended] == [
        (
            "t.derived.d.v1",
            partition,
            {
                "next": "t.derived.d.v2",
                "version": 2,
                "offset": partition + 3,
                "changes_from": 10 * partition + 30,
                "turn": 7,
            },
        )
        for partition in (0, 1)
    ]


def test_equal_notes_are_equal_bytes_and_a_copy_is_apart() -> None:
    note = DerivedNote({2: {10: 5, 3: 1}, 1: {}}, 1, {2: "b", 1: "a"})
    same = DerivedNote({1: {}, 2: {3: 1, 10: 5}}, 1, {1: "a", 2: "b"})
    assert note.written == same.written
    copy = note.copied()
    assert copy == note
    copy.versions[2][10] += 1
    copy.forget(1)
    assert note == same


def test_a_token_of_a_topic_that_was_begun_anew_is_refused(config: Config, log: Log) -> None:
    log.append(1, *range(1, 9))
    with DerivedReader(config, NAME) as reader:
        versions(reader)
        token = reader.token
    log.create(1)
    log.append(1, *range(1, 20))
    with (
        DerivedReader(config, NAME, token=token) as resumed,
        pytest.raises(InvalidToken, match="begun anew"),
    ):
        versions(resumed)


def test_a_token_of_a_version_that_a_barrier_led_to_names_its_log_too(
    config: Config, log: Log
) -> None:
    log.append(1, 1)
    log.create(2)
    log.barrier(1, version=2, offset=1)
    log.append(2, 1, 2)
    with DerivedReader(config, NAME) as reader:
        assert versions(reader) == [1, 2]
        token = reader.token
    log.append(2, 3)
    with DerivedReader(config, NAME, token=token) as resumed:
        assert versions(resumed) == [3]
    log.create(2)
    log.append(2, 1, 2, 3, 4)
    with (
        DerivedReader(config, NAME, token=token) as resumed,
        pytest.raises(InvalidToken, match="begun anew"),
    ):
        versions(resumed)
    log.delete(2)
    with DerivedReader(config, NAME, token=token) as resumed, pytest.raises(DataLoss):
        versions(resumed)


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        ("", "no token of a derived topic"),
        ("[1]", "no token of a derived topic"),
        (f'["{NAME}",{{"0":[1,-1]}},{{"1":"x"}}]', "no token of a derived topic"),
        (f'["{NAME}",{{"0":[0,1]}},{{"0":"x"}}]', "no token of a derived topic"),
        ('["other",{"0":[1,1]},{"1":"x"}]', "belongs to the derived topic other"),
        (f'["{NAME}",{{"0":[1,57]}}]', "does not name its log"),
    ],
)
def test_what_is_no_token_of_this_topic_is_refused(
    config: Config, log: Log, token: str, reason: str
) -> None:
    with pytest.raises(InvalidToken, match=reason):
        DerivedReader(config, NAME, token=token)


def test_a_token_that_lacks_a_partition_is_refused(config: Config, log: Log) -> None:
    log.append(1, 1)
    with DerivedReader(config, NAME) as reader:
        versions(reader)
        name, at, logs = json.loads(reader.token)
    token = json.dumps([name, {**at, "7": at["0"]}, logs])
    with (
        DerivedReader(config, NAME, token=token) as resumed,
        pytest.raises(InvalidToken, match="partitions"),
    ):
        versions(resumed)
