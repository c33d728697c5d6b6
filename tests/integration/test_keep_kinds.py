"""Views of every kind through the whole pipeline: kept, built again, proved, and spoiled (C18)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from random import Random
from typing import Any

import psycopg
import pytest
from keep_cases import Together, World, drain
from pyspark.sql import SparkSession

from everstate.changes.tokens import parse_token
from everstate.config import Config
from everstate.log.producer import Producer
from everstate.log.record import OutRecord
from everstate.pipeline.proof.as_read import read_differently
from everstate.pipeline.proof.verify import verify_views
from everstate.pipeline.requests.moment import Moment
from everstate.pipeline.requests.past import Past
from everstate.serving.snapshots import read_snapshot
from everstate.views.changing import ask_rebuild
from everstate.views.control import Control
from kind_app import kinds_app
from kind_cases import sale_story, shop_story
from kind_oracle import CASES, read_wrongly
from kinds_rig import Story, change_of

pytestmark = pytest.mark.settings(archive={"trigger_s": 1})

SPOILED = {
    "extremes": "UPDATE {} SET n = n + 1 WHERE slot = (SELECT max(slot) FROM {})",
    "different": "DELETE FROM {} WHERE ctid = (SELECT max(ctid) FROM {} WHERE slot > 0)",
    "dearest": "UPDATE {} SET c1 = -1 WHERE ctid = (SELECT min(ctid) FROM {})",
    "newest_of_region": "DELETE FROM {} WHERE ctid = (SELECT min(ctid) FROM {})",
    "ratios": "UPDATE {} SET a0 = a0 + 0.001 WHERE ctid = (SELECT min(ctid) FROM {})",
    "by_hour": "UPDATE {} SET g0 = g0 + interval '7 minutes'",
    "moves": "UPDATE {} SET c2 = 'nobody' WHERE ctid = (SELECT min(ctid) FROM {})",
    "counted_late": "UPDATE {} SET a0 = a0 + 1 WHERE ctid = (SELECT min(ctid) FROM {})",
    "found": "UPDATE {} SET c1 = 'south' WHERE ctid = (SELECT min(ctid) FROM {})",
    "active": "UPDATE {} SET activity = activity + interval '1 second'",
    "by_city": "UPDATE {} SET n = n + 1",
    "stays": "UPDATE {} SET times = times + 1",
    "maybe_with_shop": "UPDATE {part} SET c2 = NULL",
    "shops_over_time": "UPDATE {part} SET as_of = as_of + interval '1 second'",
}
"""A defect in the table of one view of each kind, or in that of the view it is read from."""

PAST = (
    *("dearest", "newest_of_region", "hopping", "counted_late", "active"),
    *("shops_over_time", "dearest_with_shop", "by_city", "stays"),
)
"""Views whose rows at another moment are computed in different ways."""


class Kinds:
    """The log, database and archive of sales and shops, and what has happened to them."""

    def __init__(self, config: Config, spark: SparkSession) -> None:
        self.app, self.config, self.spark = kinds_app(), config, spark
        self.worlds = {n: World(config, spark, self.app, n) for n in ("sale", "shop")}
        self.told = {"sale": Story("sale", 1), "shop": Story("shop", 1)}

    @property
    def sales(self) -> World:
        return self.worlds["sale"]

    def send(self, *stories: Story) -> None:
        """Send what happens next."""
        with Producer(self.config) as producer:
            for more in stories:
                world = self.worlds[more.entity]
                entity_type = self.app.entity_type(more.entity)
                records = []
                for step in more.steps:
                    encoded = world.codec.encode(change_of(entity_type, 1, step))
                    records.append(OutRecord(world.topic, *encoded))
                producer.send_many(records)
                self.told[more.entity].steps += more.steps
            producer.flush(30)

    def proofs(self, names: Iterable[str] | None = None) -> dict[str, str]:
        """Outcome of the proof of views, with how the SQL of each compares; ``None``: of all."""
        reports = verify_views(self.spark, self.config, self.app, names)
        return {report.name: f"{report.outcome}, {report.as_read}" for report in reports}

    def positions(self, name: str) -> dict[str, int]:
        """How many changes of each entity type a snapshot of a view has."""
        token = parse_token(read_snapshot(self.config, self.app, name).token)
        return {
            entity: sum(spot.next_offset for spot in position.spots.values())
            for entity, position in token.positions.items()
        }

    def past_differs(self, names: Iterable[str]) -> dict[str, Any]:
        """Views that `views query` shows otherwise than their readers see them."""
        past, found = Past(self.spark, self.config, self.app, Moment()), dict[str, Any]()
        for name in names:
            asked = past.view(name)
            columns = ", ".join(f'"{column}"' for column in asked.columns)
            shown = self.sales.rows(f"SELECT {columns} FROM {name}")
            rows = [tuple(row.values()) for row in asked.toArrow().to_pylist()]
            if different := read_differently(rows, shown):
                found[name] = different
        return found

    def spoil(self, name: str, statement: str) -> None:
        """Change the table of a view behind everybody's back."""
        query = "SELECT name, name || '__v' || version FROM view WHERE published"
        table = dict(self.sales.rows(query))
        inputs = self.app.views[name].inputs
        text = statement.replace("{part}", table[inputs[0]]) if inputs else statement
        self.sales.change_tables(text.replace("{}", table[name]))


@pytest.fixture
def kinds(config: Config, spark: SparkSession) -> Kinds:
    return Kinds(config, spark)


@pytest.fixture
def keeper(kinds: Kinds) -> Iterator[Together]:
    kept = kinds.sales.keeper(batch_changes_max=17)
    yield kept
    kept.close()


def halves(told: Story) -> tuple[Story, Story]:
    middle = len(told.steps) // 2
    return (
        Story(told.entity, told.partitions, told.steps[:middle]),
        Story(told.entity, told.partitions, told.steps[middle:]),
    )


@pytest.mark.full
@pytest.mark.timeout(600)
def test_law_6_views_of_every_kind_equal_their_batch_and_defects_are_found(
    kinds: Kinds, keeper: Together
) -> None:
    """Kept from the first change; built again while changes come; then each is spoiled."""
    random = Random(5)
    sales, shops = halves(sale_story(random, 60)), halves(shop_story(random))
    kinds.send(sales[0], shops[0])
    drain(keeper)
    assert kinds.sales.rows("SELECT name, error FROM view WHERE status <> 'live'") == []
    assert read_wrongly(kinds.sales.rows, kinds.told) == {}
    with psycopg.connect(kinds.config.views_dsn, autocommit=True) as connection:
        control = Control(connection, kinds.config.views.schema_name)
        for plan in kinds.app.views.values():
            if not plan.inputs:
                ask_rebuild(control, plan.name)
    kinds.send(sales[1], shops[1])
    for world in kinds.worlds.values():
        world.archive()
    drain(keeper)
    assert read_wrongly(kinds.sales.rows, kinds.told) == {}
    proofs = kinds.proofs()
    assert {name: how for name, how in proofs.items() if not how.startswith("holds, ")} == {}
    assert sum(how == "holds, equal" for how in proofs.values()) > len(CASES) // 2, proofs
    everything = {name: len(told.steps) for name, told in kinds.told.items()}
    assert kinds.positions("with_shop") == kinds.positions("by_city") == everything
    assert kinds.positions("shops_over_time") == {"sale": everything["sale"]}
    assert kinds.past_differs(PAST) == {}
    for name, statement in SPOILED.items():
        kinds.spoil(name, statement)
    sound = ("overall", "top_regions", "with_shop")
    found = kinds.proofs([*SPOILED, *sound])
    differing = {name for name, how in found.items() if how.startswith("differs")}
    assert set(SPOILED) - differing == set()
    assert differing - set(SPOILED) == set()
    # One that cannot be read at all does not end the proofs of others.
    kinds.spoil("by_city", "ALTER TABLE {} RENAME TO gone")
    found = kinds.proofs(["by_city", "with_shop"])
    assert [how.partition(",")[0] for how in found.values()] == ["differs", "holds"]
