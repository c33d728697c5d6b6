"""Rows that come and go, or change, without row events: they are read again, or told."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import psycopg
import pytest
from pydantic import BaseModel

from capture_cases import OF_MYSQL, Source, capture_config, eventually, source_of
from clean_role import CleanRole, PlainCleaner, broken_laws, changelog
from everstate.app import App
from everstate.config import Config
from everstate.declarations.captures import DatabaseKind, Table
from everstate.log.topics import Topics
from everstate.sources.cdc.capturing import Capturing
from everstate.sources.cdc.cleaning import cleaning_of
from everstate.sources.cdc.replaced import known_standing
from running_stack import RunningStack


class Row(BaseModel):
    id: int
    note: str | None = None


class Mood(BaseModel):
    id: int
    note: Literal["sad", "blue", "glad"]


class Figure(BaseModel):
    id: int
    g: int | None = None


MODELS: dict[str, type[BaseModel]] = {"labelled": Mood, "figures": Figure}
VALUES = {"figures": "g"}
"""Column that is compared, where it is not `note`."""
Changes = dict[str, tuple[list[str], list[str]]]
"""Table → statements that make it, and those that change it."""
PLAIN = "CREATE TABLE {} (id int PRIMARY KEY, note varchar(20))"
FILLED = "INSERT INTO {0} SELECT i, concat('{0} ', i) FROM ({1}) AS t WHERE i BETWEEN {2} AND {3}"
NUMBERS = {
    "postgresql": "SELECT i FROM generate_series(0, 99) i",
    "mariadb": "SELECT seq AS i FROM seq_0_to_99",
    "mysql": "WITH RECURSIVE s (i) AS (SELECT 0 UNION SELECT i + 1 FROM s WHERE i < 99) TABLE s",
}


def filled(kind: DatabaseKind, table: str, first: int = 0, last: int = 29) -> str:
    return FILLED.format(table, NUMBERS[kind], first, last)


def parted(kind: DatabaseKind, table: str) -> list[str]:
    """A table of 30 rows in three partitions: 0, 1 and 2."""
    head, bounds = PLAIN.format(table), [(10 * part, 10 * part + 10) for part in range(3)]
    if kind != "postgresql":
        parts = [f"PARTITION p{n} VALUES LESS THAN ({end})" for n, (_, end) in enumerate(bounds)]
        return [f"{head} PARTITION BY RANGE (id) ({', '.join(parts)})", filled(kind, table)]
    made = [
        f"CREATE TABLE {table}_{n} PARTITION OF {table} FOR VALUES FROM ({start}) TO ({end})"
        for n, (start, end) in enumerate(bounds)
    ]
    return [f"{head} PARTITION BY RANGE (id)", *made, filled(kind, table)]


def plain(kind: DatabaseKind, table: str) -> list[str]:
    return [PLAIN.format(table), filled(kind, table)]


def attach(table: str, part: str, start: int) -> str:
    bounds = f"FROM ({start}) TO ({start + 10})"
    return f"ALTER TABLE {table} ATTACH PARTITION {part} FOR VALUES {bounds}"


def altered(kind: DatabaseKind) -> Changes:
    """What adds or changes rows: the table is read again."""
    remade = ["ALTER TABLE remade DROP COLUMN note, ADD COLUMN note varchar(20) DEFAULT 'anew'"]
    found = {"remade": (plain(kind, "remade"), remade)}
    if kind != "postgresql":
        return found
    more = [PLAIN.format("more"), filled(kind, "more", 30, 39)]
    mood = "CREATE TYPE mood AS ENUM ('sad', 'glad')"
    labelled = "CREATE TABLE labelled (id int PRIMARY KEY, note mood)"
    moods = "INSERT INTO labelled VALUES (1, 'sad'), (2, 'glad')"
    retyped = "ALTER COLUMN note TYPE varchar(30) USING note || '!'"
    return found | {
        "attached": ([*parted(kind, "attached"), *more], [attach("attached", "more", 30)]),
        "labelled": ([mood, labelled, moods], ["ALTER TYPE mood RENAME VALUE 'sad' TO 'blue'"]),
        "retyped": (plain(kind, "retyped"), [f"ALTER TABLE retyped {retyped}"]),
        "widened": (parted(kind, "widened"), [f"ALTER TABLE widened {retyped}"]),
    }  # fmt: skip


def emptied(kind: DatabaseKind) -> Changes:
    """What may take rows away: it is told until all are read in a new epoch."""
    other = [PLAIN.format("other"), filled(kind, "other", 15, 19)]
    if kind != "postgresql":
        swap = "ALTER TABLE exchanged EXCHANGE PARTITION p1 WITH TABLE other"
        fresh = ["ALTER TABLE renamed RENAME TO old", "ALTER TABLE fresh RENAME TO renamed"]
        return {
            "dropped": (parted(kind, "dropped"), ["ALTER TABLE dropped DROP PARTITION p1"]),
            "truncated": (
                parted(kind, "truncated"),
                ["ALTER TABLE truncated TRUNCATE PARTITION p1"],
            ),
            "exchanged": ([*parted(kind, "exchanged"), *other], [swap]),
            "renamed": (
                [*plain(kind, "renamed"), PLAIN.format("fresh"), filled(kind, "fresh", 0, 19)],
                fresh,
            ),
            "most": (parted(kind, "most"), ["ALTER TABLE most DROP PARTITION p1, p2"]),
        }
    detach = "ALTER TABLE {} DETACH PARTITION {}"
    generated = "ALTER TABLE figures ADD g int GENERATED ALWAYS AS (id * 2) STORED"
    return {
        "detached": (parted(kind, "detached"), [detach.format("detached", "detached_1")]),
        "dropped": (parted(kind, "dropped"), ["DROP TABLE dropped_1"]),
        # It has rows again, and statistics, before anybody looks.
        "truncated": (
            parted(kind, "truncated"),
            ["TRUNCATE truncated_1", filled(kind, "truncated", 12, 13), "ANALYZE truncated_1"],
        ),
        "exchanged": (
            [*parted(kind, "exchanged"), *other],
            [detach.format("exchanged", "exchanged_1"), attach("exchanged", "other", 10)],
        ),
        # It is changed while it is no partition, so that its file is the same afterwards.
        "returned": (
            parted(kind, "returned"),
            [
                detach.format("returned", "returned_1"),
                "DELETE FROM returned_1 WHERE id = 17",
                attach("returned", "returned_1", 10),
            ],
        ),
        "renamed": (
            [*plain(kind, "renamed"), PLAIN.format("fresh"), filled(kind, "fresh", 0, 19)],
            ["ALTER TABLE renamed RENAME TO old", "ALTER TABLE fresh RENAME TO renamed"],
        ),
        "figures": (
            [*plain(kind, "figures"), generated],
            ["ALTER TABLE figures ALTER COLUMN g DROP EXPRESSION"],
        ),
        "most": (parted(kind, "most"), ["DROP TABLE most_1", "DROP TABLE most_2"]),
    }  # fmt: skip


def routine(kind: DatabaseKind) -> Changes:
    """What takes no row away of which the log says nothing."""
    whole = (parted(kind, "whole"), ["TRUNCATE TABLE whole", filled(kind, "whole", 3, 9)])
    kept = plain(kind, "kept")
    if kind != "postgresql":
        later = "ALTER TABLE whole ADD PARTITION (PARTITION p3 VALUES LESS THAN (40))"
        return {"whole": (whole[0], [*whole[1], later]), "kept": (kept, ["OPTIMIZE TABLE kept"])}
    later = "CREATE TABLE large_3 PARTITION OF large FOR VALUES FROM (30) TO (40)"
    empty = "CREATE TABLE large_4 PARTITION OF large FOR VALUES FROM (40) TO (50)"
    return {
        "whole": whole,
        "kept": (kept, ["VACUUM FULL kept"]),
        "large": (
            [*parted(kind, "large"), empty],
            ["VACUUM FULL large", later, "DROP TABLE large_4", "DELETE FROM large WHERE id > 25"],
        ),
    }


@pytest.fixture
def source(request: pytest.FixtureRequest) -> Iterator[Source]:
    """An empty database of each kind."""
    yield from source_of(request)


def run(source: Source, changes: Changes) -> None:
    """Run what changes the tables; each statement in its own transaction."""
    for _, statements in changes.values():
        for statement in statements:
            if source.kind != "postgresql":
                # Without it, EXCHANGE PARTITION waits for a lock of its own session.
                source.run("SET autocommit = 1", statement)
                continue
            with psycopg.connect(source.dsn, autocommit=True) as connection:
                connection.execute(statement.encode())


class Rig:
    """A capture of all tables, and its clean role."""

    def __init__(self, config: Config, source: Source) -> None:
        kind = source.kind
        self.routine, self.altered, self.emptied = routine(kind), altered(kind), emptied(kind)
        every = {**self.routine, **self.altered, **self.emptied}
        self.config, self.source, self.tables = config, source, list(every)
        source.run(*(each for making, _ in every.values() for each in making))
        self.app = App("shop")
        for name in every:
            self.app.entity(name, key="id", source="capture")(MODELS.get(name, Row))
        declared = {
            f"{source.schema}.{name}": Table(
                entity=name,
                truncate="delete",
                computed={"g": lambda state: state["id"] * 2} if name == "figures" else {},
            )
            for name in every
        }
        self.app.capture("shop", kind=kind, dsn=source.dsn, tables=declared)
        capture = self.app.capture_of("shop")
        self.capturing = Capturing(config, capture, local=True, entities=self.app.entities)
        with Topics(config) as topics:
            topics.ensure(self.app.entities)

    def role(self) -> CleanRole:
        cleaning = cleaning_of
        return CleanRole(
            lambda: PlainCleaner(self.config, cleaning(self.config, self.app, "shop")),
            self.capturing,
        )

    def differ(self) -> list[str]:
        """Tables whose rows are not the entities in the log."""
        return [name for name in self.tables if self.in_log(name) != self.in_table(name)]

    def in_table(self, name: str) -> dict[str, Any]:
        rows = self.source.rows(f"SELECT id, {VALUES.get(name, 'note')} FROM {name}")
        return {str(key): value for key, value in rows}

    def in_log(self, name: str) -> dict[str, Any]:
        states = {one["key"]: one["currentEntityState"] for one in changelog(self.config, name)}
        value = VALUES.get(name, "note")
        return {key: one[value] for key, one in states.items() if one is not None}

    def told(self) -> dict[str, str]:
        """Table → its problem in `cdc status`."""
        problems = (each.partition(": ") for each in self.capturing.status().problems)
        found = {table.rpartition(".")[2]: problem for table, _, problem in problems}
        # A table that took another one's name is not published, either.
        return {table: problem for table, problem in found.items() if table in self.tables}

    def looked(self) -> None:
        """Wait until the clean role has looked, and cleaning knows what it saw."""

        def knows_other(mark: str | None) -> bool:
            return known_standing(self.config, self.capturing.capture).mark != mark

        for _ in range(3):
            mark = known_standing(self.config, self.capturing.capture).mark
            assert eventually(partial(knows_other, mark), 60)


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "source",
    ["postgresql", pytest.param("mariadb", marks=pytest.mark.full), OF_MYSQL],
    indirect=True,
)
def test_rows_that_come_go_or_change_without_row_events_are_read_or_told(
    connect: RunningStack, topic_prefix: str, source: Source
) -> None:
    rig = Rig(capture_config(connect.config, topic_prefix), source)
    role = None
    try:
        rig.capturing.add()
        role = rig.role()
        assert eventually(lambda: not rig.differ(), 90, every_s=1.0), rig.differ()
        rig.looked()
        run(source, rig.routine)
        assert eventually(lambda: not rig.differ(), 60, every_s=1.0), rig.differ()
        rig.looked()
        assert not rig.told()
        run(source, {**rig.altered, **rig.emptied})
        assert eventually(lambda: rig.told().keys() == rig.emptied.keys(), 60), rig.told()
        assert eventually(lambda: set(rig.differ()) <= rig.emptied.keys(), 90), rig.differ()
        assert all(
            "`everstate cdc snapshot shop --new-epoch`" in one for one in rig.told().values()
        )
        rig.capturing.begin_epoch()
        assert eventually(lambda: rig.differ() == ["most"], 90, every_s=1.0), rig.differ()
        assert eventually(lambda: rig.told().keys() == {"most"}, 30), rig.told()
        assert "`everstate cdc snapshot shop --new-epoch --yes 20` deletes" in rig.told()["most"]
        rig.capturing.begin_epoch(may_delete=20)
        assert eventually(lambda: not rig.differ(), 90, every_s=1.0), rig.differ()
        assert eventually(lambda: rig.capturing.status().well, 30), rig.capturing.status()
    finally:
        if role is not None:
            role.end()
        rig.capturing.remove(drop=True, topics=True)
    for name in rig.tables:
        assert broken_laws(changelog(rig.config, name)) == []
