"""What is selected of an archive: one key, a time range, a provenance; looked at, or to a file."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from everstate.config import Config, load
from everstate.errors import ArchiveError, InvalidQuery, LogError
from everstate.log.record import OutRecord, Record
from everstate.pipeline.archiving.selection import (
    Selection,
    out_records,
    preview,
    replay_to_file,
    replay_to_topic,
)
from everstate.pipeline.archiving.targets import prepare
from everstate.views.source import records_of
from hand_archive import HandArchive

BEGIN = datetime(2026, 3, 1, tzinfo=UTC)


def record(partition: int, offset: int) -> Record:
    moment = BEGIN + timedelta(hours=offset)
    message = {
        "key": f"k{offset % 3}",
        "recordedAt": (moment + timedelta(minutes=5)).isoformat(),
        "occurredAt": moment.isoformat(),
        "provenance": {"serviceName": "importer" if offset % 4 == 0 else "desk"},
        "n": offset,
    }
    value: bytes = json.dumps(message, indent=1).encode()
    if offset == 7:
        value = b"no json \xff"
    return Record("t", partition, offset, 1_700_000_000_000 + offset, b"k", value, (("h", b"1"),))


RECORDS = {p: [record(p, offset) for offset in range(12)] for p in (0, 1)}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    config = load(tmp_path, archive={"path": str(tmp_path / "lake")})
    archive = HandArchive(config, "order")
    archive.begin({0: 0, 1: 0})
    for end in (6, 12):
        mine = [r for records in RECORDS.values() for r in records if end - 6 <= r.offset < end]
        archive.append(mine, {0: end, 1: end})
    return config


def at(hours: float) -> datetime:
    return BEGIN + timedelta(hours=hours)


SELECTIONS: dict[str, tuple[Selection, list[int]]] = {
    "all": (Selection(), list(range(12))),
    "a key": (Selection(key="k1"), [1, 4, 10]),
    "a key of a service": (Selection(key="k2", provenance={"service_name": "importer"}), [8]),
    "a range": (Selection(from_=at(2), until=at(5)), [2, 3, 4]),
    "as recorded": (Selection(recorded_from=at(2), recorded_until=at(4)), [2, 3]),
    "of a service": (Selection(provenance={"service_name": "importer"}), [0, 4, 8]),
    "nothing": (Selection(key="k9"), []),
}


@pytest.mark.parametrize(("selection", "offsets"), SELECTIONS.values(), ids=SELECTIONS)
def test_what_is_selected_is_shown_and_written_byte_for_byte(
    config: Config, tmp_path: Path, selection: Selection, offsets: list[int]
) -> None:
    parts = preview(config, "order", selection)
    assert [(p.partition, p.records) for p in parts] == [
        (p, len(offsets)) for p in (0, 1) if offsets
    ]
    if offsets:
        first, last = parts[0].first_offset, parts[0].last_offset
        assert (first, last) == (offsets[0], offsets[-1])
        assert parts[0].first_recorded_at == at(offsets[0]) + timedelta(minutes=5)
    file = tmp_path / "out.parquet"
    done = replay_to_file(config, "order", selection, file)
    assert (done.records, done.partitions) == (2 * len(offsets), 2)
    written = list(records_of("t", pq.read_table(file))) if offsets else []
    assert written == [RECORDS[p][offset] for p in (0, 1) for offset in offsets]


def test_pages_of_a_replayed_file_have_sums(config: Config, tmp_path: Path) -> None:
    file = tmp_path / "out.parquet"
    replay_to_file(config, "order", Selection(), file)
    group, content = pq.read_metadata(file).row_group(0), bytearray(file.read_bytes())
    column = next(group.column(at) for at in range(group.num_columns))
    content[column.data_page_offset + column.total_compressed_size - 3] ^= 1
    file.write_bytes(content)
    with pytest.raises(OSError, match="CRC checksum"):
        pq.read_table(file, page_checksum_verification=True)


def test_lines_of_json_are_messages_and_what_is_none_is_kept_as_bytes(
    config: Config, tmp_path: Path
) -> None:
    file = tmp_path / "out.jsonl"
    replay_to_file(config, "order", Selection(), file)
    lines: list[Any] = [json.loads(line) for line in file.read_bytes().splitlines()]
    assert len(lines) == 24
    assert lines[3] == json.loads(RECORDS[0][3].value or b"")
    told = lines[7]["unreadable"]
    assert (told["partition"], told["offset"]) == (0, 7)
    assert base64.b64decode(told["bytes"]) == RECORDS[0][7].value
    assert list(tmp_path.glob("*.part")) == []


def test_every_line_is_json_and_has_the_key_of_a_record_that_is_none(tmp_path: Path) -> None:
    config = load(tmp_path, archive={"path": str(tmp_path / "deep")})
    archive = HandArchive(config, "order")
    archive.begin({0: 0})
    deep = b"[" * 100_000 + b"]" * 100_000
    given = [(b"k", b'{"key":"\xff"}'), (b"k", None), (b"\xff", b""), (None, deep), (b"k", b"{}")]
    archive.append([Record("t", 0, n, 0, *each, ()) for n, each in enumerate(given)], {0: 5})
    file = tmp_path / "out.jsonl"
    replay_to_file(config, "order", Selection(), file)
    lines = [json.loads(line) for line in file.read_bytes().decode().splitlines()]
    assert lines.pop() == {}
    for offset, (line, (key, value)) in enumerate(zip(lines, given, strict=False)):
        told = line["unreadable"]
        assert (told["partition"], told["offset"]) == (0, offset)
        found = base64.b64decode(told["keyBytes"]) if "keyBytes" in told else told["key"]
        assert found == (key if key in (None, b"\xff") else "k")
        assert (told["bytes"] and base64.b64decode(told["bytes"])) == (value or told["bytes"])
        assert (told["bytes"] is None) == (value is None)


def test_a_file_without_records_has_the_columns_of_one_with_records(
    config: Config, tmp_path: Path
) -> None:
    for name, selection in {"none": Selection(key="k9"), "all": Selection()}.items():
        replay_to_file(config, "order", selection, tmp_path / f"{name}.parquet")
    found = [pq.read_schema(tmp_path / f"{name}.parquet") for name in ("none", "all")]
    assert found[0].equals(found[1])


def test_a_time_may_have_any_offset_and_must_have_one(config: Config) -> None:
    odd = timezone(timedelta(hours=5, minutes=30, seconds=15))
    moments = (at(2).astimezone(odd), at(5).astimezone(odd))
    for selection in (Selection(None, *moments), Selection(None, None, None, *moments)):
        assert sum(part.records for part in preview(config, "order", selection)) == 6
    for wrong in (datetime(2026, 3, 1), datetime.max.replace(tzinfo=timezone(-timedelta(hours=1)))):  # noqa: DTZ001
        with pytest.raises(InvalidQuery, match=r"no UTC offset|years 1 to 9999"):
            Selection(recorded_until=wrong)


class Servers:
    """Topics that exist, none of them empty; and what was written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **stamped: str) -> None:
        self.stamped, self.sent = stamped, list[OutRecord]()
        for name in ("targets.Topics", "targets.Offsets", "selection.Producer"):
            monkeypatch.setattr(f"everstate.pipeline.archiving.{name}", lambda *_, **__: self)

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None: ...
    def close(self) -> None: ...
    def flush(self, _timeout_s: float) -> None: ...
    def existing(self) -> set[str]:
        return {"small", *self.stamped}

    def partitions(self, topic: str) -> int:
        return 1 if topic == "small" else 2

    def create(self, *_: object) -> None: ...
    def config(self, topic: str) -> dict[str, str]:
        return {"message.timestamp.type": self.stamped.get(topic, "CreateTime")}

    def high_watermarks(self, topics: list[str]) -> dict[tuple[str, int], int]:
        return {(topic, 0): 5 for topic in topics}

    def send(self, record: OutRecord) -> None:
        self.sent.append(record)


@pytest.mark.parametrize(
    "name",
    [
        *("order.changes.g1", "order.changes.g2", "order.state.g1", "guest.changes.g1"),
        *("guest.commands.g1", "guest.dead", "raw.bank.account", "derived.d.v1", "progress"),
    ],
)
@pytest.mark.parametrize("append", [True, False])
def test_no_topic_of_the_project_is_written(
    config: Config, monkeypatch: pytest.MonkeyPatch, name: str, append: bool
) -> None:
    servers, topic = Servers(monkeypatch), f"{config.log.prefix}.{name}"
    with pytest.raises(LogError, match="one of the project's own"):
        replay_to_topic(config, "order", Selection(), topic, append=append)
    assert servers.sent == []
    again = f"{config.log.prefix}.order.changes.g1.again"
    for other in (again, f"x{topic}", f"{config.log.prefix}.new.{name}"):
        assert prepare(config, other, 2, append=append) == 2


def test_a_topic_with_records_or_with_times_of_its_own_is_refused(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = Servers(monkeypatch, full="CreateTime", clock="LogAppendTime")
    with pytest.raises(LogError, match="full is not empty") as refused:
        replay_to_topic(config, "order", Selection(), "full")
    assert "delete this one first" in str(refused.value.advice)
    with pytest.raises(LogError, match="the time of writing"):
        replay_to_topic(config, "order", Selection(), "clock", append=True)
    assert servers.sent == []


@pytest.mark.parametrize(("topic", "is_same"), [("full", True), ("small", False), ("new", True)])
def test_records_go_to_their_partitions_or_by_key_where_there_are_others(
    config: Config, monkeypatch: pytest.MonkeyPatch, topic: str, is_same: bool
) -> None:
    servers = Servers(monkeypatch, full="CreateTime")
    done = replay_to_topic(config, "order", Selection(key="k1"), topic, append=True)
    assert (done.records, done.restamped) == (6, 0)
    wanted = [(p, RECORDS[p][offset]) for p in (0, 1) for offset in (1, 4, 10)]
    assert servers.sent == [
        OutRecord(topic, r.key, r.value, list(r.headers), p if is_same else None, r.timestamp_ms)
        for p, r in wanted
    ]


def test_records_whose_time_cannot_be_sent_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(tmp_path, archive={"path": str(tmp_path / "old")})
    archive = HandArchive(config, "order")
    archive.begin({0: 0})
    archive.append([Record("t", 0, n, n, b"k", b"{}", ()) for n in (0, 1)], {0: 2})
    Servers(monkeypatch)
    done = replay_to_topic(config, "order", Selection(), "new")
    assert (done.records, done.restamped) == (2, 1)


def test_nothing_is_written_over_and_no_other_form_is_written(
    config: Config, tmp_path: Path
) -> None:
    (tmp_path / "there.jsonl").write_text("mine")
    with pytest.raises(InvalidQuery, match="exists already"):
        replay_to_file(config, "order", Selection(), tmp_path / "there.jsonl")
    with pytest.raises(InvalidQuery, match=r"end in \.jsonl or \.parquet"):
        replay_to_file(config, "order", Selection(), tmp_path / "out.csv")
    for suffix in ("jsonl", "parquet"):
        with pytest.raises(InvalidQuery, match="cannot be written: No such file"):
            replay_to_file(config, "order", Selection(), tmp_path / "no" / f"such.{suffix}")
    with pytest.raises(InvalidQuery, match="a provenance has no field 'service'"):
        Selection(provenance={"service": "x"})
    with pytest.raises(ArchiveError, match="no generation 2"):
        preview(config, "order", Selection(), generation=2)
    assert (tmp_path / "there.jsonl").read_text() == "mine"


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_record_with_a_time_that_python_cannot_hold_is_replayed(
    tmp_path: Path, suffix: str
) -> None:
    """A producer that gives microseconds where Kafka has milliseconds."""
    config = load(tmp_path, archive={"path": str(tmp_path / "far")})
    archive = HandArchive(config, "order")
    archive.begin({0: 0})
    given = Record("t", 0, 0, 1_700_000_000_000_000, b"k", b'{"a":1}', (("h", None),))
    archive.append([given], {0: 1})
    file = tmp_path / f"out.{suffix}"
    assert replay_to_file(config, "order", Selection(), file).records == 1
    if suffix == "jsonl":
        assert file.read_bytes() == b'{"a":1}\n'
        return
    table = pq.read_table(file)
    assert list(records_of("t", table)) == [given]
    assert list(out_records("x", table)) == [
        OutRecord("x", b"k", b'{"a":1}', [("h", None)], 0, given.timestamp_ms)
    ]
