"""Where the keeper reads from when the log no longer has all, and what stops which view."""

from __future__ import annotations

import re
from contextlib import closing
from typing import Any

import msgspec
import pytest
from keep_cases import World, drain, orders_app

from everstate.errors import DataLoss, LogIdentityChanged, TopicResized
from everstate.log.positions import Range
from everstate.log.topics import Topics
from everstate.pipeline.keeping.spans import Archived, Sources, divided
from kit.models import Seat
from kit.settings import altered
from log_cases import grow, lose_records

PARTS = ("parts", "SELECT sum(parts) AS parts, count(*) AS orders FROM ordr")


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
    with pytest.raises(DataLoss, match="no record was skipped"):
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
    asked = keeper.trailer._reader.sources(
        "ordr", world.topic, {partition: Range(0, end) for partition, end in world.ends().items()}
    )
    assert asked.archive == {lost: Range(0, archived[lost])}
    assert asked.log.keys() == archived.keys() - {lost}
    drain(keeper)
    assert world.rows("SELECT parts, orders FROM parts") == [(sum(range(60)), 60)]
    assert [r.name for r in world.verify().values() if not r.holds] == []
    keeper.close()


def test_c8_what_the_log_lost_stops_its_entity_type_alone_until_the_archive_has_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstate.pipeline.keeping.keep._CORE_RETRY_S", (0.0,))
    world.app.entity("seat", key="seat_id")(Seat)
    keeper = world.keeper()
    world.send(*[world.put(f"o-{n}", "NL", "5.00") for n in range(20)])
    seats = World(world.config, world.spark, world.app, "seat")
    seats.send(seats.change("1", Seat(seat_id="1")))
    forgotten = world.ends()
    with monkeypatch.context() as late:
        # The archiver had read them, and has not committed yet.
        late.setattr(
            "everstate.pipeline.keeping.spans.ArchivedOffsets.of", lambda *_: Archived({}, {})
        )
        late.setattr("everstate.log.positions.Offsets.beginnings", _begins_at(world, forgotten))
        assert drain(keeper)[0] == 1
    position = "SELECT sum(next_offset) FROM position WHERE view = 'ordr_latest'"
    assert world.rows(position) == [(0,)]
    reason = "SELECT error FROM view WHERE name = 'ordr_latest'"
    assert "neither in the log nor in the archive" in world.rows(reason)[0][0]
    world.archive()
    world.forget(forgotten)
    assert drain(keeper)[0] == 20
    assert world.rows(reason) == [(None,)]
    keeper.close()


def test_c8_a_topic_made_again_stops_its_entity_type_alone(world: World) -> None:
    world.app.entity("seat", key="seat_id")(Seat)
    seats = World(world.config, world.spark, world.app, "seat")
    keeper = world.keeper()
    world.send(world.put("o-1", "NL", "5.00"))
    seats.send(seats.change("1", Seat(seat_id="1")))
    assert drain(keeper)[0] == 2
    with Topics(world.config) as topics:
        topics.delete([world.topic])
        topics.ensure(["ordr"])
    world.send(world.put("o-1", "BE", "5.00"), world.put("o-2", "BE", "5.00"))
    seats.send(seats.change("2", Seat(seat_id="2")))
    assert drain(keeper)[0] == 1
    keeper.close()
    seats.send(seats.change("3", Seat(seat_id="3")))
    with closing(world.keeper()) as another:
        assert drain(another)[0] == 1
    assert world.rows("SELECT count(*) FROM seat") == [(3,)]
    assert world.rows("SELECT country, orders FROM by_country") == [("NL", 1)]
    ((reason,),) = world.rows("SELECT error FROM view WHERE name = 'ordr_latest'")
    assert re.search(r"Nothing was read or written.*log begin", reason)


def test_c8_a_view_that_is_behind_does_not_read_a_topic_made_again(world: World) -> None:
    world.send(*[world.put(f"o-{n}", "NL", "5.00") for n in range(9)])
    with closing(world.keeper()) as keeper:
        drain(keeper)
    world.app = orders_app(PARTS)
    keeper = world.keeper()
    assert keeper.builder.step() is not None  # without an archive it begins at offset 0
    with Topics(world.config) as topics:
        topics.delete([world.topic])
        topics.ensure(["ordr"])
    world.send(*[world.put(f"x-{n}", "NL", "5.00", parts=7) for n in range(90)])
    assert keeper.trailer.step() == 0
    assert world.rows("SELECT sum(next_offset) FROM position WHERE view = 'parts'") == [(0,)]
    ((reason,),) = world.rows("SELECT error FROM view WHERE name = 'parts'")
    assert "the stored positions belong to" in reason
    keeper.close()


def test_d22_an_entity_type_that_cannot_be_prepared_stops_alone(world: World) -> None:
    with closing(world.keeper()) as keeper:
        drain(keeper)
    world.change_tables("CREATE DOMAIN seat_latest__v1 AS int")
    world.app.entity("seat", key="seat_id")(Seat)
    world.send(world.put("o-1", "NL", "5.00"))
    with closing(world.keeper()) as keeper:
        assert drain(keeper)[0] == 1
    assert world.rows("SELECT country, orders FROM by_country") == [("NL", 1)]
    assert world.rows("SELECT count(*) FROM position WHERE entity = 'seat'") == [(0,)]


def test_the_error_of_an_earlier_start_is_gone_when_the_next_finds_nothing_wrong(
    world: World,
) -> None:
    with closing(world.keeper()) as keeper:
        world.send(world.put("o-1", "NL", "5.00"))
        drain(keeper)
    world.change_tables("UPDATE view SET error = 'its topic was another' WHERE kind = 'latest'")
    with closing(world.keeper()) as keeper:
        assert keeper.step() is None
    assert world.rows("SELECT error FROM view WHERE kind = 'latest'") == [(None,)]


def _begins_at(world: World, ends: dict[int, int]) -> Any:
    """As a broker answers that has deleted what lies before, in the log of orders."""
    return lambda _, topics: {
        (topic, partition): end if topic == world.topic else 0
        for topic in topics
        for partition, end in ends.items()
    }


@pytest.mark.full
def test_v12_a_topic_that_got_partitions_is_refused_and_the_proof_names_them(
    world: World,
) -> None:
    keeper = world.keeper()
    world.send(*[world.put(f"o-{n}", "NL", "5.00") for n in range(10)])
    drain(keeper)
    world.archive()
    partitions = len(world.ends())
    grow(world.config, world.topic, partitions + 2)
    world.send(*[world.put(f"x-{n}", "NL", "5.00") for n in range(40)])
    with pytest.raises(TopicResized, match=f"has {partitions + 2} partitions.* to {partitions}"):
        keeper.step()
    keeper.close()
    with pytest.raises(TopicResized, match="everstate log begin"):
        world.keeper()
    places = world.rows(
        "SELECT count(*), sum(next_offset) FROM position WHERE view = 'ordr_latest'"
    )
    assert places == [(partitions, 10)]
    for report in world.proofs():
        assert not report.holds
        assert f"{world.topic}[{partitions}] was added after the last read" in report.not_read[0]
    assert world.rows("SELECT orders FROM by_country") == [(10,)]


def test_c8_a_log_that_lost_its_end_is_data_loss_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = world.keeper()
    world.send(*[world.put("o-1", "NL", f"{n}.00") for n in range(1, 8)])
    drain(keeper)
    world.archive()
    lose_records(monkeypatch, world.config, world.topic)
    world.send(world.put("o-1", "BE", "8.00"))
    drain(keeper)
    ((reason,),) = world.rows("SELECT error FROM view WHERE name = 'ordr_latest'")
    assert re.search(r"ends at 1, and offsets 1 to 6 are lost.*log begin", reason)
    (report,) = [each for each in world.proofs() if each.name == "by_country"]
    assert not report.holds
    assert "ends at 1: the log has lost offsets 1 to 6" in report.not_read[0]
    # What the log takes next would hide the loss: this keeper does not try again.
    world.send(*[world.put("o-1", "BE", f"{n}.00") for n in range(9, 19)])
    drain(keeper)
    keeper.close()
    assert world.rows("SELECT sum(next_offset) FROM position WHERE view = 'ordr_latest'") == [(7,)]


def test_c8_the_views_of_one_prefix_are_not_kept_from_the_topics_of_another(world: World) -> None:
    keeper = world.keeper()
    world.send(*[world.put(f"o-{n}", "NL", "5.00") for n in range(20)])
    drain(keeper)
    keeper.close()
    other = World(altered(world.config, log={"prefix": f"{world.config.log.prefix}x"}), world.spark)
    other.send(*[other.put(f"o-{n}", "BE", "7.00") for n in range(20)])
    with pytest.raises(LogIdentityChanged, match=rf"{world.topic}; configured is {other.topic}"):
        other.keeper()
    assert world.rows("SELECT country, orders FROM by_country") == [("NL", 20)]


@pytest.mark.full
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
