"""Raw derived topics on a real Kafka and PostgreSQL: every change of the log, and none twice."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jsonpatch
import pytest
from raw_child import Parcel, Size, app

from everstate.app import App
from everstate.changes import ChangeCodec, Provenance
from everstate.changes.derived import Derivation, notices_of, patch_of
from everstate.changes.triggers import when
from everstate.config import Config
from everstate.errors import LogTruncated, NotFound, Unavailable
from everstate.log.derived import DerivedNote, DerivedReader, DerivedRecord
from everstate.log.positions import Offsets
from everstate.log.producer import Producer
from everstate.log.record import OutRecord
from everstate.log.topics import TopicNames, Topics
from everstate.pipeline.derive.deriver import Deriver
from everstate.postgres import connect_views
from everstate.views.changing import ask_rebuild
from everstate.views.control import Control, opened_control
from everstate.views.tables import latest_of
from kit.changes import change_of
from kit.waiting import started
from log_cases import lose_records

pytestmark = pytest.mark.settings(log={"partitions": 1})

NAME = "parcel_patches"
DESK = Provenance(api_version="v1", service_name="desk", identifier="d")


class Parcels:
    """A log of parcels, and a core that has judged none of them."""

    def __init__(self, config: Config, of: App = app) -> None:
        self.config, self.app = config, of
        self.codec = ChangeCodec(of.entity_type("parcel"))
        self.topic = TopicNames(config.log.prefix).changes("parcel")
        self.states: dict[str, tuple[int, Parcel | None]] = {}
        with Topics(config) as topics:
            topics.ensure(["parcel"])
        with opened_control(config) as control:
            control.install()
            control.open_core("parcel", [0])

    def change(self, key: str, parcel: Parcel | None, *, skipped: int = 0) -> OutRecord:
        version, before = self.states.get(key, (0, None))
        version += 1 + skipped
        self.states[key] = (version, parcel)
        made = change_of("parcel", key, version, parcel, before, who=DESK)
        return OutRecord(self.topic, *self.codec.encode(made))

    def some(self, count: int) -> list[OutRecord]:
        found = []
        for number in range(count):
            key, size = f"p{number % 5}", Size(length=number) if number % 3 else None
            parcel = Parcel(parcel_id=key, place=f"dock {number % 4}", size=size, marks=[number])
            found.append(self.change(key, parcel))
        return found

    def send(self, *records: OutRecord) -> None:
        with Producer(self.config) as producer:
            producer.send_many(records)
            producer.flush(30)

    def deriver(self, derivation: Derivation | None = None) -> Deriver:
        made = Deriver(self.config, self.app, derivation or self.app.derivations[NAME])
        made.open()
        return made

    def settle(self, deriver: Deriver) -> None:
        """Let a topic take all that the log has."""
        with Offsets(self.config) as offsets:
            end = offsets.stable_ends([self.topic])[self.topic, 0]
        deadline = time.monotonic() + 60
        while not deriver._readers or any(r.vector[0] < end for r in deriver._readers.values()):
            assert time.monotonic() < deadline
            deriver.step()

    def read(self, name: str = NAME, **options: Any) -> list[DerivedRecord]:
        with DerivedReader(self.config, name, is_raw=True, **options) as reader:
            return list(reader.records(idle_s=0.5))


@pytest.fixture
def parcels(config: Config) -> Parcels:
    return Parcels(config)


def versions(records: list[DerivedRecord]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for record in records:
        found.setdefault(record.key or "", []).append(record.version)
    return found


@pytest.fixture
def control(config: Config) -> Iterator[Control]:
    with connect_views(config.views_dsn) as connection:
        yield Control(connection, config.views.schema_name)


def test_a_raw_topic_has_every_change_whatever_the_core_will_say_of_it(parcels: Parcels) -> None:
    """Also one that waits for a missing version, or comes twice; what is no change gives none."""
    first = parcels.some(5)
    waiting = parcels.change("p0", Parcel(parcel_id="p0", place="ship"), skipped=1)
    odd = {**json.loads(first[1].value or b""), "currentEntityState": 7}
    strange = [
        OutRecord(parcels.topic, b"p1", b"no JSON"),
        OutRecord(parcels.topic, b"p1", b"{}"),
        OutRecord(parcels.topic, b"p1", None),
        OutRecord(parcels.topic, b"p1", json.dumps(odd).encode()),
    ]
    last = parcels.change("p1", None)
    parcels.send(*first, waiting, *strange, first[2], last)
    with closing(parcels.deriver()) as deriver:
        parcels.settle(deriver)
    with DerivedReader(parcels.config, NAME) as reader:
        found = list(reader.records(idle_s=0.5))
    assert [(each.key, each.version) for each in found] == [
        *((f"p{n}", 1) for n in range(5)),
        *(("p0", 3), ("p2", 1), ("p1", 2)),
    ]
    messages = [json.loads(each.value or b"") for each in (*first, waiting, last)]
    sent = {message["id"]: message for message in messages}
    for each in found:
        old, new = (sent[each.id][f"{side}EntityState"] for side in ("original", "current"))
        assert jsonpatch.JsonPatch(each.value).apply(old) == new
        assert each.provenance["serviceName"] == "desk"
    assert len(parcels.read()) == len(found) - 1, "readers skip the change that comes twice"


def test_triggers_and_notices_of_raw_topics(config: Config) -> None:
    mine = App("raw")
    mine.entity("parcel", key="parcel_id", history=False)(Parcel)
    fired = when("place").changes(to="ship")
    mine.derive("shipped", patch_of("parcel"), raw=True, when=fired)
    mine.derive("gone", notices_of("parcel"), raw=True)
    parcels = Parcels(config, mine)
    places = ("dock", "ship", "ship", None)
    states = [place and Parcel(parcel_id="p", place=place, marks=[1]) for place in places]
    parcels.send(*(parcels.change("p", state or None) for state in states))
    for derivation in mine.derivations.values():
        with closing(parcels.deriver(derivation)) as deriver:
            parcels.settle(deriver)
    (shipped,) = parcels.read("shipped")
    assert shipped.value == [{"op": "replace", "path": "/place", "value": "ship"}]
    gone = parcels.read("gone")
    assert [each.version for each in gone] == [2, 3, 4]
    assert gone[2].value["new"] is None
    assert gone[2].value["old"]["place"] == "ship"


def test_a_raw_topic_waits_until_the_pipeline_has_made_its_tables(config: Config) -> None:
    with (
        closing(Deriver(config, app, app.derivations[NAME])) as deriver,
        pytest.raises(Unavailable, match="has not created the tables"),
    ):
        deriver.open()


def test_c8_no_raw_topic_is_read_on_in_a_log_that_lost_its_end(
    parcels: Parcels, monkeypatch: pytest.MonkeyPatch
) -> None:
    parcels.send(*parcels.some(5))
    with closing(parcels.deriver()) as deriver:
        parcels.settle(deriver)
    lose_records(monkeypatch, parcels.config, parcels.topic)
    with (
        closing(parcels.deriver()) as deriver,
        pytest.raises(LogTruncated, match=f"derived topic {NAME}"),
    ):
        deriver.step()


def test_a_raw_version_that_was_published_before_a_kill_is_published_in_the_registry(
    parcels: Parcels, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    def rows() -> list[tuple[bool, str]]:
        return [(row.published, row.status) for row in control.versions(NAME)]

    def steps() -> None:
        with closing(parcels.deriver()) as deriver:
            parcels.settle(deriver)
            deriver.step()

    parcels.send(*parcels.some(5))
    with monkeypatch.context() as patched:
        patched.setattr(Control, "swap_published", killed)
        with pytest.raises(KeyboardInterrupt):
            steps()
    assert rows() == [(False, "building")]
    steps()
    assert rows() == [(True, "live")]
    assert versions(parcels.read()) == {f"p{n}": [1] for n in range(5)}


def test_readers_go_on_in_a_raw_topic_that_is_rebuilt(parcels: Parcels, control: Control) -> None:
    parcels.send(*parcels.some(10))
    with closing(parcels.deriver()) as deriver:
        parcels.settle(deriver)
        deriver.step()
        with DerivedReader(parcels.config, NAME, is_raw=True) as reader:
            assert len(list(reader.records(idle_s=0.5))) == 10
            token = reader.token
        assert ask_rebuild(control, NAME).version == 2
        while [row.published for row in control.versions(NAME)] != [False, True]:
            parcels.settle(deriver)
            deriver.step()
        parcels.send(*parcels.some(5))
        parcels.settle(deriver)
        assert {e.version for e in parcels.read(token=token)} == {3}
        assert versions(parcels.read()) == {f"p{n}": [1, 2, 3] for n in range(5)}


def test_a_topic_that_an_earlier_release_wrote_goes_on_where_the_registry_says(
    parcels: Parcels, control: Control
) -> None:
    """Its records came from a query of Spark, which noted no position in the log."""
    parcels.send(*parcels.some(10))
    with closing(parcels.deriver()) as deriver:
        parcels.settle(deriver)
        deriver.step()
        deriver._publish([], DerivedNote(published=1))
    assert control.vector(NAME, 1)[0] >= 10
    parcels.send(*parcels.some(5))
    with closing(parcels.deriver()) as deriver:
        parcels.settle(deriver)
    assert versions(parcels.read()) == {f"p{n}": [1, 2, 3] for n in range(5)}


def test_the_core_may_be_ahead_of_a_raw_topic_and_behind_it(
    parcels: Parcels, control: Control
) -> None:
    """Its position holds back what the core trims, as that of any view does."""
    parcels.send(*parcels.some(10))
    for moved in (10, 3):
        values = (moved, latest_of("parcel"))
        control.run("UPDATE {position} SET next_offset = %s WHERE view = %s", values)
        with closing(parcels.deriver()) as deriver:
            parcels.settle(deriver)
        assert control.vector(NAME, 1)[0] >= 10
    assert versions(parcels.read()) == {f"p{n}": [1, 2] for n in range(5)}


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_raw_topic_has_each_change_though_its_process_is_killed(parcels: Parcels) -> None:
    """The role itself, in a process of its own."""
    children: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        children.append(started(Path(__file__).with_name("raw_child.py"), parcels.config))

    def read(count: int) -> dict[str, list[int]]:
        deadline, found = time.monotonic() + 90, list[DerivedRecord]()
        while len(found) < count:
            assert time.monotonic() < deadline, found
            try:
                found = parcels.read()
            except NotFound:
                time.sleep(0.5)
        return versions(found)

    try:
        start()
        parcels.send(*parcels.some(20))
        assert sum(map(len, read(20).values())) == 20
        children[-1].kill()
        children[-1].wait()
        parcels.send(*parcels.some(30))
        start()
        assert read(50) == {f"p{n}": list(range(1, 11)) for n in range(5)}
    finally:
        for child in children:
            child.kill()
            child.wait()
