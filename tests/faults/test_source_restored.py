"""A captured server is restored to an earlier copy, and its log soon passes what was read of it.

Then the server itself leaves out all that is written up to the connector's position: no record of
the raw log, and no end of a log, tells that. The mark does, and a new epoch mends it.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from test_binlog_positions import in_log as in_maria_log
from test_binlog_positions import in_tables as in_maria_tables
from test_binlog_positions import shop as maria_shop
from test_capture_again import in_log, in_tables
from test_capture_kill import shop, streams

from capture_cases import LOSING, MariaSource, PostgresSource, eventually
from clean_role import CleanRole, broken_laws, changelog
from everstate.app import App
from everstate.config import Config, load
from everstate.errors import SourceReplaced
from everstate.local import Stack
from everstate.log.topics import Topics
from everstate.pipeline.clean import Cleaner
from everstate.sources.cdc.capturing import Capturing
from everstate.sources.cdc.cleaning import cleaning_of
from everstate.sources.cdc.replaced import known_standing
from everstate.sources.cdc.restarting import Restarter
from kit.local_mariadb import mariadb_url

pytestmark = LOSING


class Server:
    """A database server of the test's own, whose files are copied and put back."""

    def __init__(self, folder: Path, name: str, kafka: str) -> None:
        # A server whose address is given is not started: neither Kafka, nor PostgreSQL for MariaDB.
        store = {"dsn": "dbname=nobody"} if name == "mariadb" else {}
        folder.mkdir()
        log = {"bootstrap_servers": kafka}
        self.config = load(folder, local={"fsync": False}, log=log, store=store)
        self.name, self.folder = name, folder
        self.stack = Stack(self.config, also=[name])
        self.data = self.config.project.data_dir / name / "data"

    def start(self) -> str:
        """Start it; out: its address."""
        connected = self.stack.start()
        if self.name == "mariadb":
            return mariadb_url(self.stack, self.config.project.data_dir)
        return connected.store_dsn

    def copy(self) -> None:
        """Copy its files while it is stopped."""
        self.stack.stop((self.name,))
        subprocess.run(["cp", "-a", self.data, self.folder / "copy"], check=True)
        self.stack.start()

    def restore(self) -> None:
        """Put the copy in the place of its files."""
        self.stack.stop((self.name,))
        shutil.rmtree(self.data)
        subprocess.run(["cp", "-a", self.folder / "copy", self.data], check=True)
        self.stack.start()


@pytest.fixture
def server(
    request: pytest.FixtureRequest, connect: Any, tmp_path: Path
) -> Iterator[tuple[Server, str]]:
    made = Server(tmp_path / "source", request.param, connect.config.bootstrap_servers)
    try:
        yield made, made.start()
    finally:
        made.stack.stop()


class Rig:
    """A capture with the clean role; its connector is checked when the test says so."""

    def __init__(self, config: Config, app: App, spark: Any) -> None:
        self.config = config
        self.capture = app.capture_of("shop")
        self.capturing = Capturing(config, self.capture, local=True)
        with Topics(config) as topics:
            topics.ensure(app.entities)
        self.capturing.add()
        self.role = CleanRole(
            lambda: Cleaner(config, cleaning_of(config, app, "shop"), session=lambda: spark)
        )

    def reads(self) -> bool:
        """Restart a connector that failed when its server stopped; most go on by themselves."""
        if self.capturing.failure() is not None:
            self.capturing._connect.restart(self.capturing.names.connector)
        return True

    def mark(self) -> str | None:
        return known_standing(self.config, self.capture).mark

    def goes_on(self) -> None:
        """The next mark is written, and cleaning comes to it."""
        before = self.mark()

        def has_gone_on() -> bool:
            # Nothing is written before the connector has stored a position.
            self.capturing.check_source(renew=True)
            return self.mark() not in (None, before)

        assert eventually(has_gone_on, every_s=1.0), self.capturing.status()

    def refused(self) -> None:
        """The restored database is noticed wherever somebody looks."""
        with pytest.raises(SourceReplaced, match="an earlier copy"):
            self.capturing.check_source(renew=True)
        with pytest.raises(SourceReplaced, match="an earlier copy"):
            self.capturing.resume()
        found = self.capturing.status()
        assert not found.well
        assert any("an earlier copy" in problem for problem in found.problems)
        (finding,) = [each for each in self.capturing.check() if each.name == "source"]
        assert finding.outcome == "fail"
        assert "--new-epoch" in (finding.advice or "")
        Restarter("shop", lambda: self.capturing).step()
        assert eventually(lambda: not self.capturing.status().reads)
        # Cleaning has stopped where it has got rows of the restored database.
        with suppress(SourceReplaced):
            self.role.end()
        self.role.begin()


def is_behind(rig: Rig) -> bool:
    """Whether the binlog of a MariaDB server ends before what was read of it."""
    known = known_standing(rig.config, rig.capture)
    with rig.capturing.database() as database:
        return database.went_back(known.place, rig.capturing.status().position) is not None


def end_of(source: PostgresSource) -> int:
    """Where the log of a PostgreSQL server ends."""
    return int(source.rows("SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')")[0][0])


def stored(rig: Rig) -> int:
    """The position in the log that the connector has stored."""
    return int(rig.capturing.running_position().get("lsn", 0))


def in_a_new_epoch(rig: Rig) -> None:
    rig.capturing.begin_epoch()


def removed_and_added(rig: Rig) -> None:
    rig.capturing.remove(drop=True)
    rig.capturing.add()


MENDS: list[Callable[[Rig], None]] = [in_a_new_epoch, removed_and_added]


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("server", ["postgres"], indirect=True)
def test_a_postgresql_that_was_restored_is_noticed_and_mended_though_its_log_has_caught_up(
    config: Config, server: tuple[Server, str], spark: Any
) -> None:
    postgres, dsn = server
    source = PostgresSource(dsn)
    source.run(
        *(f"CREATE TABLE {name} (id int PRIMARY KEY, note text)" for name in ("items", "lines")),
        "INSERT INTO items SELECT i, 'row ' || i FROM generate_series(1, 40) i",
    )
    rig = Rig(config, shop(dsn), spark)
    same = lambda: rig.reads() and in_log(config) == in_tables(source)  # noqa: E731
    try:
        assert eventually(same, 60), rig.capturing.status()
        source.run("INSERT INTO items VALUES (100, 'streamed')")
        assert eventually(lambda: streams(rig.capturing), 60)
        rig.goes_on()
        postgres.copy()
        for number, mend in enumerate(MENDS, 1):
            base = 1_000 * number
            source.run(
                f"INSERT INTO items SELECT {base} + i, 'lost' FROM generate_series(1, 20) i",
                f"DELETE FROM items WHERE id % 7 = {number}",
                f"UPDATE items SET note = 'lost {number}' WHERE id % 7 = 0",
                f"INSERT INTO lines VALUES ({number}, 'lost')",
            )
            assert eventually(same, 60), rig.capturing.status()
            rig.goes_on()
            written = end_of(source)
            assert eventually(lambda: stored(rig) > written, 30)  # noqa: B023
            end = stored(rig)
            postgres.restore()
            source.run(f"INSERT INTO items VALUES ({base}, 'left out')")
            while end_of(source) < end + 16 * 1_048_576:
                source.rows("SELECT pg_switch_wal()")
                source.run("INSERT INTO lines VALUES (99, 'x')", "DELETE FROM lines WHERE id = 99")
            source.run(f"INSERT INTO items VALUES ({base + 500}, 'behind it')")
            if number == 1:  # of the second copy the slot is that of another epoch
                behind = ("item", str(base + 500))
                assert eventually(lambda: rig.reads() and behind in in_log(config), 90)  # noqa: B023
                assert ("item", str(base)) not in in_log(config), "the server left it out"
            rig.refused()
            mend(rig)
            assert eventually(same, 90, every_s=1.0), (mend.__name__, rig.capturing.status())
            assert rig.capturing.status().problems == ()
            assert known_standing(config, rig.capture).epoch == number + 1
            source.run(f"INSERT INTO items VALUES ({base + 501}, 'streamed again')")
            assert eventually(same, 60), rig.capturing.status()
            rig.goes_on()
    finally:
        rig.role.end()
        rig.capturing.remove(drop=True, topics=True)
    mended(config, ("item", "line"))


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("server", ["mariadb"], indirect=True)
def test_a_mariadb_that_was_restored_is_noticed_and_mended(
    config: Config, server: tuple[Server, str], spark: Any
) -> None:
    mariadb, url = server
    source = MariaSource(url)
    source.run(
        *(f"CREATE TABLE {each} (id int PRIMARY KEY, note text)" for each in ("items", "parts")),
        "INSERT INTO items SELECT seq, CONCAT('row ', seq) FROM seq_1_to_40",
    )
    rig = Rig(config, maria_shop(source), spark)
    same = lambda: rig.reads() and in_maria_log(config) == in_maria_tables(source)  # noqa: E731
    try:
        assert eventually(same, 60), rig.capturing.status()
        source.run("INSERT INTO items VALUES (100, 'streamed')")
        assert eventually(lambda: streams(rig.capturing), 60)
        rig.goes_on()
        mariadb.copy()
        source.run(
            "INSERT INTO items SELECT 1000 + seq, 'lost' FROM seq_1_to_20",
            "DELETE FROM items WHERE id % 7 = 1",
        )
        source.run("INSERT INTO parts VALUES (1, 'lost')")
        assert eventually(same, 60), rig.capturing.status()
        rig.goes_on()
        mariadb.restore()
        with pytest.raises(SourceReplaced, match="its binlog ends at"):
            rig.capturing.check_source(renew=True)
        # As many transactions, and as many files of the binlog, as were read of it.
        key = 1_100
        while is_behind(rig):
            source.run(f"INSERT INTO items VALUES ({key}, 'after it')", "FLUSH BINARY LOGS")
            key += 1
        rig.refused()
        rig.capturing.begin_epoch()
        assert eventually(same, 90, every_s=1.0), rig.capturing.status()
        source.run("INSERT INTO items VALUES (1501, 'streamed again')")
        assert eventually(same, 60), rig.capturing.status()
        rig.goes_on()
    finally:
        rig.role.end()
        rig.capturing.remove(drop=True, topics=True)
    mended(config, ("item", "part"))


def mended(config: Config, entities: tuple[str, ...]) -> None:
    """Versions are dense and chained, no id is there twice, and each delete says why."""
    deleted = []
    for entity in entities:
        changes = changelog(config, entity)
        assert broken_laws(changes) == []
        deleted += [one for one in changes if one["kind"] == "deleted"]
    reasons = {one["provenance"].get("reason") for one in deleted}
    assert "its row is gone: a first snapshot that was taken again did not have it" in reasons
