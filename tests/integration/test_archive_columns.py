"""Typed columns of the archive: compared with the messages beside them, and written again."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from archive_cases import ORDER, Order, Shop, change
from everstate.archive import table_path
from everstate.changes import ChangeCodec, EntityType
from everstate.errors import ArchiveError
from everstate.pipeline.archiving.archiver import conformed
from everstate.pipeline.archiving.audit import AuditReport, audit
from everstate.pipeline.archiving.audit_columns import compared
from everstate.pipeline.archiving.reparse import reparse
from everstate.pipeline.spark.archived import read_archive
from everstate.pipeline.spark.parse import parse
from everstate.pipeline.spark.source import SOURCE_SCHEMA


def run(shop: Shop, entity_type: EntityType = ORDER, *, against_log: bool = False) -> AuditReport:
    return audit(shop.spark, shop.config, "order", against_log=against_log, entity_type=entity_type)


def table_of(shop: Shop) -> str:
    return f"delta.`{table_path(shop.config, 'order')}`"


def rows_of(shop: Shop, columns: str) -> list[tuple[Any, ...]]:
    read = shop.spark.sql(f"SELECT {columns} FROM {table_of(shop)} ORDER BY key, version")
    return [tuple(row) for row in read.collect()]


RAW = "key, version, raw_key, raw_value, raw_headers, timestamp, timestamp_type, partition, offset"


def test_columns_that_differ_from_their_message_are_found_and_written_again(shop: Shop) -> None:
    shop.write_orders(keys=12, versions=2)
    shop.archiver().step()
    right, raw = rows_of(shop, "current, original, provenance"), rows_of(shop, RAW)
    assert run(shop).compared_with_messages == 24
    table = table_of(shop)
    for planted in (
        "current.amount = 999 WHERE key = 'o1'",
        "original.note = NULL WHERE key = 'o2' AND version = 2",
        "provenance.actor = 'bob', occurred_at = occurred_at + INTERVAL '1' MICROSECOND "
        "WHERE key = 'o3' AND version = 1",
        "current = NULL WHERE key = 'o4' AND version = 1",
    ):
        shop.spark.sql(f"UPDATE {table} SET {planted}")
    report = run(shop, against_log=True)
    assert {problem.rule for problem in report.problems} == {"columns"}
    said = {(problem.message.partition(" than ")[0], problem.count) for problem in report.problems}
    assert said == {
        ("2 records have other values in current.amount", 2),
        ("1 records have other values in original.note", 1),
        ("1 records have other values in occurred_at, provenance", 1),
        ("1 records have other values in current", 1),
    }
    done = reparse(shop.spark, shop.config, ORDER)
    assert (done.records, done.unreadable) == (24, 0)
    assert run(shop, against_log=True).problems == []
    assert rows_of(shop, "current, original, provenance") == right
    assert rows_of(shop, RAW) == raw


def test_records_that_are_archived_meanwhile_stay(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.write_orders(keys=9, versions=1)
    archiver = shop.archiver()
    archiver.step()

    def after_an_append(*given: Any) -> DataFrame:
        """The version to parse is chosen, and now the archive goes on, into the same files."""
        shop.write_orders(keys=9, versions=1, first=2)
        archiver.step()
        shop.spark.sql(f"OPTIMIZE {table_of(shop)}")
        return conformed(*given)

    monkeypatch.setattr("everstate.pipeline.archiving.reparse.conformed", after_an_append)
    done = reparse(shop.spark, shop.config, ORDER)
    assert done.records == 9
    shop.write_orders(keys=9, versions=1, first=3)
    archiver.step()
    report = run(shop, against_log=True)
    assert (report.problems, report.rows, report.compared_with_messages) == ([], 27, 27)


class WithTill(Order):
    till: str | None = None


@pytest.mark.full
def test_after_a_change_of_the_model_other_programs_see_its_new_field(shop: Shop) -> None:
    later = EntityType("order", WithTill, "order_id")
    sent = WithTill(order_id="o1", amount=1, note="ü", till="t-1")
    key, value, headers = ChangeCodec(later).encode(change("o1", 1, current=sent))
    shop.write([shop.record(change("o2", 1))])
    record = shop.record(change("o1", 1), key=key, value=value, headers=headers)
    shop.write([record, shop.record(change("o3", 1), value=b"{}")])
    shop.archiver().catch_up()
    assert run(shop, later).compared_with_messages == 0
    assert "till" not in shop.spark.sql(f"SELECT current.* FROM {table_of(shop)}").columns
    done = reparse(shop.spark, shop.config, later)
    assert (done.records, done.unreadable) == (3, 1)
    assert rows_of(shop, "key, current.till") == [(None, None), ("o1", "t-1"), ("o2", None)]
    report = run(shop, later, against_log=True)
    assert (report.problems, report.compared_with_messages) == ([], 2)
    read = read_archive(shop.spark, shop.config, later)
    assert read.where("reason IS NULL").count() == 2


class AmountText(BaseModel):
    order_id: str
    amount: str
    note: str | None = None


def test_no_column_loses_its_values_because_a_field_has_another_type(shop: Shop) -> None:
    shop.write_orders(keys=3, versions=1)
    shop.archiver().step()
    before = rows_of(shop, "current.amount")
    with pytest.raises(ArchiveError, match=r"amount \(bigint, now string\).* nothing was changed"):
        reparse(shop.spark, shop.config, EntityType("order", AmountText, "order_id"))
    assert rows_of(shop, "current.amount") == before == [(1,), (1,), (1,)]


class Stay(BaseModel):
    stay_id: str
    price: Annotated[Decimal, Field(max_digits=30, decimal_places=12)] | None = None
    rate: float | None = None
    arrives: datetime | None = None
    extras: dict[str, dict[str, list[int]]] | None = None
    tags: list[dict[str, float]] | None = None


STAY = EntityType("stay", Stay, "stay_id")


PLANTED = (
    ("price", "CAST(1.000000000002 AS DECIMAL(30, 12))"),
    ("rate", "CAST('Infinity' AS DOUBLE)"),
    ("arrives", "current.arrives + INTERVAL '1' MICROSECOND"),
    ("extras", "map('b', map('x', array(1L, 3L)), 'a', map('y', array(2L)))"),
    ("extras", "map('a', map('y', array(2L)))"),
    ("tags", "array(map('z', 1.25D), map('z', 1.5D))"),
)


def test_values_of_every_kind_are_compared(spark: SparkSession, tmp_path: Path) -> None:
    """Record 0 is right, and each other one has another value in one field."""
    state = Stay(
        stay_id="s1",
        price=Decimal("1.000000000001"),
        rate=0.1,
        arrives=datetime(2026, 3, 1, 12, 0, 0, 1, UTC),
        extras={"b": {"x": [1, 2]}, "a": {"y": [2]}},
        tags=[{"z": 1.5}, {"z": 1.25}],
    )
    made = change("s1", 1, entity="stay", current=state)
    key, value, _ = ChangeCodec(STAY).encode(made)
    now = datetime(2026, 3, 2, tzinfo=UTC)
    fields = {"key": key, "value": value, "topic": "t.g1", "partition": 0, "timestamp": now}
    records = spark.createDataFrame(
        [
            tuple(
                {**fields, "offset": offset, "timestampType": 0, "headers": None}[name]
                for name in SOURCE_SCHEMA.names
            )
            for offset in range(1 + len(PLANTED))
        ],
        SOURCE_SCHEMA,
    )
    parse(records, STAY).write.parquet(str(tmp_path / "archived"))
    archived = spark.read.parquet(str(tmp_path / "archived"))
    assert compared(archived, STAY) == (7, [])
    current = F.col("current")
    for offset, (column, other) in enumerate(PLANTED, 1):
        planted = F.col("current").withField(column, F.expr(other))
        current = F.when(F.col("offset") == offset, planted).otherwise(current)
    count, found = compared(archived.withColumn("current", current), STAY)
    assert count == 7
    assert {(each.columns, each.count) for each in found} == {
        *((("current.price",), 1), (("current.rate",), 1), (("current.arrives",), 1)),
        *((("current.extras",), 2), (("current.tags",), 1)),
    }
