"""Raw derived topics: the expressions against any JSON, and the query itself with kills."""

from __future__ import annotations

import json
import subprocess
import time
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import jsonpatch
import pytest
from keep_cases import World, drain
from pyspark.sql import SparkSession
from raw_child import Parcel, Size, app

from everstate.changes.derived import Derivation, notices_of, patch_of
from everstate.changes.triggers import when
from everstate.config import Config
from everstate.errors import InvalidConfig, LogTruncated, NotFound
from everstate.log.derived import DerivedReader
from everstate.log.record import OutRecord
from everstate.pipeline.derive.expressions import raw_records
from everstate.pipeline.derive.raw import RawDeriver, check_slots
from everstate.postgres import connect_views
from everstate.views.changing import ask_rebuild
from everstate.views.control import Control, ViewVersion
from kit.waiting import started
from log_cases import lose_records

pytestmark = pytest.mark.settings(
    log={"partitions": 1}, pipeline={"driver_memory": "1g"}, archive={"trigger_s": 1}
)

PARCEL = app.entity_type("parcel")
_NAMES = ("place", "size", "marks", "a/b", "m~n", "", "é", '"', "\\", "other")


def document(random: Random, depth: int = 0) -> Any:
    kind = random.randrange(9 if depth < 3 else 7)
    if kind == 7:
        return [document(random, depth + 1) for _ in range(random.randrange(4))]
    if kind == 8:
        return members(random, depth)
    numbers = (0, 1, -(2**40), Decimal("1.25"), Decimal("0.1234567890123456789"), Decimal("1E+3"))
    scalars = (None, True, False, "", "1", "null", "ä😀\n", "true")
    return random.choice((*numbers, *scalars))


def members(random: Random, depth: int = 0) -> dict[str, Any]:
    found = {name: document(random, depth + 1) for name in random.sample(_NAMES, 4)}
    if random.random() < 0.5:
        found["size"] = {"length": random.randrange(3), "unit": random.choice(("m", None))}
    return found


def edited(random: Random, value: dict[str, Any]) -> dict[str, Any]:
    kept = {name: part for name, part in value.items() if random.random() < 0.8}
    return {**kept, **dict(random.sample(list(members(random).items()), 2))}


def text(value: Any) -> bytes:
    """JSON in which a decimal is a number of all its digits."""

    def plain(part: Any) -> Any:
        if isinstance(part, dict):
            return {name: plain(each) for name, each in part.items()}
        if isinstance(part, list):
            return [plain(each) for each in part]
        return f"@{part}@" if isinstance(part, Decimal) else part

    return json.dumps(plain(value)).replace('"@', "").replace('@"', "").encode()


def exactly(value: Any) -> Any:
    """What tells `1` from `true`, and numbers by their value."""
    if isinstance(value, dict):
        return {name: exactly(part) for name, part in value.items()}
    if isinstance(value, list):
        return [exactly(part) for part in value]
    number = isinstance(value, (int, Decimal)) and not isinstance(value, bool)
    return Decimal(value).normalize() if number else (type(value), value)


def message(number: int, original: Any, current: Any) -> bytes:
    head = {
        "id": f"id-{number}",
        "key": f"k{number}",
        "version": number + 1,
        "kind": "updated",
        "recordedAt": "2026-01-01T00:00:00Z",
        "provenance": {"serviceName": "desk", "identifier": "d"},
        "event": {"type": "Moved"} if number % 2 else None,
        "currentEntityState": current,
        "originalEntityState": original,
    }
    return text(head)


def made(spark: SparkSession, derivation: Derivation, values: list[bytes]) -> dict[int, Any]:
    """Records of the form by offset: value and headers."""
    spark.conf.set("spark.sql.variant.allowDuplicateKeys", "true")
    rows = [(b"k", bytearray(value), 0, number) for number, value in enumerate(values)]
    records = spark.createDataFrame(rows, "key binary, value binary, partition int, offset long")
    found = {}
    for row in raw_records(records, PARCEL, derivation).collect():
        headers = {header["key"]: bytes(header["value"]) for header in row.headers}
        found[int(headers["everstate_offset"])] = (bytes(row.value), headers)
    return found


def test_a_raw_patch_makes_current_of_original_for_any_json(spark: SparkSession) -> None:
    random = Random(11)
    pairs: list[tuple[Any, Any]] = [(None, members(random)), (members(random), None)]
    for _ in range(400):
        original = members(random)
        pairs.append((original, edited(random, original)))
    values = [message(number, *pair) for number, pair in enumerate(pairs)]
    found = made(spark, Derivation("p", patch_of("parcel"), True), [*values, b"no JSON", b"{}"])
    assert found.keys() == set(range(len(pairs)))
    for number, pair in enumerate(pairs):
        original, current = (json.loads(text(side), parse_float=Decimal) for side in pair)
        patch = json.loads(found[number][0], parse_float=Decimal)
        assert exactly(jsonpatch.JsonPatch(patch).apply(original)) == exactly(current)
        if None not in pair:
            assert all(step["path"] for step in patch), "the root stays"
    nested = {step["path"] for value, _ in found.values() for step in json.loads(value)}
    assert "/size/length" in nested, "what the model names is compared member by member"


def test_headers_triggers_and_notices_of_raw_records(spark: SparkSession) -> None:
    states = [{"place": "dock"}, {"place": "ship"}, {"place": "ship", "marks": [1]}, None]
    values = [
        message(n, *pair) for n, pair in enumerate(zip([None, *states], states, strict=False))
    ]
    value, headers = made(spark, Derivation("p", patch_of("parcel"), True), values)[1]
    assert json.loads(value) == [{"op": "replace", "path": "/place", "value": "ship"}]
    provenance = json.loads(headers.pop("everstate_provenance"))
    assert provenance == {"serviceName": "desk", "identifier": "d"}
    assert {name: each.decode() for name, each in headers.items()} == {
        "ce_specversion": "1.0",
        "ce_id": "id-1",
        "ce_source": "desk",
        "ce_type": "Moved",
        "ce_time": "2026-01-01T00:00:00Z",
        "ce_subject": "k1",
        "content-type": "application/json-patch+json",
        "everstate_version": "2",
        "everstate_kind": "updated",
        "everstate_offset": "1",
    }
    fired = Derivation("p", patch_of("parcel"), True, when("place").changes(to="ship"))
    assert made(spark, fired, values).keys() == {1}
    notices = made(spark, Derivation("n", notices_of("parcel"), True), values)
    assert notices.keys() == {1, 2, 3}
    assert json.loads(notices[3][0]) == {"key": "k3", "old": states[2], "new": None}


def test_c23_too_few_task_slots_are_refused(spark: SparkSession) -> None:
    with pytest.raises(InvalidConfig, match="4 task slots"):
        check_slots(spark, {"a": 2})


def parcels(world: World, count: int) -> list[OutRecord]:
    records: list[OutRecord] = []
    for number in range(count):
        key = f"p{number % 5}"
        size = Size(length=number) if number % 3 else None
        parcel = Parcel(parcel_id=key, place=f"dock {number % 4}", size=size, marks=[number])
        records.append(world.change(key, parcel))
    return records


def test_c8_no_query_starts_on_a_log_that_lost_its_end(
    config: Config, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(config, spark, app, "parcel")
    keeper = world.keeper()
    world.send(*parcels(world, 5))
    drain(keeper)
    keeper.close()
    lose_records(monkeypatch, config, world.topic)
    with closing(RawDeriver(config, app, app.derivations["parcel_patches"], spark)) as deriver:
        deriver.prepare()
        with pytest.raises(LogTruncated, match="derived topic parcel_patches"):
            deriver.step()
        assert deriver._queries == {}


class Query:
    """A query of Spark that does nothing; without ``progress`` it has done nothing yet."""

    isActive = True

    def __init__(self, progress: Any = None) -> None:
        self.lastProgress = progress

    def stop(self) -> None:
        """It does nothing."""


def test_a_raw_version_that_was_published_before_a_kill_is_published_in_the_registry(
    config: Config, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = World(config, spark, app, "parcel").keeper()
    keeper.close()
    monkeypatch.setattr(RawDeriver, "_start", lambda *_: Query())

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    def rows() -> list[tuple[bool, str]]:
        with connect_views(config.views_dsn) as connection:
            found = Control(connection, config.views.schema_name).versions("parcel_patches")
        return [(row.published, row.status) for row in found]

    def step() -> None:
        with closing(RawDeriver(config, app, app.derivations["parcel_patches"], spark)) as deriver:
            deriver.prepare()
            deriver.step()

    with monkeypatch.context() as patched:
        patched.setattr(Control, "swap_published", killed)
        with pytest.raises(KeyboardInterrupt):
            step()
    assert rows() == [(False, "building")]
    step()
    assert rows() == [(True, "live")]


def test_a_raw_topic_that_is_rebuilt_is_published(
    config: Config, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(config, spark, app, "parcel")
    keeper = world.keeper()
    world.send(*parcels(world, 5))
    drain(keeper)
    keeper.close()

    def start(deriver: RawDeriver, row: ViewVersion) -> Query:
        topic = deriver._topics.names.derived(row.name, row.version)
        deriver._topics.ensure_beside(world.topic, topic)
        return Query({"sources": [{"endOffset": {world.topic: world.ends()}}]})

    monkeypatch.setattr(RawDeriver, "_start", start)
    with (
        closing(RawDeriver(config, app, app.derivations["parcel_patches"], spark)) as deriver,
        connect_views(config.views_dsn) as connection,
    ):
        control = Control(connection, config.views.schema_name)
        deriver.prepare()
        deriver.step()
        assert ask_rebuild(control, "parcel_patches").version == 2
        deriver.step()
        rows = [(row.published, row.status) for row in control.versions("parcel_patches")]
    assert rows == [(False, "kept"), (True, "live")]


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_raw_topic_has_each_change_though_its_process_is_killed(
    config: Config, spark: SparkSession
) -> None:
    """In a process and a JVM of its own: its query holds task slots as long as it lives."""
    world = World(config, spark, app, "parcel")
    keeper = world.keeper()
    children: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        children.append(started(Path(__file__).with_name("raw_child.py"), config))

    def read(count: int) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        deadline = time.monotonic() + 90
        while sum(map(len, found.values())) < count:
            assert time.monotonic() < deadline, found
            found = {}
            try:
                with DerivedReader(config, "parcel_patches", is_raw=True) as reader:
                    for record in reader.records(idle_s=0.5):
                        found.setdefault(record.key or "", []).append(record.version)
            except NotFound:
                time.sleep(0.5)
        return found

    try:
        start()
        world.send(*parcels(world, 20))
        assert sum(map(len, read(20).values())) == 20
        children[-1].kill()
        children[-1].wait()
        world.send(*parcels(world, 30))
        start()
        found = read(50)
        assert found == {f"p{n}": list(range(1, 11)) for n in range(5)}
    finally:
        for child in children:
            child.kill()
            child.wait()
        keeper.close()
