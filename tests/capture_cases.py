"""Databases to capture from, one of each kind: tables with a foreign key, a writer, an oracle."""

from __future__ import annotations

import json
import random
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import psycopg
import pymysql
import pytest
from psycopg import sql

from everstate.config import Config
from everstate.declarations.captures import Capture, DatabaseKind, Table
from everstate.errors import Unavailable
from everstate.log.consumer import Consumer
from everstate.log.record import Record
from everstate.sources.cdc.capturing import Capturing
from everstate.sources.cdc.placeholders import OWN_SETTING, placeholder_of
from everstate.sources.cdc.rows import AGGREGATE, KIND
from kit.settings import altered

UNAVAILABLE = placeholder_of(OWN_SETTING).text
TABLES = ("customers", "orders", "notes")
TRUSTING = ssl.create_default_context()
"""TLS with any certificate: MySQL makes itself one."""
TRUSTING.check_hostname, TRUSTING.verify_mode = False, ssl.CERT_NONE
LONG = 9_000
"""Characters that PostgreSQL keeps outside the row, when they do not compress."""

Row = dict[str, Any]
State = dict[str, dict[str, Row]]
"""Table → key as text → row."""


class Source(Protocol):
    """One captured database of a test."""

    @property
    def kind(self) -> DatabaseKind: ...

    @property
    def schema(self) -> str: ...

    @property
    def dsn(self) -> str: ...

    def run(self, *statements: str | tuple[str, Sequence[Any]]) -> None:
        """Run statements in one transaction."""

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Rows of a query."""


@dataclass
class PostgresSource:
    """A database of the run's PostgreSQL."""

    dsn: str
    kind: DatabaseKind = "postgresql"
    schema: str = "public"

    def run(self, *statements: str | tuple[str, Sequence[Any]]) -> None:
        with psycopg.connect(self.dsn) as connection:
            for each in statements:
                text, values = (each, ()) if isinstance(each, str) else each
                connection.execute(text.encode(), values or None)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.dsn) as connection:
            return connection.execute(query.encode()).fetchall()


@dataclass
class MariaSource:
    """A database of the run's MariaDB, or of its MySQL."""

    dsn: str
    kind: DatabaseKind = "mariadb"

    @property
    def schema(self) -> str:
        return urlsplit(self.dsn).path.lstrip("/")

    def _connect(self) -> Any:
        parts = urlsplit(self.dsn)
        return closing(
            pymysql.connect(
                host=parts.hostname or "",
                port=parts.port or 3306,
                user=parts.username,
                password=parts.password or "",
                database=self.schema,
                charset="utf8mb4",
                ssl=TRUSTING if self.kind == "mysql" else None,
            )
        )

    def run(self, *statements: str | tuple[str, Sequence[Any]]) -> None:
        with self._connect() as connection, connection.cursor() as cursor:
            for each in statements:
                text, values = (each, ()) if isinstance(each, str) else each
                cursor.execute(text, values or None)
            connection.commit()

    @contextmanager
    def session(self) -> Iterator[Any]:
        """A session that nothing ends: what it has prepared stays so."""
        with self._connect() as connection, connection.cursor() as cursor:
            yield cursor

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with self._connect() as connection, connection.cursor() as cursor:
            cursor.execute(query)
            return list(cursor.fetchall())


def maria_source(url: str, kind: DatabaseKind = "mariadb") -> Iterator[MariaSource]:
    """A new database of a server of MariaDB or MySQL, dropped in the end."""
    name = f"t{uuid.uuid4().hex[:12]}"
    admin = MariaSource(url, kind)
    admin.run(f"CREATE DATABASE {name}")
    try:
        yield MariaSource(f"{url.rpartition('/')[0]}/{name}", kind)
    finally:
        admin.run(f"DROP DATABASE {name}")


def source_of(request: pytest.FixtureRequest) -> Iterator[Source]:
    """An empty database of the kind that is the fixture's parameter."""
    if request.param == "postgresql":
        yield PostgresSource(request.getfixturevalue("database"))
    elif request.param == "mariadb":
        yield from maria_source(request.getfixturevalue("mariadb"))
    else:
        yield from maria_source(request.getfixturevalue("mysql"), "mysql")


OF_MYSQL: Final = pytest.param("mysql", marks=pytest.mark.full)
"""Only in the full tier, since its server is the newest one that Debian has."""


def capture_config(base: Config, prefix: str, **options: Any) -> Config:
    """The running servers, with topics of one test's own and a heartbeat every second.

    ``options``: more settings of `[capture]`.
    """
    capture = {"heartbeat_s": 1.0, **options}
    return altered(base, log={"prefix": prefix, "partitions": 2}, capture=capture)


def connected(**options: Any) -> list[pytest.MarkDecorator]:
    """Marks of a file whose captures run in Kafka Connect: the fixture `config` has its address.

    ``options``: more settings of `[capture]`.
    """
    capture = {"heartbeat_s": 1.0, **options}
    marked = pytest.mark.settings(log={"partitions": 2}, capture=capture, database=False)
    return [pytest.mark.usefixtures("connect"), marked]


CONNECTED = connected()
LOSING = connected(deletes_max_percent=100)
"""Also where all rows of a table may be gone."""


@contextmanager
def removed(capturing: Capturing) -> Iterator[Capturing]:
    """A capture that is removed behind the block, with all that it made."""
    try:
        yield capturing
    finally:
        capturing.remove(drop=True, topics=True)


def make_tables(source: Source) -> None:
    """Three tables: a parent, its child, and one with a column that is kept outside the row."""
    money = "numeric(12,2)" if source.kind == "postgresql" else "decimal(12,2)"
    source.run(
        "CREATE TABLE customers (id int PRIMARY KEY, name varchar(80) NOT NULL, email varchar(80))",
        "CREATE TABLE orders (id int PRIMARY KEY, customer_id int NOT NULL, "
        f"amount {money} NOT NULL, FOREIGN KEY (customer_id) REFERENCES customers (id))",
        "CREATE TABLE notes (id int PRIMARY KEY, title varchar(80), body text)",
    )
    if source.kind == "postgresql":
        source.run("ALTER TABLE notes ALTER body SET STORAGE EXTERNAL")


def capture_of(source: Source, name: str = "shop", **options: Any) -> Capture:
    """The declaration of all three tables."""
    tables = {f"{source.schema}.{table}": Table(entity=table.rstrip("s")) for table in TABLES}
    return Capture(name=name, kind=source.kind, tables=tables, dsn=source.dsn, **options)


def table_rows(source: Source) -> State:
    """The tables as they are, in the form in which a connector writes rows: the oracle."""
    state: State = {}
    for table in TABLES:
        columns = [
            str(row[0])
            for row in source.rows(
                "SELECT column_name FROM information_schema.columns WHERE table_name = "
                f"'{table}' AND table_schema = '{source.schema}' ORDER BY ordinal_position"
            )
        ]
        state[table] = {}
        for row in source.rows(f"SELECT {', '.join(columns)} FROM {table}"):
            named = dict(zip(columns, row, strict=True))
            if "amount" in named:
                named["amount"] = str(named["amount"])
            state[table][str(named["id"])] = named
    return state


def raw_rows(config: Config, source: str = "shop") -> State:
    """The rows that the raw log comes to, folded in the order of the log."""
    state: State = {table: {} for table in TABLES}
    for table, record in raw_records(config, source):
        if table in state:
            fold(state[table], json.loads(record.value or b""))
    return state


def raw_records(config: Config, source: str = "shop") -> Iterator[tuple[str, Record]]:
    """Table, or aggregate type of an outbox, and record of each row in a raw log, in its order."""
    with Consumer(config) as consumer:
        for record in consumer.read_topic(f"{config.log.prefix}.raw.{source}"):
            headers = dict(record.headers)
            if KIND in headers or record.value is None:
                continue
            aggregate = headers.get(AGGREGATE)
            if aggregate is not None:
                yield aggregate.decode().strip('"'), record
            else:
                yield json.loads(record.value)["source"]["table"], record


def fold(rows: dict[str, Row], message: dict[str, Any]) -> None:
    """Apply one message of Debezium to the rows of its table."""
    if message["op"] == "d":
        rows.pop(str(message["before"]["id"]), None)
        return
    after = dict(message["after"])
    known = rows.get(str(after["id"]), {})
    for column, value in after.items():
        if value == UNAVAILABLE and column in known:
            after[column] = known[column]
    rows[str(after["id"])] = after


def without_nulls(state: State) -> State:
    """Rows without their empty columns: a row from before a column was added lacks it."""
    return {
        table: {
            key: {name: value for name, value in row.items() if value is not None}
            for key, row in rows.items()
        }
        for table, rows in state.items()
    }


def eventually(check: Callable[[], bool], within_s: float = 60.0, every_s: float = 0.3) -> bool:
    """Whether ``check`` holds within that time."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if check():
            return True
        time.sleep(every_s)
    return check()


@dataclass
class Writer:
    """Writes all kinds of changes, in transactions over all tables, until it is stopped."""

    source: Source
    seed: int = 7
    pause_s: float = 0.01
    transactions: int = 0
    """Those that the database acknowledged."""
    unanswered: int = 0
    """Those it did not: it went away before the commit, or between the commit and its answer."""
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _next: int = 1
    _failed: BaseException | None = None

    def __enter__(self) -> Writer:
        self._thread = threading.Thread(target=self._run, name="writer")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End it; raises what made it fail."""
        self._stop.set()
        assert self._thread is not None
        self._thread.join()
        if self._failed is not None:
            raise self._failed

    def wait(self, transactions: int, within_s: float = 60.0) -> None:
        """Until so many more transactions are committed."""
        goal = self.transactions + transactions
        assert eventually(lambda: self.transactions >= goal or self._failed is not None, within_s)

    def _run(self) -> None:
        chance = random.Random(self.seed)
        while not self._stop.is_set():
            try:
                self.source.run(*self._statements(chance))
                self.transactions += 1
            except (psycopg.OperationalError, pymysql.OperationalError, pymysql.InterfaceError):
                self.unanswered += 1
                time.sleep(0.1)
            except BaseException as error:
                self._failed = error
                return
            time.sleep(self.pause_s)

    def _statements(self, chance: random.Random) -> list[str | tuple[str, Sequence[Any]]]:
        new, old = self._next, chance.randrange(1, self._next + 1)
        self._next += 1
        long = "".join(chance.choices("0123456789abcdefghijklmnopqrstuvwxyz", k=LONG))
        statements: list[str | tuple[str, Sequence[Any]]] = [
            ("INSERT INTO customers (id, name, email) VALUES (%s, %s, %s)", (new, f"n{new}", None)),
            (
                "INSERT INTO orders (id, customer_id, amount) VALUES (%s, %s, %s)",
                (new, new, "1.50"),
            ),
            ("INSERT INTO notes (id, title, body) VALUES (%s, %s, %s)", (new, "new", long)),
        ]
        kind = new % 4
        if kind == 0:
            statements.append(("UPDATE customers SET email = %s WHERE id = %s", (f"m{new}", old)))
        elif kind == 1:
            # The long column is not touched: PostgreSQL does not tell it.
            statements.append(("UPDATE notes SET title = %s WHERE id = %s", (f"t{new}", old)))
        elif kind == 2:
            statements.append(("DELETE FROM orders WHERE id = %s", (old,)))
            statements.append(("DELETE FROM notes WHERE id = %s", (old,)))
        else:
            # A key change: a delete and an insert for whoever reads the log.
            statements.append(("UPDATE orders SET id = %s WHERE id = %s", (1_000_000 + new, old)))
        return statements


def settled(config: Config, source: Source, within_s: float = 90.0) -> State:
    """Wait until the raw log comes to the tables' rows; returns what they come to at last."""
    wanted = without_nulls(table_rows(source))

    def same() -> bool:
        try:
            return without_nulls(raw_rows(config)) == wanted
        except Unavailable:
            return False

    eventually(same, within_s, every_s=1.0)
    return without_nulls(raw_rows(config))


def raw_count(config: Config, table: str, source: str = "shop") -> int:
    """Rows of one table, or of an outbox's aggregate type, in the raw log."""
    return sum(name == table for name, _ in raw_records(config, source))


def drop_role(dsn: str, name: str) -> None:
    """Drop a role of PostgreSQL with what it has."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        role = sql.Identifier(name)
        connection.execute(sql.SQL("DROP OWNED BY {}").format(role))
        connection.execute(sql.SQL("DROP ROLE {}").format(role))
