"""A captured MariaDB database: our table, rights, and how far the connector has read the binlog."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from everstate.config import path_of
from everstate.declarations.captures import Capture
from everstate.errors import HIDDEN, CaptureFailed, InvalidCapture, InvalidConfig, Unavailable
from everstate.sources.cdc.connectors import (
    Address,
    OwnTables,
    Peculiarities,
    TableShape,
)
from everstate.sources.cdc.database import (
    MARK,
    REBUILT,
    ConnectorStanding,
    Finding,
    InexactColumn,
    Key,
    SetupStep,
    TableState,
    from_raw,
    key_values,
)
from everstate.sources.cdc.inexact import inexact_in_mariadb, inexact_in_outbox
from everstate.sources.cdc.mariadb_checks import (
    check_tables,
    checks,
    create_table,
    own_columns,
    quoted,
)
from everstate.sources.cdc.mariadb_types import COLUMNS, TABLE_IDS, source_column
from everstate.sources.cdc.misread import ReadColumn, members_of, read_column
from everstate.sources.cdc.names import CaptureNames
from everstate.sources.cdc.shapes.places import binlog_place
from everstate.telemetry import without_secret

if TYPE_CHECKING:
    import pymysql

_CONNECT_S: Final = 10
_EVENTS_MAX: Final = 2_000
_LOG_START: Final = 4
REMOVED: Final = "Removed"
"""Kind of an event that stands for those of files that the server no longer has."""
_AWAY: Final = frozenset({1040, 1053, 1927, 2002, 2003, 2006, 2013, 2055})
"""Codes of a server that does not answer now; every other one is a refusal."""
_TLS_MODES: Final = ("disable", "trust", "verify-ca", "verify-full")
_INTEGERS: Final = frozenset({"tinyint", "smallint", "mediumint", "int", "bigint", "year"})


class BinlogEvent(NamedTuple):
    """One row of SHOW BINLOG EVENTS; places are such as ``binlog.000003:4711``."""

    place: str
    kind: str
    info: str
    end: str
    """Place behind it."""


def mariadb_address(dsn: str) -> tuple[Address, str]:
    """Address and password of ``mariadb://user:password@host:port/db``; raises InvalidConfig.

    ``?ssl-mode=`` is `disable`, `trust` (encrypted, any certificate), `verify-ca` or `verify-full`;
    the last two need ``&ssl-ca=``, a PEM file. Any other option is refused, and never ignored.
    """
    try:
        parts = urlsplit(dsn)
        port = parts.port or 3306
    except ValueError:  # it quotes parts of what it could not read
        parts, port = urlsplit(""), 0
    is_ours = parts.scheme in ("mariadb", "mysql") and "@" not in path_of(dsn)
    if not is_ours or not parts.hostname or not parts.username:
        raise InvalidConfig(
            "dsn of the capture",
            HIDDEN,
            "mariadb://user:password@host:port/database, with %40 for @, %25 for %, %2F for /, "
            "%3F for ? and %23 for # in the password",
        )
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    mode = options.get("ssl-mode", "disable")
    verifies = mode.startswith("verify-")
    if (
        options.keys() - {"ssl-mode", "ssl-ca"}
        or mode not in _TLS_MODES
        or verifies != ("ssl-ca" in options)
    ):
        raise InvalidConfig(
            "dsn of the capture",
            HIDDEN,
            f"no options but ssl-mode ({', '.join(_TLS_MODES)}) and, where a certificate is "
            "verified, ssl-ca (a PEM file)",
        )
    address = Address(
        host=parts.hostname,
        port=port,
        user=unquote(parts.username),
        database=unquote(parts.path.lstrip("/")),
        options=options,
    )
    return address, unquote(parts.password or "")


def _tls(address: Address) -> ssl.SSLContext | None:
    """TLS settings of the connection; raises InvalidConfig for an invalid certificate file."""
    mode, authority = address.options.get("ssl-mode", "disable"), address.options.get("ssl-ca")
    if mode == "disable":
        return None
    try:
        context = ssl.create_default_context(cafile=authority)
    except (OSError, ssl.SSLError) as cause:
        raise InvalidConfig("ssl-ca", authority, "a PEM file with certificates") from cause
    context.check_hostname = mode == "verify-full"
    if mode == "trust":
        context.verify_mode = ssl.CERT_NONE
    return context


def mariadb_own(capture: Capture, names: CaptureNames) -> OwnTables:
    """Our table of one capture, in the database of its first table.

    There is no table for heartbeats: MariaDB keeps no log for an idle connector, and the connector
    sends heartbeats only while the binlog has new events.
    """
    database = capture.captured_tables[0].partition(".")[0]
    return OwnTables(f"{database}.everstate_signals_{names.identifier}")


class MariaDatabase:
    """A connection to a captured MariaDB database, as the connector's own user."""

    def __init__(self, capture: Capture, names: CaptureNames, dsn: str) -> None:
        self._capture, self._names = capture, names
        self.address, password = mariadb_address(dsn)
        self.own = mariadb_own(capture, names)
        driver = _driver(capture)
        with self._translated("connecting"):
            self._connection: pymysql.connections.Connection[Any] = driver.connect(
                host=self.address.host,
                port=self.address.port,
                user=self.address.user,
                password=password,
                database=self.address.database or None,
                autocommit=True,
                connect_timeout=_CONNECT_S,
                ssl=_tls(self.address),
                charset="utf8mb4",
                cursorclass=driver.cursors.DictCursor,
            )

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def prepare(self) -> list[SetupStep]:
        """Make our table; there is nothing else to make in MariaDB."""
        table = self.own.signals
        with self._translated("preparing"):
            there = own_columns(self._rows, table)
            if not there:
                self._rows(create_table(table))
        return [SetupStep(f"table {table}", "there" if there else "made")]

    def release(self) -> list[SetupStep]:
        """Nothing to do: a capture never makes writes to MariaDB fail."""
        return []

    def begin_anew(self) -> list[SetupStep]:
        """Nothing here has a position: the connector's is in Kafka Connect."""
        return []

    def remove(self) -> list[SetupStep]:
        """Drop our table."""
        with self._translated("removing"):
            self._rows(f"DROP TABLE IF EXISTS {quoted(self.own.signals)}")
        return [SetupStep(f"table {self.own.signals}", "removed")]

    def check(self) -> list[Finding]:
        """Check the binlog's settings, rights, the captured tables and our table."""
        with self._translated("checking"):
            return checks(self._rows, self._capture, self.own)

    def check_slot(self) -> list[Finding]:
        """MariaDB has no slots."""
        return []

    def check_tables(self) -> list[Finding]:
        """Check keys and foreign keys of the captured tables."""
        with self._translated("checking the tables"):
            return check_tables(self._rows, self._capture, self.own)

    def peculiarities(self) -> Peculiarities:
        """Tables without a primary key; generated columns are in the binlog like all others."""
        with self._translated("reading the tables"):
            keys = {
                table: mapping.key_columns
                for table, mapping in self._capture.tables.items()
                if table in self._capture.captured_tables and not self._primary_key(table)
            }
        return Peculiarities(keys=keys)

    def shapes(self, settings: Mapping[str, str]) -> Mapping[str, TableShape]:
        """The binlog has all columns of a row; Debezium cannot read each of their types."""
        del settings
        found = {}
        with self._translated("reading the columns"):
            for table in self._capture.captured_tables if self._capture.outbox is None else ():
                rows = self._rows(COLUMNS, *table.split(".", 1))
                columns = tuple(source_column(str(r["name"]), str(r["type"])) for r in rows)
                key = tuple(str(column["name"]) for column in self._key(table))
                if columns:
                    found[table] = TableShape(columns, key)
        return found

    def changed_s(self, table: str) -> float | None:
        """When the table's definition or name changed, in seconds since 1970; None: no such table.

        MariaDB's `create_time` is the time of the file with the definition, which every change of
        it and every renaming writes.
        """
        with self._translated("asking when a table changed"):
            found = self._rows(
                "SET STATEMENT time_zone = '+00:00' FOR SELECT UNIX_TIMESTAMP(create_time) AS at "
                "FROM information_schema.tables WHERE table_schema = %s AND table_name = %s",
                *table.split(".", 1),
            )
        return None if not found or found[0]["at"] is None else float(found[0]["at"])

    def table_states(self) -> tuple[int, Mapping[str, TableState]]:
        """When each table was altered, and its id in InnoDB, if the right PROCESS lets us see it.

        What removes its rows is in the raw log, but for another table that takes its name.
        """
        times = {table: self.changed_s(table) for table in self._capture.captured_tables}
        parts = {table: {"": str(at)} for table, at in times.items() if at}
        named, seen = {table.replace(".", "/"): table for table in parts}, 0
        with suppress(CaptureFailed), self._translated("looking at the ids of tables"):
            for row in self._rows(TABLE_IDS, list(named)) if named else ():
                parts[named[str(row["name"])]][f"{REBUILT}{row['id']}"], seen = "", int(row["seen"])
        return seen, {table: TableState({}, (), found) for table, found in parts.items()}

    def has_older_row(self, part: str, seen: int) -> bool:
        """Whether the table of this id was made before the newest one of that moment."""
        return part.startswith(REBUILT) and int(part.removeprefix(REBUILT)) <= seen

    def columns(self, table: str) -> list[ReadColumn]:
        """Columns of a table in their order, as the binlog has the values."""
        with self._translated("reading the columns"):
            rows = self._rows(
                "SELECT column_name AS name, column_type AS type, character_set_name AS charset "
                "FROM information_schema.columns WHERE table_schema = %s AND table_name = %s "
                "ORDER BY ordinal_position",
                *table.split(".", 1),
            )
        return [
            read_column(
                row["name"],
                row["type"],
                members=members_of(row["type"]),
                charset=row["charset"],
            )
            for row in rows
        ]

    def inexact_columns(self) -> list[InexactColumn]:
        """Columns with dates that no calendar has, by one pass over each table with dates.

        Of an outbox: columns whose nulls would become their default.
        """
        with self._translated("reading dates"):
            if self._capture.outbox is not None:
                return inexact_in_outbox(self._rows, self._capture.outbox.table)
            return inexact_in_mariadb(self._rows, self._capture.captured_tables, quoted)

    def check_condition(self, table: str, condition: str) -> None:
        """Have the server plan a query with the condition."""
        with self._translated(f"looking at the condition {condition}"):
            self._rows(f"EXPLAIN SELECT 1 FROM {quoted(table)} WHERE ({condition})")

    def identity(self) -> str:
        """The server's unique id, where it has one; else its name and number."""
        with self._translated("asking which server it is"):
            known = self._rows("SHOW GLOBAL VARIABLES LIKE 'server_uid'")
            if known:
                return f"server {known[0]['Value']}"
            row = self._rows("SELECT @@hostname AS name, @@server_id AS id")[0]
        return f"server {row['name']} {row['id']}"

    def went_back(self, place: bytes, offset: Mapping[str, Any]) -> str | None:
        """Why the binlog cannot contain what was read: it ends before it (a reset, a restore)."""
        with self._translated("asking where the binlog ends"):
            last = self._rows("SHOW BINARY LOGS")[-1]
            ends = _sequences(str(self._rows("SELECT @@global.gtid_binlog_pos AS at")[0]["at"]))
        for domain, number in _sequences(str(offset.get("gtids") or "")).items():
            if (end := ends.get(domain, number)) < number:
                ended = f"its binlog ends at transaction {end:,} of domain {domain}"
                return f"{ended}, and {number:,} was read of it before"
        at = (_number(str(last["Log_name"])), int(last["File_size"]))
        read = [each for each in (binlog_place(place), _place(offset)) if each is not None]
        if not read or at >= max(read):
            return None
        file, position = max(read)
        ended = f"its binlog ends at {last['Log_name']}, position {at[1]:,}"
        return f"{ended}, and position {position:,} of file {file} was read of it before"

    def read_mark(self) -> str | None:
        """The text in the table of signals."""
        table = self.own.signals
        with self._translated("reading our mark"):
            if not own_columns(self._rows, table):
                return None
            found = self._rows(f"SELECT data FROM {quoted(table)} WHERE id = %s", MARK)
        return str(found[0]["data"]) if found else None

    def write_mark(self, text: str, instead_of: str | None) -> bool:
        """Write a text into the table of signals."""
        table = quoted(self.own.signals)
        with self._translated("writing our mark"), self._connection.cursor() as cursor:
            if instead_of is None:
                put = f"INSERT INTO {table} (id, type, data) VALUES (%s, 'log', %s) "
                cursor.execute(f"{put}ON DUPLICATE KEY UPDATE data = VALUES(data)", (MARK, text))
                return True
            change = f"UPDATE {table} SET data = %s WHERE id = %s AND data = %s"
            return bool(cursor.execute(change, (text, MARK, instead_of)) == 1)

    def standing(self, offset: Mapping[str, Any]) -> ConnectorStanding:
        """Whether a session of the connector's user reads the binlog, and how much is unread."""
        with self._translated("asking for the binlog"):
            dumps = self._rows(
                "SELECT id FROM information_schema.processlist "
                "WHERE user = %s AND command LIKE 'Binlog Dump%%'",
                self.address.user,
            )
            logs = self._rows("SHOW BINARY LOGS")
            newest = str(self._rows("SELECT @@global.gtid_binlog_pos AS at")[0]["at"])
        sizes = [(str(row["Log_name"]), int(row["File_size"])) for row in logs]
        if newest and _gtids(newest) == _gtids(str(offset.get("gtids", ""))):
            # A connector that starts from a GTID stores the binlog's start until it reads a row.
            return ConnectorStanding(bool(dumps), 0, None, idle=True)
        file, position = offset.get("file"), offset.get("pos")
        if file is None or position is None:
            return ConnectorStanding(
                bool(dumps), None, None, "the connector has stored no position yet"
            )
        named = [name for name, _size in sizes]
        if file not in named:
            note = f"the server has removed {file}, which the connector needs"
            return ConnectorStanding(bool(dumps), None, None, note, is_lost=True)
        after = sizes[named.index(file) :]
        behind = max(0, sum(size for _name, size in after) - int(position))
        return ConnectorStanding(
            bool(dumps), behind, None, idle=self._is_idle(f"{file}:{position}")
        )

    def _is_idle(self, place: str) -> bool:
        """Whether nothing of the captured tables is in the binlog after a place."""
        maps = tuple(f"({table})" for table in self._capture.captured_tables)
        unread = list(islice(self.events(place), _EVENTS_MAX))
        return len(unread) < _EVENTS_MAX and not any(
            event.kind == "Table_map" and event.info.endswith(maps) for event in unread
        )

    def log_end(self) -> str:
        """Where the binlog ends, as ``binlog.000003:4711``."""
        with self._translated("asking where the binlog ends"):
            last = self._rows("SHOW BINARY LOGS")[-1]
        return f"{last['Log_name']}:{last['File_size']}"

    def events(self, place: str) -> Iterator[BinlogEvent]:
        """The events of the binlog after a place; two thousand are read at once."""
        file, _, start = place.rpartition(":")
        position = int(start)
        with self._translated("reading the binlog"):
            files = [str(row["Log_name"]) for row in self._rows("SHOW BINARY LOGS")]
        if file not in files:
            file, position = files[0], _LOG_START
            yield BinlogEvent(place, REMOVED, "", f"{file}:{position}")
        for name in files[files.index(file) :]:
            rows: list[dict[str, Any]] | None = None
            while rows is None or len(rows) == _EVENTS_MAX:
                query = "SHOW BINLOG EVENTS IN %s FROM %s LIMIT %s"
                with self._translated("reading the binlog"):
                    rows = self._rows(query, name, position, _EVENTS_MAX)
                for row in rows:
                    begin, position = f"{name}:{row['Pos']}", int(row["End_log_pos"]) or position
                    kind, info = str(row["Event_type"]), str(row["Info"])
                    yield BinlogEvent(begin, kind, info, f"{name}:{position}")
            position = _LOG_START

    def signal(self, signal_id: str, kind: str, data: str) -> None:
        """Insert a signal into our table and delete it; the connector reads it from the binlog."""
        table = quoted(self.own.signals)
        with self._translated("signalling"):
            self._connection.begin()
            try:
                self._rows(
                    f"INSERT INTO {table} (id, type, data) VALUES (%s, %s, %s)",
                    *(signal_id, kind, data),
                )
                self._rows(f"DELETE FROM {table} WHERE id LIKE 'everstate-%'")
                self._connection.commit()
            except BaseException:
                self._connection.rollback()
                raise

    def condition(self, table: str, keys: Sequence[Key], *, is_raw: bool = False) -> str:
        """Condition on the key's columns, each value as a literal."""
        with self._translated("reading the key"):
            columns = self._key(table)
        return " OR ".join(self._row_condition(table, columns, key, is_raw) for key in keys)

    def _key(self, table: str) -> list[dict[str, Any]]:
        """Name and type of each column of the declared key, or else of the primary key."""
        declared = self._capture.tables.get(table)
        if declared is None or not declared.key_columns:
            return self._primary_key(table)
        database, _, name = table.partition(".")
        found = self._rows(
            "SELECT column_name AS name, data_type AS type FROM information_schema.columns "
            "WHERE table_schema = %s AND table_name = %s AND column_name IN %s",
            *(database, name, declared.key_columns),
        )
        return sorted(found, key=lambda column: declared.key_columns.index(column["name"]))

    def _primary_key(self, table: str) -> list[dict[str, Any]]:
        database, _, name = table.partition(".")
        return self._rows(
            "SELECT k.column_name AS name, c.data_type AS type "
            "FROM information_schema.statistics k JOIN information_schema.columns c "
            "USING (table_schema, table_name, column_name) "
            "WHERE k.table_schema = %s AND k.table_name = %s "
            "AND k.index_name = 'PRIMARY' ORDER BY k.seq_in_index",
            *(database, name),
        )

    def _row_condition(
        self, table: str, columns: Sequence[dict[str, Any]], key: Key, is_raw: bool
    ) -> str:
        values = key_values(self._capture.name, table, [c["name"] for c in columns], key)
        parts = []
        for column, value in zip(columns, values, strict=True):
            try:
                literal = self._literal(value, str(column["type"]).lower(), is_raw)
            except ValueError as cause:
                reason = f"{table}: {column['name']} is of type {column['type']}, not {value!r}"
                raise InvalidCapture(self._capture.name, reason) from cause
            parts.append(f"{quoted(column['name'])} = {literal}")
        return f"({' AND '.join(parts)})"

    def _literal(self, value: Any, kind: str, is_raw: bool) -> str:
        if kind in _INTEGERS:
            return str(int(value))
        given = from_raw(value, kind) if is_raw else value
        if isinstance(given, bytes):
            return f"x'{given.hex()}'"
        return str(self._connection.literal(given))

    def _rows(self, query: str, *arguments: object) -> list[dict[str, Any]]:
        with self._connection.cursor() as cursor:
            cursor.execute(query, arguments or None)
            return list(cursor.fetchall())

    @contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        """Translate MariaDB's errors into ours."""
        driver = _driver(self._capture)
        where = f"{self.address.host}:{self.address.port}/{self.address.database}"
        try:
            yield
        except driver.MySQLError as cause:
            code = cause.args[0] if cause.args else None
            reason = without_secret(str(cause.args[-1] if cause.args else cause)).rstrip(".")
            name = self._capture.name
            if code in _AWAY or isinstance(cause, driver.InterfaceError):
                raise Unavailable(f"{name}: {doing}: MariaDB at {where}: {reason}.") from cause
            raise CaptureFailed(
                f"{name}: {doing}: MariaDB at {where} refuses: {reason}.",
                advice=f"`everstate cdc doctor {name}` shows what is missing.",
            ) from cause


def _number(file: str) -> int:
    """Number of a file of the binlog."""
    found = re.findall(r"[0-9]+", file)
    return int(found[-1]) if found else 0


def _place(offset: Mapping[str, Any]) -> tuple[int, int] | None:
    """Number of the file and position in it, of a stored source position."""
    if offset.get("file") is None or offset.get("pos") is None:
        return None
    return _number(str(offset["file"])), int(offset["pos"])


def _sequences(text: str) -> dict[str, int]:
    """GTIDs, such as ``0-1-270,1-1-3``: domain → number of its last transaction."""
    parts = [one.split("-") for one in _gtids(text)]
    return {part[0]: int(part[2]) for part in parts if len(part) == 3 and part[2].isdigit()}


def _gtids(text: str) -> set[str]:
    return {part.strip() for part in text.split(",") if part.strip()}


def _driver(capture: Capture) -> Any:
    """The module pymysql, which is imported only where MariaDB is captured."""
    try:
        import pymysql
        import pymysql.cursors
    except ModuleNotFoundError as cause:
        raise InvalidCapture(
            capture.name,
            "the driver for MariaDB is not installed",
            advice="Install everstate with its extra `mariadb`.",
        ) from cause
    return pymysql
