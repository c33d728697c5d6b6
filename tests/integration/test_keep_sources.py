"""Where the keeper reads from when the log no longer has all, and what stops which view."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from keep_cases import World, drain, orders_app
from pyspark.sql import SparkSession

from everstate.config import Config, load
from everstate.errors import DataLoss
from everstate.log.positions import Range
from everstate.pipeline.spans import Archived, Sources, divided

PARTS = ("parts", "SELECT sum(parts) AS parts, count(*) AS orders FROM ordr")


@pytest.fixture
def world(
    stack_config: Config,
    stack: Any,
    topic_prefix: str,
    database: str,
    spark: SparkSession,
    tmp_path: Path,
) -> World:
    config = load(
        tmp_path,
        log={"bootstrap_servers": stack.bootstrap_servers, "prefix": topic_prefix},
        store={"dsn": database},
        archive={"trigger_s": 1},
        pipeline=stack_config.pipeline.model_dump(),
    )
    return World(config, spark)


def test_c27_a_range_is_cut_where_the_archive_ends_and_only_where_the_log_lost_it() -> None:
    spans = {0: Range(0, 100), 1: Range(5, 50), 2: Range(0, 10)}
    archived = Archived(begins={0: 0, 1: 0, 2: 0}, position={0: 94, 1: 40, 2: 9})
    found = divided("t", spans, {0: 50, 1: 5, 2: 0}, archived)
    assert found == Sources(log={1: Range(5, 50), 2: Range(0, 10)}, archive={0: Range(0, 94)})
    assert found.spans[0] == Range(0, 94)


@pytest.mark.parametrize(("begins", "position"), [({0: 0}, {0: 20}), ({0: 30}, {0: 90}), ({}, {})])
def test_c8_what_neither_log_nor_archive_has_is_data_loss(
    begins: dict[int, int], position: dict[int, int]
) -> None:
    """The archive ends before it, began after it, or was never written."""
    with pytest.raises(DataLoss, match="nothing was skipped"):
        divided("t", {0: Range(20, 90)}, {0: 60}, Archived(begins, position))


def test_c27_a_new_view_reads_the_archive_to_its_end_and_then_the_log(world: World) -> None:
    keeper = world.keeper()
    world.send(*[world.put(f"o-{n}", "NL", "5.00", parts=n) for n in range(30)])
    drain(keeper)
    world.archive()
    archived = world.ends()
    # The archive trails: what comes now is in the log alone.
    world.send(*[world.put(f"o-{n}", "BE", "5.00", parts=n) for n in range(60)])
    drain(keeper)
    keeper.close()
    lost = max(archived, key=lambda partition: archived[partition])
    world.forget({lost: archived[lost] - 1})
    world.app = orders_app(PARTS)
    keeper = world.keeper()
    (unit,) = keeper._units()
    assert unit.sources.archive == {lost: Range(0, archived[lost])}
    assert unit.sources.log.keys() == archived.keys() - {lost}
    drain(keeper)
    assert world.rows("SELECT parts, orders FROM parts") == [(sum(range(60)), 60)]
    assert [r.name for r in world.verify().values() if not r.holds] == []
    keeper.close()


def test_c8_the_keeper_raises_what_was_lost_after_it_waited_for_the_archive(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = world.keeper()
    world.send(*[world.put(f"o-{n}", "NL", "5.00") for n in range(20)])
    world.forget(world.ends())
    monkeypatch.setattr("everstate.pipeline.keep._ARCHIVE_SPARE_S", 0.0)
    with pytest.raises(DataLoss, match="neither in the log nor in the archive"):
        keeper.run(threading.Event())
    assert world.rows("SELECT sum(next_offset) FROM position") == [(0,)]
    keeper.close()


def test_c19_what_the_store_refused_is_not_expected_by_the_proof(world: World) -> None:
    keeper = world.keeper()
    good, bad, later = (world.put("o-1", "NL", f"{n}.00") for n in range(1, 4))
    # jsonb's numbers end where numeric does; the parser does not look at unknown fields.
    unstorable = (bad.value or b"").replace(b'"country":"NL"', b'"country":"NL","x":1e200000')
    assert unstorable != bad.value
    world.send(
        good, msgspec.structs.replace(bad, value=unstorable), later, world.put("o-2", "BE", "5.00")
    )
    assert drain(keeper) == (2, 0, 1, 1)
    assert [r.name for r in world.verify().values() if not r.holds] == []
    keeper.close()
