"""Views in the lake keep the contract of views in another store, and have all states."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest
from keep_cases import World, drain
from store_kept_contract import StoreChangedContract, StoreKeptContract

from everstate.pipeline.keeping.elsewhere import upkeep
from everstate.serving import Reader
from everstate.views.changing import ask_rebuild
from everstate.views.control import Control
from kit.served_lake import ServedLake, ServedLakeOnS3
from kit.served_s3 import ServedS3

STATES: Final = "states"
_HISTORY: Final = (
    "SELECT key, version, as_of, ends, country FROM (SELECT key, version, as_of, state,"
    " state ->> 'country' AS country,"
    " lead(as_of) OVER (PARTITION BY key ORDER BY version) AS ends FROM ordr_history) AS every"
    " WHERE (state ->> 'amount')::numeric >= 100"
)
"""The states of large orders, from the history in PostgreSQL."""


@pytest.fixture
def served(tmp_path: Path) -> ServedLake:
    return ServedLake(tmp_path)


class TestLakeKept(StoreKeptContract):
    """As every store."""


@pytest.mark.full
class TestLakeChanged(StoreChangedContract):
    """As every store."""


@pytest.mark.full
class TestLakeOnS3(StoreKeptContract, StoreChangedContract):
    """The same where archive and views are in an object store."""

    @pytest.fixture
    def served(self, s3: ServedS3, request: pytest.FixtureRequest) -> ServedLake:
        # A build waits for the archive: where the store is away, the archive is on disk.
        return ServedLakeOnS3(s3, holds_archive="away" not in request.node.name)


def test_all_states_are_kept_built_proved_and_read_by_spark(
    world: World, control: Control, served: ServedLake
) -> None:
    world.config = served.settings(world.config)
    sql = "SELECT country, amount FROM ordr_history WHERE amount >= 100"
    world.app.view(STATES, sql=sql, store="lake")

    def shown() -> list[tuple[Any, ...]]:
        """What Spark finds in the folder, once the pipeline's upkeep has run."""
        upkeep(world.config, "lake")
        spark, place = world.spark, served.table(world.config, STATES)
        found = spark.sql(
            f"SELECT _key, _version, valid_from, valid_to, country FROM delta.`{place}`"
        )
        return sorted(tuple(row.values()) for row in found.toArrow().to_pylist())

    def wanted() -> list[tuple[Any, ...]]:
        return sorted(world.rows(_HISTORY))

    with closing(world.keeper()) as keeper:
        world.send(*[world.put(f"o-{n}", "NL", f"{90 + n}.25") for n in range(20)])
        drain(keeper)
        assert shown() == wanted() != []
        world.archive()
        world.send(
            *[world.put(f"o-{n}", "BE", f"{85 + n}.00") for n in range(5, 20)],
            *[world.change(f"o-{n}", None) for n in range(17, 20)],
            world.put("o-19", "FR", "500.00"),
        )
        drain(keeper)
        assert shown() == wanted()
        world.archive()
        assert [name for name, report in world.verify().items() if not report.holds] == []
        ask_rebuild(control, STATES)
        drain(keeper)
        assert [row.version for row in control.versions(STATES) if row.published] == [2]
        assert shown() == wanted()
        world.send(world.put("o-19", "DE", "600.00"), world.put("o-1", "DE", "700.00"))
        drain(keeper)
        assert shown() == wanted()
        world.archive()
        assert world.proof(STATES).holds
    with Reader(world.config, world.app) as reader:
        columns, rows = reader.rows(STATES, limit=None)
        assert columns == ("_key", "country", "amount", "valid_from", "valid_to", "_version")
        assert len(rows) == len(wanted())
    served.spoil(world.config, STATES, "o-19", "valid_to", "2030-01-01T00:00:00Z")
    assert (world.proof(STATES).outcome, world.proof(STATES).different_rows) == ("differs", 4)
