"""Where a process manager goes on, without servers."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

import command_cases as bank
from everstate.changes import Change, Kind
from everstate.config import load
from everstate.declarations.processes import Effect, ProcessManager, ProcessStart
from everstate.errors import DataLoss, LogTruncated, ProcessFailed
from everstate.log.positions import Range
from everstate.sources.commands.process import ProcessWork

PLACE = ("everstate.account.changes.g1", 0)


def opened() -> Change[dict[str, Any]]:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    return Change[dict[str, Any]](
        id=UUID(int=1),
        entity=bank.ENTITY,
        schema_version=1,
        key="a1",
        version=1,
        kind=Kind.EVENT,
        occurred_at=now,
        recorded_at=now,
        provenance=bank.TELLER,
        current={},
        original=None,
    )


def start_at(folder: Path, start: ProcessStart, position: int | None, there: Range) -> int:
    process = ProcessManager("greet", [bank.ENTITY], lambda _: None, start)
    return ProcessWork(load(folder), bank.app, process, folder).start_at(PLACE, position, there)


@pytest.mark.parametrize("position", [None, 3])
def test_a_process_manager_does_not_begin_behind_changes_that_the_log_has_dropped(
    tmp_path: Path, position: int | None
) -> None:
    with pytest.raises(DataLoss, match="to 9") as raised:
        start_at(tmp_path, "beginning", position, Range(10, 20))
    assert "oldest" in (raised.value.advice or "")


def test_one_that_was_down_for_too_long_does_not_go_on_with_the_newest_changes(
    tmp_path: Path,
) -> None:
    with pytest.raises(DataLoss):
        start_at(tmp_path, "end", 3, Range(10, 20))


def test_one_that_may_lose_changes_goes_on_at_the_oldest(tmp_path: Path) -> None:
    assert start_at(tmp_path, "oldest", None, Range(10, 20)) == 10
    assert start_at(tmp_path, "oldest", 3, Range(10, 20)) == 10


def test_one_goes_on_where_it_was(tmp_path: Path) -> None:
    for start in ("beginning", "oldest", "end"):
        assert start_at(tmp_path, start, 10, Range(10, 20)) == 10
        assert start_at(tmp_path, start, 20, Range(10, 20)) == 20
    assert start_at(tmp_path, "beginning", None, Range(0, 20)) == 0
    assert start_at(tmp_path, "end", None, Range(10, 20)) == 20


def test_a_log_that_ends_before_the_position_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(LogTruncated):
        start_at(tmp_path, "oldest", 21, Range(10, 20))


@pytest.mark.parametrize(
    ("key", "owner", "reason"),
    [
        ("..", "eva", "cannot be part of a URL"),
        ("k" * 3_000, "eva", "2,048"),
        ("a1", "e" * 1_100_000, "1,048,576"),
    ],
)
def test_a_command_that_no_handler_would_take_stops_its_process_manager_with_the_reason(
    tmp_path: Path, key: str, owner: str, reason: str
) -> None:
    def react(_change: Change[dict[str, Any]]) -> Iterable[Effect]:
        opened = bank.Open(account_id="a1", owner=owner)
        return [Effect(entity=bank.ENTITY, key=key, command=opened)]

    process = ProcessManager("greet", [bank.ENTITY], react)
    work = ProcessWork(load(tmp_path), bank.app, process, tmp_path)
    with pytest.raises(ProcessFailed, match=reason):
        work._followed(opened())


def test_a_function_that_ends_the_process_stops_its_process_manager_only(tmp_path: Path) -> None:
    def leaves(_change: Change[dict[str, Any]]) -> Iterable[Effect]:
        sys.exit(3)

    process = ProcessManager("greet", [bank.ENTITY], leaves)
    work = ProcessWork(load(tmp_path), bank.app, process, tmp_path)
    with pytest.raises(ProcessFailed, match="SystemExit: 3"):
        work._followed(opened())
