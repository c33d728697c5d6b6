"""Views in the lake keep the contract of stores of rows."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Final
from uuid import UUID

import duckdb
import polars
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from everstate.config import Config
from everstate.views.definition import ViewDefinition
from everstate.views.plan import compile_view
from everstate.views.stores import lake
from everstate.views.stores.lake import LakeRows
from everstate.views.tables import KeptTable, Row, planned_column
from kit.row_store_contract import ATTEMPT, RowsKept, RowStoreContract, columns_of
from kit.served_lake import ServedLake, ServedLakeOnS3
from kit.served_s3 import ServedS3
from kit.served_store_contract import ServedStoreContract, kept_in
from kit.view_oracle import accepted, in_order
from kit.view_orders import ORDER, Log, history, logged, random_logs, state_of
from tiers import counted

_MOMENT: Final = pa.timestamp("us", "UTC")
_TIMES: Final = {"valid_from": _MOMENT, "valid_to": _MOMENT}
_FIELDS: Final = {"c0": pa.string(), "c1": pa.decimal128(12, 2)}
_STRUCT: Final = pa.struct([*_FIELDS.items(), *_TIMES.items()])
_ROWS: Final = pa.schema(
    [("key", pa.string()), ("version", pa.int64()), *_TIMES.items(), *_FIELDS.items()]
)


class ForgetsDeletions(LakeRows):
    """A key that was deleted has no version any more."""

    def write(self, table: KeptTable, rows: pa.Table, gone: pa.Table) -> None:
        super().write(table, rows, gone)
        self.forget(table, gone)

    def forget(self, table: KeptTable, rows: pa.Table) -> None:
        """Delete rows, and the versions of deleted ones."""
        merged = self._merged(table.view, table.name)
        if rows.num_rows:
            gone = merged.merge(rows.select(["_key"]), "new._key = old._key", "new", "old")
            gone.when_matched_delete().execute()


class OlderWins(ForgetsDeletions):
    """The last write wins, and not the highest version."""

    def write(self, table: KeptTable, rows: pa.Table, gone: pa.Table) -> None:
        self.forget(table, rows)
        self.forget(table, gone)
        LakeRows.write(self, table, rows, gone)


class TestLakeStore(ServedStoreContract):
    histories = counted(3, full=100)
    forgets_deletions = ForgetsDeletions
    older_wins = OlderWins
    refused: ClassVar[dict[str, pa.DataType]] = {
        "null": pa.null(),
        "length": pa.duration("us"),
        "time": pa.time64("us"),
    }
    # It has no server of its own, and its address is by default that of the archive.
    test_a_server_with_tls_is_used_and_its_certificate_is_checked = None  # type: ignore[assignment]
    test_without_an_address_the_reason_says_what_is_missing = None  # type: ignore[assignment]

    @pytest.fixture
    def served(self, tmp_path: Path) -> ServedLake:
        return ServedLake(tmp_path)


@pytest.fixture(scope="module")
def object_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedS3]:
    """An object store, without Spark."""
    with ServedS3.alone(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.mark.full
class TestLakeStoreOnS3(TestLakeStore):
    """The same in an object store."""

    @pytest.fixture
    def served(self, object_store: ServedS3) -> ServedLake:
        return ServedLakeOnS3(object_store)


# What only the lake has: all states, with the times from and to which they were valid


@dataclass
class PeriodsKept(RowsKept):
    """All states of orders in which they are open."""

    types: ClassVar[Mapping[str, pa.DataType]] = {**_FIELDS, **_TIMES}

    def __post_init__(self) -> None:
        sql = "SELECT region, amount FROM order_history WHERE status = 'open'"
        made = compile_view(ViewDefinition("opened", sql, store="lake"), {"order": ORDER})
        self.plan = replace(made, fingerprint="in another store")
        self.store = self.store_class(self.name, self.home, self.kept)
        self.reset()

    def planned(self, log: Log, start: int, end: int, version: int = 1) -> pa.Table:
        records = [log.records[at] for at in sorted(log.records) if start <= at < end]
        images = pa.array([_open(record.current) for record in records], _STRUCT)
        named = planned_column(self.table(version), "current")
        return log.between(start, end).append_column(named, images)

    def load(self, records: Sequence[Any], version: int, attempt: UUID = ATTEMPT) -> None:
        """Fill a version as Spark does: its rows come in any order, and of ends it is told, too."""
        rows = _periods(records)
        Random(1).shuffle(rows)
        for part in (rows[::2], rows[1::2]):
            batch = pa.RecordBatch.from_pylist(part, _ROWS.append(pa.field("present", pa.bool_())))
            list(self.store.loader(self.table(version), attempt)([batch]))

    def rows(self, version: int = 1) -> list[Row]:
        found = pa.Table.from_batches(self.store.read(self.table(version), _ROWS), _ROWS)
        return in_order(tuple(row.values()) for row in found.to_pylist())

    def wanted(self, *logs: Log, vector: Mapping[int, int] | None = None) -> list[Row]:
        until = {p: log.end for p, log in enumerate(logs)} if vector is None else vector
        shown = [row for row in _periods(accepted(logs, until)) if row.pop("present")]
        return in_order(tuple(row.values()) for row in shown)


def _open(state: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if state is None or state["status"] != "open":
        return None
    return {"c0": state["region"], "c1": state["amount"]}


def _periods(records: Sequence[Any]) -> list[dict[str, Any]]:
    """A row for each accepted change, from plain Python: versions of a key are in order."""
    rows: list[dict[str, Any]] = []
    open_rows: dict[str, dict[str, Any]] = {}
    for record in records:
        before = open_rows.get(record.key)
        begins: datetime = record.occurred_at
        if before is not None:
            begins = max(begins, before["valid_from"])
            before["valid_to"] = begins
        shown = _open(record.current)
        row = {"key": record.key, "version": record.version, "valid_from": begins}
        row |= {"valid_to": None, **(shown or {"c0": None, "c1": None}), "present": bool(shown)}
        open_rows[record.key] = row
        rows.append(row)
    return rows


@pytest.fixture
def own(tmp_path: Path) -> Config:
    return ServedLake(tmp_path).settings(Config())


@pytest.fixture
def periods(own: Config) -> PeriodsKept:
    return PeriodsKept(LakeRows(own), lambda _view: None, "periods")


def test_periods_of_any_logs_in_any_ranges_are_those_of_the_oracle(periods: PeriodsKept) -> None:
    """Late reports, deletions, states that the view does not show, and writes that come again."""
    for seed in range(counted(8, full=200)):
        random = Random(seed)
        logs = random_logs(random, 2, disorder=6)
        periods.reset()
        for partition, log in enumerate(logs):
            RowStoreContract._keep(periods, random, partition, log)
        try:
            periods.check(*logs)
        except AssertionError as wrong:
            raise AssertionError(f"seed {seed}: {wrong}") from wrong


def test_a_version_of_periods_that_was_built_goes_on_with_the_log(periods: PeriodsKept) -> None:
    """Its first changes came from a batch, in any order; the next ones end them."""
    for seed in range(counted(5, full=100)):
        (log,) = random_logs(Random(seed), 1, disorder=0)
        periods.reset()
        half = log.end // 2
        periods.judge(0, log, 0, log.end)
        periods.install(2, {0: half, 1: 0})
        periods.load(accepted([log], {0: half}), 2)
        periods.load(accepted([log], {0: half}), 2)  # a task that Spark ran twice
        assert periods.rows(2) == periods.wanted(log, vector={0: half}), seed
        periods.trail(0, log, half, log.end, version=2)
        assert periods.rows(2) == periods.wanted(log), seed


def test_readers_find_the_states_of_any_moment_with_one_select(own: Config, tmp_path: Path) -> None:
    periods = PeriodsKept(LakeRows(own), lambda _view: None, "periods")
    story = [state_of("a", region=r, amount=1) for r in ("north", "south")]
    log = logged(*history("a", [*story, None]), *history("b", [state_of("b", region="east")]))
    periods.keep(log)
    periods.store.show("opened", 1)
    (first, _, last), served = accepted([log], {0: log.end})[:3], ServedLake(tmp_path)

    def regions(moment: datetime) -> list[str]:
        found = served.read(own, "opened") or []
        return sorted(
            row["region"]
            for row in found
            if row["valid_from"] <= moment and (row["valid_to"] is None or row["valid_to"] > moment)
        )

    assert regions(first.occurred_at) == ["east", "north"]
    assert regions(last.occurred_at) == ["east"]
    assert {row["_key"] for row in served.read(own, "opened") or []} == {"a", "b"}


def test_small_files_are_compacted_and_replaced_ones_go(
    own: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commits for ever leave neither many files in the newest version nor old ones on the disk."""
    monkeypatch.setattr(lake, "_KEPT_HOURS", 0)
    monkeypatch.setattr(lake, "_REST", 0)
    served = ServedLake(tmp_path)
    kept = kept_in(served, own, "append")
    for version in range(1, 121):
        kept.store.write(kept.table(), columns_of(("a", version, "north", Decimal(version))))
        kept.store.show("opened", 1)
        assert len(DeltaTable(served.table(own, "opened")).file_uris()) <= lake._FILES_MAX + 1
    assert len(served.read(own, "opened") or []) == 120
    files = [name for name in served.left(own) if name.endswith(".parquet")]
    assert len(files) < 2 * lake._FILES_MAX + lake._VACUUM_COMMITS


def test_readers_see_a_merge_for_twenty_times_as_long_as_it_took(
    own: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large table is not written again all the time; another version is shown at once."""
    served = ServedLake(tmp_path)
    kept = kept_in(served, own)
    kept.store.show("opened", 1)
    kept.store.write(kept.table(), columns_of(("a", 1, "north", Decimal(1))))
    monkeypatch.setattr(lake, "_REST", 10_000)
    monkeypatch.setitem(lake._RESTS, served.table(own, "opened"), time.monotonic() + 10_000)
    place = served.table(own, "opened")
    kept.store.show("opened", 1)
    assert DeltaTable(place).count() == 0
    kept.install(2)
    kept.store.write(kept.table(2), columns_of(("b", 1, "north", Decimal(1))))
    kept.store.show("opened", 2)
    assert DeltaTable(place).count() == 1
    lake._RESTS.clear()
    kept.store.show("opened", 1)
    assert DeltaTable(place).to_pyarrow_table()["_key"].to_pylist() == ["a"]


def test_two_processes_that_merge_at_once_change_nothing_twice(own: Config, tmp_path: Path) -> None:
    """A proof merges what was written, too; who comes second begins again."""
    kept = kept_in(ServedLake(tmp_path), own, "append")
    for turn in range(5):
        kept.store.write(kept.table(), columns_of((f"k{turn}", 1, "north", Decimal(1))))
        with ThreadPoolExecutor(3) as pool:
            found = [pool.submit(kept.rows) for _ in range(3)]
        assert [len(each.result()) for each in found] == [turn + 1] * 3


def test_a_version_with_other_columns_is_published_and_undone(own: Config, tmp_path: Path) -> None:
    """Readers see the columns of one version with its rows, in one commit; a new type, too."""
    kept, served = LakeRows(own), ServedLake(tmp_path)
    place = [("_key", pa.string()), ("_version", pa.int64())]
    moment = datetime.fromisoformat("2026-11-30T12:00:00")
    changed = [("total", pa.string()), ("city", pa.string()), ("at", pa.timestamp("us"))]
    kinds = ([("total", pa.int32())], changed)
    values: tuple[dict[str, Any], ...] = (
        {"total": 7},
        {"total": "seven", "city": "Oslo", "at": moment},
    )
    tables = [KeptTable(view="v", version=n, fingerprint="f", merge="row") for n in (1, 2)]
    for table, more, value in zip(tables, kinds, values, strict=True):
        schema = pa.schema([*place, *more])
        kept.install(table, schema)
        rows = pa.Table.from_pylist([{"_key": "a", "_version": 1, **value}], schema)
        kept.write(table, rows, rows.slice(0, 0).select(["_key", "_version"]))
    for at in (0, 1, 0):
        kept.publish("v", tables[at].name)
        assert served.read(own, "v") == [{"_key": "a", "_version": 1, **values[at]}]
        found = duckdb.from_arrow(DeltaTable(served.table(own, "v")).to_pyarrow_dataset())
        assert found.columns == ["_key", "_version", *values[at]]
        assert DeltaTable(served.table(own, "v")).metadata().configuration == lake._PROPERTIES


def test_no_commit_adds_and_removes_one_file(periods: PeriodsKept, tmp_path: Path) -> None:
    """Spark would take it as removed, and deltalake as added."""
    served, states = ServedLake(tmp_path), [state_of("a", region=r) for r in ("n", "s", "e", "w")]
    log = logged(*history("a", [*states, None]), *history("b", [state_of("b", region="n")]))
    periods.judge(0, log, 0, log.end)
    place = Path(served.table(served.settings(Config()), "opened"))
    for start in range(log.end):
        periods.trail(0, log, start, start + 1)
        lake._RESTS.clear()
        periods.store.show("opened", 1)
        assert DeltaTable(place).to_pyarrow_table().num_rows == len(periods.rows())
    for commit in place.glob("_delta_log/*.json"):
        actions = [json.loads(line) for line in commit.read_text().splitlines()]
        added, removed = (
            {each[kind]["path"] for each in actions if kind in each} for kind in ("add", "remove")
        )
        assert added.isdisjoint(removed)


def test_the_name_of_a_view_may_look_like_that_of_a_version(own: Config, tmp_path: Path) -> None:
    kept, served = LakeRows(own), ServedLake(tmp_path)
    table = KeptTable(view="crm__vip", version=1, fingerprint="f", merge="row")
    schema = pa.schema([("_key", pa.string()), ("_version", pa.int64())])
    kept.install(table, schema)
    rows = pa.Table.from_pylist([{"_key": "a", "_version": 1}], schema)
    kept.write(table, rows, rows.slice(0, 0))
    kept.publish("crm__vip", table.name)
    assert served.read(own, "crm__vip") == [{"_key": "a", "_version": 1}]
    kept.unpublish("crm__vip")
    assert served.read(own, "crm__vip") is None


def test_columns_may_have_any_name(own: Config, tmp_path: Path) -> None:
    """Capitals, words of SQL, letters of all languages, and names of columns of our own."""
    names = ("Total", "order", "größe", "a-b", "old", "place", "there", "now", "valid_from")
    kept, table = LakeRows(own), KeptTable(view="odd", version=1, fingerprint="f", merge="row")
    schema = pa.schema([("_key", pa.string()), ("_version", pa.int64())])
    schema = pa.schema([*schema, *((name, pa.int64()) for name in names)])
    kept.install(table, schema)
    for version in (1, 2):
        rows = [{"_key": "a", "_version": version, **dict.fromkeys(names, version)}]
        given = pa.Table.from_pylist(rows, schema)
        kept.write(table, given, given.slice(0, 0).select(["_key", "_version"]))
        assert [b.to_pylist() for b in kept.rows(table, schema)] == [rows]
    kept.publish("odd", table.name)
    assert [row["Total"] for row in ServedLake(tmp_path).read(own, "odd") or []] == [2]


def test_other_programs_read_a_view_by_its_folder(own: Config, tmp_path: Path) -> None:
    served = ServedLake(tmp_path)
    kept = kept_in(served, own)
    kept.store.write(kept.table(), columns_of(("a", 1, "north", Decimal(1))))
    kept.store.write(kept.table(), columns_of(("b", 1, None, None), present=False))
    kept.store.show("opened", 1)
    place = served.table(own, "opened")
    (row,) = polars.scan_delta(place).collect().to_dicts()
    assert row == {"region": "north", "amount": Decimal("1.00"), "_key": "a", "_version": 1}
