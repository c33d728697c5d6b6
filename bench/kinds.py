"""kinds: what a change costs in a view of each kind beside a linear one; what a read costs.

A change: a filled log into latest and the one view; the floor is the same with a linear view. Views
in Python never ride, and groups over a join are computed by a worker: their time is what comes on
top. A read: at a million entities, on an open connection, beside the same SELECT over a plain table
with the index that the question wants.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from decimal import Decimal

import psycopg

from bench import data
from bench.keep import kept
from bench.kinds_project import (
    ALL,
    JOIN_SUMS,
    LAND,
    LINEAR,
    PYTHON,
    RIDERS,
    Bench,
    Land,
    app_of,
    name_of,
)
from bench.report import Result, result
from bench.session import Session, changes_topic
from everstate.app import App
from everstate.changes import Change, ChangeCodec, Kind
from everstate.config import Config
from everstate.log.producer import Producer
from everstate.log.record import OutRecord
from everstate.log.topics import TopicNames, Topics
from everstate.pipeline.keeping.refresh import Refresher
from everstate.pipeline.keeping.trail import Trailer
from everstate.postgres import connect_views
from everstate.views.control import Control

CHANGES = 200_000
ENTITIES = 1_000_000
_READ_S = 2.0
_READS_MAX = 2_000
_READS_MIN = 100
"""With fewer, the slowest percent is one read."""
_PLAIN = """
CREATE TABLE plain AS SELECT id, country, status, total, _as_of AS at,
  to_tsvector('simple', concat_ws(' ', lines -> 0 ->> 'sku', status)) AS words
  FROM {schema}.{entity};
ALTER TABLE plain ADD PRIMARY KEY (id);
CREATE TABLE lands AS SELECT code, continent, rate FROM {schema}.{land};
ALTER TABLE lands ADD PRIMARY KEY (code);
"""


def run(session: Session) -> list[Result]:
    return [*_of_changes(session), *_of_reads(session)]


# ---- what a change costs


def _of_changes(session: Session) -> list[Result]:
    count = session.size(CHANGES)
    filled = session.filled(count)
    _send_lands(filled)

    def riding(*benches: Bench) -> Callable[[], float]:
        return lambda: _microseconds(session, filled, count, app_of(*benches, history=False))

    rows = []
    for each in RIDERS:
        values, floors = session.alternate(riding(LINEAR), riding(each))
        rows.append(_change_row(f"{each.kind}: a change", count, values, floors))
    for each, after in ((JOIN_SUMS, _refreshed), (PYTHON, _trailed)):
        values, floors = session.alternate(
            riding(LINEAR),
            lambda each=each, after=after: _apart(  # type: ignore[misc]
                session, filled, count, app_of(each), after
            ),
        )
        rows.append(_change_row(f"{each.kind}: a change, apart", count, values, floors))
    return rows


def _change_row(metric: str, count: int, values: list[float], floors: list[float]) -> Result:
    return result(
        "kinds",
        f"{metric}, {count:,} changes",
        "µs",
        values,
        floors=floors,
        floor_is="latest and a linear view",
    )


def _microseconds(session: Session, filled: Config, count: int, project: App) -> float:
    """Microseconds a change of the keeper."""
    config = session.fresh(filled)
    try:
        steps = kept(session, config, count, project)
        check_kept(config)
        return sum(seconds for _, seconds in steps) * 1e6 / count
    finally:
        session.drop(config)


def _apart(
    session: Session,
    filled: Config,
    count: int,
    project: App,
    after: Callable[[Session, Config, App], object],
) -> float:
    """Microseconds a change of what is done after the keeper, over the second half of the log.

    The first half is another matter: groups over a join are computed as a whole then.
    """
    config = session.fresh(filled)
    config = config.model_copy(
        update={"pipeline": config.pipeline.model_copy(update={"batch_changes_max": count // 4})}
    )
    try:
        first = sum(changes for changes, _ in kept(session, config, count // 2, project))
        after(session, config, project)
        rest = count + len(data.COUNTRIES) - first
        kept(session, config, rest, project)
        began = time.perf_counter()
        after(session, config, project)
        took = time.perf_counter() - began
        check_kept(config)
        return took * 1e6 / rest
    finally:
        session.drop(config)


def check_kept(config: Config) -> None:
    """A view that fails stops at its error, and would look quick."""
    with connect_views(config.views_dsn) as connection:
        control = Control(connection, config.views.schema_name)
        for row in control.versions():
            assert row.error is None, (row.name, row.error)
            at = control.vector(row.name, row.version)
            assert not at or at == control.core_vector(row.entity), (row.name, at)


def _trailed(session: Session, config: Config, project: App) -> None:
    trailer = Trailer(session.spark, config, project)
    while trailer.step():
        pass
    trailer.close()


def _refreshed(_session: Session, config: Config, project: App) -> None:
    refresher = Refresher(config, project)
    refresher.step()
    while refresher.step():
        pass
    refresher.close()


def _published(session: Session, config: Config, project: App) -> None:
    """Until every view is published: one that is read from others waits for these."""
    trailer, deadline = Trailer(session.spark, config, project), time.monotonic() + 60
    with psycopg.connect(config.views_dsn, autocommit=True) as connection:
        control = Control(connection, config.views.schema_name)
        while waiting := [row.name for row in control.versions() if not row.published]:
            assert time.monotonic() < deadline, f"not published: {', '.join(waiting)}"
            trailer.step()
    trailer.close()


def _send_lands(config: Config) -> None:
    """Put the countries into a log of purchases, once."""
    with Topics(config) as topics:
        topics.ensure([LAND])
    codec, topic = ChangeCodec(app_of().entity_type(LAND)), TopicNames(config.log.prefix)
    with Producer(config) as producer:
        for place, code in enumerate(data.COUNTRIES):
            state = Land(code=code, continent=f"c{place % 3}", rate=1 + place % 4)
            created: Change[Land] = Change(
                id=data.change(place).id,
                entity=LAND,
                schema_version=1,
                key=code,
                version=1,
                kind=Kind.CREATED,
                occurred_at=data.EPOCH,
                recorded_at=data.EPOCH,
                provenance=data.PROVENANCE,
                current=state,
                original=None,
            )
            producer.send_many([OutRecord(topic.changes(LAND), *codec.encode(created))])
        producer.flush(30)


# ---- what a read costs


def _of_reads(session: Session) -> list[Result]:
    count = session.size(ENTITIES)
    config = session.fresh()
    session.say(f"[dim]keeping {count:,} entities in a view of each kind[/dim]")
    with Topics(config) as topics:
        topics.ensure([data.ENTITY, LAND])
    _send_lands(config)
    with Producer(config) as producer:
        for number in range(count):
            # Every fourth change places a purchase.
            key, value, headers = data.message(number * data.CHANGES_PER_KEY)
            producer.send_raw(changes_topic(config), key, value, headers)
    project = app_of(*ALL)
    kept(session, config, count + len(data.COUNTRIES), project)
    _trailed(session, config, project)
    _refreshed(session, config, project)
    _published(session, config, project)
    schema = config.views.schema_name
    rows = []
    with psycopg.connect(config.views_dsn, autocommit=True) as connection:
        text = _PLAIN.format(schema=schema, entity=data.ENTITY, land=LAND)
        connection.execute(text.encode())
        for each in ALL:
            if each.index:
                connection.execute(each.index.encode())
        connection.execute("VACUUM ANALYZE")
        for each in ALL:
            ours = each.read.replace("FROM v", f"FROM {schema}.{name_of(each.kind)}")
            _same(connection, each, ours)
            rows += _read_rows(session, connection, each, ours, count)
    session.drop(config)
    return rows


def _read_rows(
    session: Session, connection: psycopg.Connection, each: Bench, ours: str, count: int
) -> list[Result]:
    """The median and the slowest percent of reads beside those of the plain table."""
    tails: list[list[float]] = [[], []]

    def timed(query: str, place: int) -> float:
        middle, tail = _percentiles(connection, query, count)
        tails[place].append(tail)
        return middle

    values, floors = session.alternate(lambda: timed(each.plain, 1), lambda: timed(ours, 0), warm=0)
    return [
        result(
            "kinds",
            f"{each.kind}: a read, {name}, {count:,} entities",
            "ms",
            mine,
            floors=plain,
            floor_is="the same SELECT over a plain table",
        )
        for name, mine, plain in (("median", values, floors), ("p99", tails[0], tails[1]))
    ]


def _percentiles(connection: psycopg.Connection, query: str, count: int) -> tuple[float, float]:
    """Median and 99th percentile of some reads, in milliseconds."""
    rng, times = random.Random(7), list[float]()
    ends = time.perf_counter() + _READ_S
    while len(times) < _READS_MAX and (time.perf_counter() < ends or len(times) < _READS_MIN):
        text = _filled_in(query, rng, count)
        began = time.perf_counter()
        connection.execute(text.encode()).fetchall()
        times.append((time.perf_counter() - began) * 1e3)
    times.sort()
    return times[len(times) // 2], times[min(len(times) - 1, len(times) * 99 // 100)]


def _filled_in(query: str, rng: random.Random, count: int) -> str:
    return query.format(
        key=data.key_of(rng.randrange(count)),
        land=rng.choice(data.COUNTRIES),
        sku=f"s{rng.randrange(min(9973, count)):04d}",
    )


def _same(connection: psycopg.Connection, each: Bench, ours: str) -> None:
    """Both reads say the same, or the figures would be of different work."""
    found = []
    for query in (ours, each.plain):
        text = _filled_in(query, random.Random(3), 1000)
        found.append(connection.execute(text.encode()).fetchall())
    mine, plain = found
    assert len(mine) == len(plain) > 0, (each.kind, len(mine), len(plain))
    if each.is_exact:
        assert sorted(map(_plainly, mine)) == sorted(map(_plainly, plain)), each.kind


def _plainly(row: tuple[object, ...]) -> str:
    """A row, with numbers as such: 1.50 is 1.5."""
    return repr([Decimal(e).normalize() if isinstance(e, (int, Decimal)) else e for e in row])
