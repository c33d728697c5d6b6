"""The audit: a right archive holds, and every planted defect is found (law 5, C26)."""

from __future__ import annotations

import shutil
import uuid

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from archive_cases import Shop, change
from everstate.archive import ArchiveLog, Ledger, table_path
from everstate.archive.sums import summed
from everstate.log.record import OutRecord
from everstate.pipeline.archiving.audit import AuditReport, audit
from kit.served_s3 import each_lake_in_full

pytestmark = each_lake_in_full


def run(shop: Shop, *, against_log: bool = False) -> AuditReport:
    return audit(shop.spark, shop.config, "order", against_log=against_log)


def rules(report: AuditReport) -> set[str]:
    return {problem.rule for problem in report.problems}


def path_of(shop: Shop) -> str:
    return table_path(shop.config, "order")


def test_a_right_archive_holds_and_what_was_not_served_is_proved(shop: Shop) -> None:
    orders = [shop.record(change(f"o{i}", 1)) for i in range(30)]
    shop.transact(orders[:15], commit=True)
    shop.transact([shop.record(change(f"x{i}", 1)) for i in range(12)], commit=False)
    shop.archiver().step()
    shop.transact(orders[15:], commit=True)
    shop.write([OutRecord(topic=shop.topic, key=b"o1", value=None)])
    shop.archiver(batch_changes_max=5).catch_up()
    report = run(shop, against_log=True)
    assert report.problems == []
    assert report.holds
    assert (report.rows, report.unreadable, report.changes, report.keys) == (31, 1, 30, 30)
    assert report.compared_with_log == 31
    # Each transaction writes a marker in each partition that it touched.
    assert 3 <= report.marker_offsets <= 9
    assert (report.aborted_offsets, report.unproved_offsets) == (12, 0)
    assert {run.kind for run in report.runs} >= {"aborted"}


@pytest.mark.full
def test_after_the_log_is_gone_the_same_offsets_are_told_as_not_proved(shop: Shop) -> None:
    shop.transact([shop.record(change(f"o{i}", 1)) for i in range(9)], commit=True)
    shop.write_orders(keys=9, versions=1, first=2)
    shop.archiver().step()
    shop.topics.delete([shop.topic])
    report = run(shop)
    assert report.problems == []
    assert report.unproved_offsets == 3
    assert report.marker_offsets == 0


def test_a_hole_is_found_and_its_record_is_found_in_the_log(shop: Shop) -> None:
    shop.write_orders(keys=12, versions=1)
    shop.archiver().step()
    with summed(path_of(shop)):
        shop.table().delete("partition = 1 AND offset = 2")
    report = run(shop)
    assert rules(report) == {"rows", "lost"}
    lost = next(problem for problem in report.problems if problem.rule == "lost")
    assert lost.where == "g1[1]"
    assert ": 2" in lost.message


def test_rows_that_are_there_twice_or_outside_of_the_committed_ranges_are_found(
    shop: Shop,
) -> None:
    shop.write_orders(keys=12, versions=1)
    shop.archiver().step()
    table = shop.table()
    row = table.to_pyarrow_dataset().to_table().slice(0, 1)
    with summed(path_of(shop)):
        write_deltalake(table, row, mode="append")
    found = rules(run(shop))
    assert found >= {"rows", "offset twice"}
    assert "outside" not in found
    at = row.schema.get_field_index("offset")
    moved = row.set_column(at, row.schema.field(at), pa.array([10_000_000], pa.int64()))
    with summed(path_of(shop)):
        write_deltalake(table, moved, mode="append")
    assert "outside" in rules(run(shop))


def test_a_changed_record_is_found_against_the_log(shop: Shop) -> None:
    shop.write_orders(keys=12, versions=1)
    shop.archiver().step()
    with summed(path_of(shop)):
        shop.table().update(
            updates={"raw_value": "arrow_cast('{}', 'Binary')"},
            predicate="partition = 0 AND offset = 1",
        )
        shop.table().update(
            updates={"timestamp": "timestamp + INTERVAL '1 hour'"},
            predicate="partition = 1 AND offset = 2",
        )
    assert run(shop).holds
    report = run(shop, against_log=True)
    found = [(problem.rule, problem.where, problem.count) for problem in report.problems]
    assert found == [("differs", "g1[0]", 1), ("differs", "g1[1]", 1)]


@pytest.mark.full
def test_c26_the_audit_remembers_commits_that_the_table_forgot(shop: Shop) -> None:
    for version in (1, 2, 3):
        shop.write_orders(keys=9, versions=1, first=version)
        shop.archiver().step()
    Ledger(shop.config, "order").sync(ArchiveLog(shop.config, "order"))
    shop.table().create_checkpoint()
    log = shop.folder / "_delta_log"
    for version in (0, 1, 2):
        (log / f"{version:020d}.json").unlink()
    report = run(shop)
    assert report.problems == []
    assert report.commits == 4
    shutil.rmtree(shop.lake.folder / "_ledger" / "order")
    assert "ranges" in rules(run(shop))


def test_versions_that_are_not_dense_and_chains_that_break_are_found(shop: Shop) -> None:
    other = uuid.uuid4()
    wrong = change("chain", 2, original=change("chain", 5).current)
    shop.write(
        [
            shop.record(record)
            for record in (
                change("good", 1),
                change("good", 2),
                change("good", 2),
                change("gap", 1),
                change("gap", 3),
                change("late", 2),
                change("conflict", 1),
                change("conflict", 1, id=other),
                change("conflict", 2),
                change("chain", 1),
                wrong,
                change("order", 2),
                change("order", 1),
            )
        ]
    )
    shop.archiver().step()
    report = run(shop)
    assert (report.duplicates, report.conflicts) == (1, 1)
    assert report.conflict_rows[0]["id"] == str(other)
    found = {(problem.rule, problem.where.split(" ")[0]) for problem in report.problems}
    assert found == {
        ("version gap", "gap"),
        ("version gap", "late"),
        ("chain", "chain"),
        ("order", "order"),
    }
