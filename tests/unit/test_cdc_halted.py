"""Incremental snapshots that stop half-way: how that is seen, and what is done about it."""

from __future__ import annotations

import json
from typing import Any

from everstate.sources.cdc.halted import (
    SILENT_S,
    SnapshotWatch,
    has_failed_parsing,
    has_failed_reading,
    tables_to_read,
    with_quoted_names,
    without_first_table,
)
from everstate.sources.cdc.notifications import Notification, unread_of


def position(*tables: str, ts_s: float = 0.0, chunk: str = "aced") -> dict[str, Any]:
    """A stored position in the middle of a snapshot of these tables."""
    streaming = {"lsn": 7, "ts_usec": int(ts_s * 1e6)}
    if not tables:
        return streaming
    listed = [{"incremental_snapshot_collections_id": table} for table in tables]
    return {
        **streaming,
        "incremental_snapshot_collections": json.dumps(listed),
        "incremental_snapshot_primary_key": chunk,
        "incremental_snapshot_maximum_key": "aced",
        "incremental_snapshot_correlation_id": "everstate-1",
    }


class Rig:
    """A watch and its clock."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._watch = SnapshotWatch(lambda: self.now_s)

    def look(self, found: dict[str, Any], after_s: float = 10.0) -> str:
        self.now_s += after_s
        return self._watch.look(found)


def test_a_snapshot_that_stays_where_it_is_while_changes_are_read_has_halted() -> None:
    rig = Rig()
    assert rig.look(position("a", ts_s=1005)) == "goes on"
    assert rig.look(position("a", ts_s=1015)) == "goes on", "it has had no time yet"
    assert rig.look(position("a", ts_s=1035), SILENT_S) == "halted"
    assert rig.look(position("a", ts_s=1040)) == "goes on", "what was started again has time"


def test_a_chunk_that_is_read_slowly_is_no_halt() -> None:
    rig = Rig()
    rig.look(position("a", ts_s=1005))
    for _ in range(20):
        assert rig.look(position("a", ts_s=1005), SILENT_S) == "silent"


def test_changes_from_before_the_snapshot_prove_nothing() -> None:
    rig = Rig()
    rig.look(position("a", ts_s=100))
    for minute in range(10):
        assert rig.look(position("a", ts_s=200 + minute), 60) == "silent", "it reads a backlog"


def test_each_chunk_gives_the_next_one_its_time() -> None:
    rig = Rig()
    for chunk in range(10):
        found = position("a", ts_s=rig.now_s, chunk=str(chunk))
        assert rig.look(found, SILENT_S - 1) == "goes on"
    assert rig.look(position(ts_s=rig.now_s), 3600) == "goes on", "there is none any more"


def test_a_table_that_cannot_be_read_is_left_out_and_the_next_is_read_from_its_start() -> None:
    rest = without_first_table(position("a", "b", "c"))
    assert tables_to_read(rest) == ("b", "c")
    assert "incremental_snapshot_primary_key" not in rest
    assert rest["incremental_snapshot_correlation_id"] == "everstate-1"
    assert without_first_table(position("a")) == position()
    assert tables_to_read(position()) == ()


def test_names_of_a_stored_snapshot_are_quoted_where_debezium_parses_them_no_other_way() -> None:
    stored = position("public.a", "public.order lines", "größe.x-1")
    quoted = with_quoted_names(stored)
    listed = [*json.loads(quoted["incremental_snapshot_collections"])]
    names = [each["incremental_snapshot_collections_id"] for each in listed]
    assert names == ["public.a", 'public."order lines"', 'größe."x-1"']
    assert tables_to_read(quoted) == tables_to_read(stored)
    assert quoted["incremental_snapshot_primary_key"] == "aced", "it goes on where it was"
    assert with_quoted_names(quoted) == quoted
    assert with_quoted_names(position("a.b")) == position("a.b")


def test_a_trace_tells_whether_a_snapshot_failed() -> None:
    package = "io.debezium.pipeline.source.snapshot.incremental.SignalBased.readChunk"
    assert has_failed_reading(f"ConnectException: …\n\tat {package}(SignalBased.java:7)")
    assert not has_failed_reading("ConnectException: …\n\tat io.debezium.jdbc.JdbcConnection")
    assert not has_failed_reading(None)
    parser = "io.debezium.relational.TableIdParser.parse(TableIdParser.java:36)"
    assert has_failed_parsing(f"Unexpected input: l\n\tat {parser}\n\tat {package}")
    assert not has_failed_parsing(f"ConnectException: …\n\tat {package}(SignalBased.java:7)")
    assert not has_failed_parsing(None)


def step(table: str | None, status: str | None, reason: str | None = None) -> Notification:
    return Notification(
        "1",
        "Incremental Snapshot",
        "TABLE_SCAN_COMPLETED",
        (),
        table,
        None,
        status,
        0,
        reason,
    )


def test_a_table_counts_as_unread_until_a_snapshot_of_it_ends_well() -> None:
    failed = [step("a", "SUCCEEDED"), step("a", "GIVEN_UP", "no column b"), step("b", "EMPTY")]
    assert unread_of(failed) == {"a": "no column b"}
    assert unread_of([*failed, step("c", "SQL_EXCEPTION")])["c"] == "SQL_EXCEPTION"
    assert unread_of([*failed, step(None, None), step("a", "SUCCEEDED")]) == {}
