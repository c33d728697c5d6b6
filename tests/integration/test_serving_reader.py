"""Reading entities from the views' tables, which are filled by hand here."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest
from serving_cases import HOTEL, fill

from console_cases import SCHEMA, START
from everstate.config import Config, load
from everstate.errors import InvalidQuery, NotFound, Unavailable, UnknownEntity
from everstate.serving import ABSENT, Difference, Reader
from everstate.serving.writers import last_writer, who_wrote


@pytest.fixture
def config(database: str) -> Config:
    with psycopg.connect(database, autocommit=True) as connection:
        fill(connection)
    return load(store={"dsn": database})


@pytest.fixture
def reader(config: Config) -> Iterator[Reader]:
    with Reader(config, HOTEL) as made:
        yield made


def at(hours: float) -> datetime:
    return START + timedelta(hours=hours)


def test_get_now_gives_the_newest_state_with_its_change(reader: Reader) -> None:
    eva = reader.get("guest", "eva")
    assert (eva.version, eva.kind, eva.state["name"]) == (3, "updated", "Eva Maria")
    assert eva.provenance["serviceName"] == "desk"
    assert eva.place.offset == 2
    assert eva.as_of == at(2)


@pytest.mark.parametrize(("hours", "version"), [(1, 1), (1.99, 1), (2, 3), (100, 3)])
def test_get_at_a_time_gives_the_last_version_of_that_moment(
    reader: Reader, hours: float, version: int
) -> None:
    assert reader.get("guest", "eva", at=at(hours)).version == version


def test_get_at_a_version_and_as_recorded_give_that_version(reader: Reader) -> None:
    assert reader.get("guest", "eva", version=2).state["nights"] == 2
    recorded = START + timedelta(days=1, hours=1)
    assert reader.get("guest", "eva", recorded_at=recorded).version == 2


@pytest.mark.parametrize(
    ("key", "question", "said"),
    [
        ("ada", {}, "deleted by desk at version 2.*--version 1"),
        ("tom", {"at": at(5)}, "deleted by desk at version 2"),
        ("tom", {"version": 2}, "deleted by desk at version 2"),
        ("eva", {"version": 9}, "no version 9; it has 1 to 3"),
        ("eva", {"at": at(0.5)}, "did not exist at 2026-01-01T00:30.*first seen 2026-01-01T01:00"),
        ("eve", {}, "views have no guest 'eve'. Near it are 'eva' or 'tom'"),
    ],
)
def test_what_is_not_there_is_told_with_what_is_known(
    reader: Reader, key: str, question: dict[str, Any], said: str
) -> None:
    with pytest.raises(NotFound, match=said):
        reader.get("guest", key, **question)


def test_a_question_that_contradicts_itself_is_refused(reader: Reader) -> None:
    with pytest.raises(InvalidQuery, match="one of at"):
        reader.get("guest", "eva", at=at(1), version=1)
    with pytest.raises(InvalidQuery, match="no UTC offset"):
        reader.get("guest", "eva", at=datetime(2026, 1, 1))  # noqa: DTZ001
    with pytest.raises(UnknownEntity, match="guest"):
        reader.get("gust", "eva")


def test_list_now_gives_what_exists_in_key_order(reader: Reader) -> None:
    assert [found.key for found in reader.list("guest")] == ["eva", "tom"]


@pytest.mark.parametrize(
    ("hours", "keys"),
    [
        (0.5, []),
        (1, ["eva", "tom"]),
        (3, ["ada", "eva", "tom"]),
        (4, ["ada", "eva"]),
        (5, ["eva"]),
        (6, ["eva", "tom"]),
    ],
)
def test_list_at_a_time_gives_what_existed_then(
    reader: Reader, hours: float, keys: list[str]
) -> None:
    assert [found.key for found in reader.list("guest", at=at(hours))] == keys


@pytest.mark.parametrize(
    ("where", "keys"),
    [
        (["nights>5"], ["ada", "tom"]),
        (["nights>=9", "name!=Tom"], ["ada"]),
        (["name=Eva Maria"], ["eva"]),
        (["name=Eva"], []),
        (["born=1990-05-01"], ["eva"]),
        (["born<1990-05-01"], []),
        (["born=null"], ["ada", "tom"]),
        (["born!=null"], ["eva"]),
        (["nights!=9"], ["eva", "tom"]),
        (["name='; DROP TABLE x; --"], []),
    ],
)
def test_conditions_hold_for_the_state_at_that_time(
    reader: Reader, where: list[str], keys: list[str]
) -> None:
    assert [found.key for found in reader.list("guest", at=at(3), where=where)] == keys


def test_list_is_ordered_and_bounded(reader: Reader) -> None:
    found = reader.list("guest", at=at(3), order=["-nights"])
    assert [entity.state["nights"] for entity in found] == [10, 9, 3]
    assert len(reader.list("guest", at=at(3), order=["nights"], limit=2)) == 2


def test_history_tells_each_version_and_its_differences(reader: Reader) -> None:
    versions = reader.history("guest", "eva")
    assert [version.version for version in versions] == [1, 2, 3]
    assert versions[2].differences == (
        Difference(("name",), "Eva", "Eva Maria"),
        Difference(("nights",), 2, 3),
    )
    assert versions[0].differences[0] == Difference(("guest_id",), ABSENT, "eva")
    assert versions[1].event == {"type": "Checked", "data": {"n": 2}}


def test_a_bounded_history_keeps_the_newest_and_their_differences(reader: Reader) -> None:
    versions = reader.history("guest", "eva", limit=1)
    assert [version.version for version in versions] == [3]
    assert [difference.path for difference in versions[0].differences] == ["name", "nights"]


@pytest.mark.parametrize(
    ("after", "limit", "versions"),
    [(0, 1, [1]), (0, 2, [1, 2]), (0, 9, [1, 2, 3]), (1, 1, [2]), (2, 2, [3]), (3, 2, [])],
)
def test_a_history_after_a_version_has_as_many_as_are_wanted(
    reader: Reader, after: int, limit: int, versions: list[int]
) -> None:
    found = reader.history("guest", "eva", after=after, limit=limit)
    assert [version.version for version in found] == versions


def test_history_shows_the_grave_and_what_came_after(reader: Reader) -> None:
    versions = reader.history("guest", "tom")
    assert [version.kind for version in versions] == ["created", "deleted", "updated"]
    assert versions[1].state is None
    with pytest.raises(NotFound, match="views have no"):
        reader.history("guest", "nobody")


def test_one_version_can_be_a_deleting_one(reader: Reader) -> None:
    assert reader.version("guest", "ada").kind == "deleted"
    assert reader.version("guest", "tom", 3).differences[0].before is ABSENT
    with pytest.raises(NotFound, match="it has 1 to 2"):
        reader.version("guest", "ada", 3)


def test_a_reader_goes_on_after_its_connection_broke(reader: Reader, database: str) -> None:
    reader.get("guest", "eva")
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
    assert reader.get("guest", "eva").version == 3


def test_a_database_that_does_not_answer_is_told_as_unavailable(config: Config) -> None:
    away = load(store={"dsn": "postgresql://nobody@127.0.0.1:1/none"})
    with Reader(away, HOTEL) as reader, pytest.raises(Unavailable, match="does not answer"):
        reader.get("guest", "eva")


def test_views_that_were_never_made_are_told(stack: Any) -> None:
    with (
        Reader(stack.config, HOTEL) as reader,
        pytest.raises(NotFound, match=r"do(es)? not exist yet"),
    ):
        reader.get("guest", "eva")


def test_a_reader_cannot_write(reader: Reader) -> None:
    with pytest.raises(InvalidQuery, match="read-only"):
        reader.connection.rows(b"CREATE TABLE x (i int)")


@pytest.fixture
def long_history(config: Config) -> int:
    """Guest `max` has 5,000 versions; three services take turns."""
    versions = 5_000
    places = (("history", ", schema_version", ", 1", 1), ("latest", "", "", versions))
    with psycopg.connect(config.views_dsn, autocommit=True) as connection:
        for view, column, value, first in places:
            query = (
                f"INSERT INTO {SCHEMA}.guest_{view}__v1 (key, version, change_id, kind, as_of, "
                'occurred_at, recorded_at, generation, partition, "offset", provenance, state'
                f"{column}) SELECT 'max', n, gen_random_uuid(), CASE n WHEN 1 THEN 'created' "
                "ELSE 'updated' END, moment, moment, moment, 1, 0, 100 + n, "
                "jsonb_build_object('serviceName', 'desk' || n % 3), "
                "jsonb_build_object('guest_id', 'max', 'nights', n, 'name', "
                "CASE WHEN n < 4890 THEN 'Max' ELSE 'Maximilian' END, 'born', "
                f"CASE WHEN n < 4750 THEN NULL ELSE '1990-05-01' END){value} "
                f"FROM generate_series({first}, {versions}) AS n, LATERAL (SELECT "
                f"'{START.isoformat()}'::timestamptz + n * interval '1 second' AS moment) AS clock"
            )
            connection.execute(query.encode())
    return versions


@pytest.mark.parametrize(
    ("name", "writer", "rows_max"),
    [("nights", 5_000, 101), ("name", 4_890, 202), ("born", 4_750, 303), ("guest_id", 1, 5_050)],
)
def test_the_last_writer_of_a_field_is_found_without_reading_what_is_older(
    reader: Reader,
    long_history: int,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    writer: int,
    rows_max: int,
) -> None:
    read, rows_of = [0], reader.connection.rows

    def counted(*arguments: Any) -> Any:
        rows = rows_of(*arguments)
        read[0] += len(rows)
        return rows

    monkeypatch.setattr(reader.connection, "rows", counted)
    assert last_writer(reader.newest_first("guest", "max"), name).version == writer
    assert 0 < read[0] <= rows_max


def test_a_history_read_in_pages_is_the_whole_history(reader: Reader, long_history: int) -> None:
    whole = reader.history("guest", "max")
    assert len(whole) == long_history
    assert list(reader.newest_first("guest", "max")) == list(whole)[::-1]
    found = who_wrote(reader.newest_first("guest", "max"))
    assert {path: each.version for path, each in found.fields.items()} == {
        "guest_id": 1,
        "name": 4_890,
        "nights": 5_000,
        "born": 4_750,
    }
    # 5,000 is of desk2, and the ones before it of desk1 and desk0.
    assert [(each["service"], each["version"]) for each in found.sources] == [
        ("desk0", 4_998),
        ("desk1", 4_999),
        ("desk2", 5_000),
    ]
    assert found.sources[0]["values"]["name"] == "Maximilian"
    assert found.sources[1]["values"] == {
        "guest_id": "max",
        "name": "Max",
        "nights": 4_999,
        "born": "1990-05-01",
    }


def test_a_short_history_and_a_key_that_no_view_has_are_read_in_pages_too(
    reader: Reader,
) -> None:
    assert [each.version for each in reader.newest_first("guest", "eva")] == [3, 2, 1]
    with pytest.raises(NotFound, match="the views have no guest"):
        next(reader.newest_first("guest", "nobody"))
