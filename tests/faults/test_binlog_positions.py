"""MariaDB's binlog: a transaction of many events is read whole, whatever is killed, or refused.

From MariaDB 11.4 on events of a transaction have no position by default: then each row that is not
the first of its event would be taken for one that was read before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pydantic import BaseModel
from test_capture_kill import streams

from capture_cases import CONNECTED, MariaSource, eventually, maria_source, raw_count, removed
from clean_role import CleanRole, broken_laws, changelog
from everstate.app import App
from everstate.config import Config
from everstate.declarations.captures import Table
from everstate.errors import CaptureFailed, RowsUnplaced
from everstate.log.positions import Offsets
from everstate.log.topics import Topics
from everstate.pipeline.clean import Cleaner
from everstate.sources.cdc.balance import read_balance
from everstate.sources.cdc.capturing import Capturing
from everstate.sources.cdc.cleaning import Cleaning, cleaning_of
from tiers import counted

pytestmark = CONNECTED

ROWS = counted(20_000, full=60_000)
PARTS = 500
SWITCH = "SET GLOBAL binlog_legacy_event_pos = "


class Item(BaseModel):
    """A row of either table."""

    id: int
    note: str


@pytest.fixture
def source(mariadb: str) -> Iterator[MariaSource]:
    for made in maria_source(mariadb):
        made.run(
            *(f"CREATE TABLE {each} (id int PRIMARY KEY, note text)" for each in ("items", "parts"))
        )
        yield made
        MariaSource(mariadb).run(f"{SWITCH}ON")


def shop(source: MariaSource) -> App:
    app = App("shop")
    for name in ("item", "part"):
        app.entity(name, key="id", source="capture")(Item)
    tables = {f"{source.schema}.{name}s": Table(entity=name) for name in ("item", "part")}
    app.capture("shop", kind="mariadb", dsn=source.dsn, tables=tables)
    return app


def capture(config: Config, app: App) -> Capturing:
    with Topics(config) as topics:
        topics.ensure(app.entities)
    return Capturing(config, app.capture_of("shop"), local=True)


def write(source: MariaSource, rows: int) -> None:
    """One transaction: statements of many events, keys that change more than once."""
    source.run(
        f"INSERT INTO items SELECT seq, CONCAT('row ', seq) FROM seq_1_to_{rows}",
        f"INSERT INTO parts SELECT seq, CONCAT('part ', seq) FROM seq_1_to_{PARTS}",
        "UPDATE items SET note = 'changed' WHERE id <= 300",
        "UPDATE items SET note = CONCAT(note, ' again') WHERE id <= 200",
        "DELETE FROM items WHERE id <= 100",
    )


def in_log(config: Config) -> dict[tuple[str, str], str]:
    newest = {
        (name, one["key"]): one["currentEntityState"]
        for name in ("item", "part")
        for one in changelog(config, name)
    }
    return {key: state["note"] for key, state in newest.items() if state is not None}


def in_tables(source: MariaSource) -> dict[tuple[str, str], str]:
    return {
        (name, str(key)): note
        for name in ("item", "part")
        for key, note in source.rows(f"SELECT id, note FROM {name}s")
    }


@pytest.mark.full
@pytest.mark.timeout(600)
def test_c10_a_transaction_of_many_events_is_read_whole_when_connect_is_killed_inside(
    connect: Any, config: Config, source: MariaSource, spark: Any
) -> None:
    source.run("INSERT INTO items VALUES (1000000, 'first')")
    app = shop(source)
    capturing = capture(config, app)
    capturing.add()
    role = CleanRole(
        lambda: Cleaner(config, cleaning_of(config, app, "shop"), session=lambda: spark), capturing
    )
    changes = ROWS + PARTS + 300 + 200 + 100
    try:
        assert eventually(lambda: len(in_log(config)) == 1, 60)
        source.run("UPDATE items SET note = 'streamed' WHERE id = 1000000")
        assert eventually(lambda: "streamed" in in_log(config).values(), 60)
        # Until a position is stored, a connector that is killed takes its first snapshot again.
        assert eventually(lambda: streams(capturing), 60)
        raw = (capturing.names.raw_log, 0)
        with Offsets(config) as offsets:
            goal = offsets.stable_ends([raw[0]])[raw] + ROWS // 10
            write(source, ROWS)
            assert eventually(lambda: offsets.stable_ends([raw[0]])[raw] > goal, 60, every_s=0.01)
            connect.servers.kill("connect")
        connect.servers.start()
        source.run("INSERT INTO parts VALUES (0, 'after')")
        assert eventually(lambda: ("part", "0") in in_log(config), 180, every_s=2.0)
        balance = read_balance(config, app.capture_of("shop")).tables
        again = raw_count(config, "items") + raw_count(config, "parts") - changes - 3
    finally:
        role.end()
        capturing.remove(drop=True, topics=True)
    assert in_log(config) == in_tables(source)
    found = []
    for name in ("item", "part"):
        changed = changelog(config, name)
        assert broken_laws(changed) == []
        found += changed
    assert len(found) == changes + 3
    assert again > 0, "rows came twice"
    assert sum(each.skipped for each in balance) == again
    blocks = [one["provenance"]["transaction"] for one in found if one["version"] and one["key"]]
    whole = [each for each in blocks if each is not None and each["count"] == changes]
    assert sorted(each["index"] for each in whole) == list(range(1, changes + 1))


def test_a_binlog_without_positions_is_refused_before_anything_is_made(
    config: Config, source: MariaSource
) -> None:
    source.run(f"{SWITCH}OFF")
    capturing = capture(config, shop(source))
    with pytest.raises(CaptureFailed, match="nothing was made") as refused:
        capturing.add()
    assert "binlog_legacy_event_pos" in str(refused.value)
    (finding,) = [each for each in capturing.check() if each.name == "binlog_legacy_event_pos"]
    for statement in finding.sql:
        source.run(statement.rstrip(";"))
    found = {each.name: each.outcome for each in capturing.check()}
    assert found["binlog_legacy_event_pos"] == "ok"


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_binlog_that_loses_its_positions_stops_cleaning_before_a_row_is_skipped(
    config: Config, source: MariaSource, spark: Any
) -> None:
    app = shop(source)
    capturing = capture(config, app)
    capturing.add()
    cleaning: Callable[[], Cleaning] = lambda: cleaning_of(config, app, "shop")  # noqa: E731
    with removed(capturing):
        source.run(f"{SWITCH}OFF")
        write(source, 2_000)
        role = CleanRole(lambda: Cleaner(config, cleaning(), session=lambda: spark))
        raw = capturing.names.raw_log
        with Offsets(config) as offsets:
            assert eventually(lambda: sum(offsets.stable_ends([raw]).values()) > 3_100, 60)
        assert eventually(lambda: not role._threads[0].is_alive(), 60)
        with pytest.raises(RowsUnplaced, match="No row was skipped"):
            role.end()
        skipped = read_balance(config, app.capture_of("shop")).tables
        assert sum(each.skipped for each in skipped) == 0
        assert any("binlog_legacy" in each for each in capturing.status().problems)

        source.run(f"{SWITCH}ON")
        capturing.begin_epoch()
        role = CleanRole(lambda: Cleaner(config, cleaning(), session=lambda: spark))
        assert eventually(lambda: in_log(config) == in_tables(source), 120, every_s=2.0)
        source.run("UPDATE items SET note = 'b'", "UPDATE items SET note = 'c' WHERE id > 500")
        assert eventually(lambda: in_log(config) == in_tables(source), 60, every_s=2.0)
        role.end()
    for name in ("item", "part"):
        assert broken_laws(changelog(config, name)) == []
