"""What is selected of an archive: one key, a time range, a provenance; looked at, or to a file."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from everstate.config import Config, load
from everstate.errors import ArchiveError, InvalidQuery
from everstate.log.record import Record
from everstate.pipeline.archiving.selection import Selection, preview, replay_to_file
from everstate.serving.source import records_of
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


def test_nothing_is_written_over_and_no_other_form_is_written(
    config: Config, tmp_path: Path
) -> None:
    (tmp_path / "there.jsonl").write_text("mine")
    with pytest.raises(InvalidQuery, match="exists already"):
        replay_to_file(config, "order", Selection(), tmp_path / "there.jsonl")
    with pytest.raises(InvalidQuery, match=r"end in \.jsonl or \.parquet"):
        replay_to_file(config, "order", Selection(), tmp_path / "out.csv")
    with pytest.raises(InvalidQuery, match="a provenance has no field 'service'"):
        Selection(provenance={"service": "x"})
    with pytest.raises(ArchiveError, match="no generation 2"):
        preview(config, "order", Selection(), generation=2)
    assert (tmp_path / "there.jsonl").read_text() == "mine"
