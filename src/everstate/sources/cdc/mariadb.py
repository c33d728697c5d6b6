"""A captured MariaDB database: our table, rights, and how far the connector has read the binlog."""

from __future__ import annotations

import re
import ssl
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import islice
from typing import Any, ClassVar, Final, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from everstate.config import path_of
from everstate.declarations.captures import Capture
from everstate.errors import HIDDEN, CaptureFailed, InvalidCapture, InvalidConfig
from everstate.sources.cdc.connectors import (
    Address,
    ColumnUnit,
    OwnTables,
    SourceColumn,
    TableShape,
)
from everstate.sources.cdc.database import (
    REBUILT,
    CapturedDatabase,
    ConnectorStanding,
    InexactColumn,
    PrintedRows,
    SetupStep,
    TableState,
    from_raw,
    quoted_name,
)
from everstate.sources.cdc.inexact import inexact_in_mariadb, inexact_in_outbox
from everstate.sources.cdc.mariadb_checks import SIGN, MariaChecks, columns_of, create_table
from everstate.sources.cdc.names import CaptureNames
from everstate.sources.cdc.shapes.places import binlog_place, last_number
from everstate.telemetry import without_secret

_CONNECT_S: Final = 10
_EVENTS_MAX: Final = 2_000
_LOG_START: Final = 4
_CHANGED: Final = (
    "SELECT %s AS name, UNIX_TIMESTAMP(create_time) AS at FROM information_schema.tables "
    "WHERE table_schema = %s AND table_name = %s"
)
REMOVED: Final = "Removed"
"""Kind of an event that stands for those of files that the server no longer has."""
_AWAY: Final = frozenset({1040, 1053, 1927, 2002, 2003, 2006, 2013, 2055})
"""Codes of a server that does not answer now; every other one is a refusal."""
_TLS_MODES: Final = ("disable", "trust", "verify-ca", "verify-full")
_INTEGERS: Final = ("tinyint", "smallint", "mediumint", "int", "bigint", "year")
_UNREADABLE: Final = frozenset({"inet4", "inet6"})
_UNTOLD: Final = {"uuid": "Debezium writes another uuid for a change than the table has"}
_UNITS: Final[Mapping[str, ColumnUnit]] = {
    "date": "days",
    "datetime": "times",
    "time": "times of day",
    **dict.fromkeys(_INTEGERS, "numbers"),
}
_ENGINE: Final = """\
SELECT engine FROM information_schema.tables
WHERE table_schema = %s AND table_name = %s AND engine = %s"""
_SERVER_IDS: Final = "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('server_uid', 'server_uuid')"
_TABLE_IDS: Final = """\
SELECT name, table_id AS id,
  (SELECT max(table_id) FROM information_schema.innodb_sys_tables) AS seen
FROM information_schema.innodb_sys_tables WHERE name IN %s"""


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


def source_column(name: str, kind: str) -> SourceColumn:
    """A column of this type, as far as its values reach the raw log.

    All types were read from connectors that ran (``test_cdc_types_captured``).
    """
    stops = None
    if kind in _UNREADABLE:
        stops = f"Debezium cannot read a table with a column of type {kind}"
    units = _UNITS.get(kind)
    return SourceColumn(name, _UNTOLD.get(kind), numbers=units, stops=stops, kind=kind)


class MariaDatabase(CapturedDatabase):
    """A connection to a captured MariaDB database, as the connector's own user."""

    product, sign = "MariaDB", SIGN
    column = staticmethod(source_column)
    address_of = staticmethod(mariadb_address)
    replacing = "ON DUPLICATE KEY UPDATE data = VALUES(data)"
    ended: ClassVar = "SELECT @@global.gtid_binlog_pos AS at"
    """Its newest GTIDs."""
    table_ids: ClassVar = _TABLE_IDS
    processes: ClassVar = "information_schema.processlist"
    checks: ClassVar = MariaChecks

    def __init__(self, capture: Capture, names: CaptureNames, dsn: str) -> None:
        address, password = self.address_of(dsn)
        # It has no table for heartbeats: MariaDB keeps no log for an idle connector, which sends
        # heartbeats only while the binlog has new events.
        schema = capture.captured_tables[0].partition(".")[0]
        own = OwnTables(f"{schema}.everstate_signals_{names.identifier}")
        super().__init__(capture, names, address, own)
        driver = _driver(capture)
        with self._translated("connecting"):
            self._connection = driver.connect(
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
                init_command="SET time_zone = '+00:00'",
            )

    def prepare(self) -> list[SetupStep]:
        """Make our table; there is nothing else to make in MariaDB."""
        table = self.own.signals
        with self._translated("preparing"):
            making, is_there = create_table(table), self._exists(table)
            return [self._made(f"table {table}", making, is_there=is_there)]

    def remove(self) -> list[SetupStep]:
        """Drop our table."""
        with self._translated("removing"):
            self._execute(f"DROP TABLE IF EXISTS {self._quoted(self.own.signals)}")
        return [SetupStep(f"table {self.own.signals}", "removed")]

    def _checks(self) -> MariaChecks:
        return self.checks(self._rows, self._capture, self.own)

    def columns(self, table: str) -> list[dict[str, Any]]:
        """Also whole type and character set, in the order of the binlog."""
        with self._translated("reading the columns"):
            return columns_of(self._rows, table)

    def shapes(self, settings: Mapping[str, str]) -> Mapping[str, TableShape]:
        """The binlog has all columns of a row; Debezium cannot read each of their types."""
        del settings
        found = {}
        with self._translated("reading the columns"):
            for table in self._capture.captured_tables if self._capture.outbox is None else ():
                rows = self.columns(table)
                columns = tuple(self.column(str(r["name"]), str(r["type"])) for r in rows)
                key = tuple(str(column["name"]) for column in self._key(table, rows))
                if columns:
                    is_keyed = any(column["key_place"] is not None for column in rows)
                    found[table] = TableShape(columns, key, is_keyed)
        return found

    def printed_rows(self, table: str, columns: Sequence[SourceColumn]) -> PrintedRows:
        """Without converters the driver gives the text that the server sends, or bytes."""
        listed = ", ".join(quoted_name(each.name, SIGN) for each in columns)
        cursors = _driver(self._capture).cursors
        with (
            self._translated(f"reading {table}"),
            closing(self._connection.cursor(cursors.SSCursor)) as cursor,
        ):
            # Another engine would lock the table until its last row was sent.
            is_plain = self._rows(_ENGINE, *table.split(".", 1), "InnoDB")
            listed = listed if is_plain else f"SQL_BUFFER_RESULT {listed}"
            converters, self._connection.decoders = self._connection.decoders, {}
            try:
                cursor.execute(f"SELECT {listed} FROM {self._quoted(table)}")
            finally:
                self._connection.decoders = converters
            yield from cursor

    def log_place(self) -> tuple[int, int] | None:
        """Number of a file of the binlog, and a position in it."""
        file, _, position = self.log_end().rpartition(":")
        return _place({"file": file, "pos": position})

    def has_passed(self, offset: Mapping[str, Any], place: Any) -> bool:
        """A stored position is the beginning of what is read next, or is read again."""
        at = _place(offset)
        return at is not None and at >= place

    def changed_s(self, tables: Collection[str]) -> dict[str, float]:
        """When definition or name of each of these tables changed, in seconds since 1970.

        Tables that do not exist are left out. MariaDB's `create_time` is the time of the file with
        the definition, which every change of it and every renaming writes. Cost: one round trip.
        """
        if not tables:
            return {}
        # Without the names of schema and table, the server would open all tables that it has.
        every = " UNION ALL ".join([_CHANGED] * len(tables))
        names = [part for table in tables for part in (table, *table.split(".", 1))]
        with self._translated("asking when a table changed"):
            rows = self._rows(every, *names)
        return {str(row["name"]): float(row["at"]) for row in rows if row["at"] is not None}

    def table_states(self) -> tuple[int, Mapping[str, TableState]]:
        """When each table was altered, and its id in InnoDB, if the right PROCESS lets us see it.

        What removes its rows is in the raw log, but for another table that takes its name.
        """
        times = self.changed_s(self._capture.captured_tables)
        parts = {table: {"": str(at)} for table, at in times.items()}
        named, seen = {table.replace(".", "/"): table for table in parts}, 0
        with suppress(CaptureFailed), self._translated("looking at the ids of tables"):
            for row in self._rows(self.table_ids, list(named)) if named else ():
                parts[named[str(row["name"])]][f"{REBUILT}{row['id']}"], seen = "", int(row["seen"])
        return seen, {table: TableState({}, (), found) for table, found in parts.items()}

    def has_older_row(self, part: str, seen: int) -> bool:
        """Whether the table of this id was made before the newest one of that moment."""
        return part.startswith(REBUILT) and int(part.removeprefix(REBUILT)) <= seen

    def inexact_columns(self) -> list[InexactColumn]:
        """Columns with dates that no calendar has, by one pass over each table with dates.

        Of an outbox: columns whose nulls would become their default.
        """
        with self._translated("reading dates"):
            if self._capture.outbox is not None:
                return inexact_in_outbox(self._rows, self._capture.outbox.table)
            tables, checks = self._capture.captured_tables, self.checks.kept_out
            return list(inexact_in_mariadb(self._rows, tables, checks))

    def check_condition(self, table: str, condition: str) -> None:
        """Have the server plan a query with the condition."""
        with self._translated(f"looking at the condition {condition}"):
            self._execute(f"EXPLAIN SELECT 1 FROM {self._quoted(table)} WHERE ({condition})")

    def identity(self) -> str:
        """The server's unique id, where it has one; else its name and number."""
        with self._translated("asking which server it is"):
            known = self._rows(_SERVER_IDS)
            if known:
                return f"server {known[0]['Value']}"
            (row,) = self._rows("SELECT @@hostname AS name, @@server_id AS id")
        return f"server {row['name']} {row['id']}"

    def went_back(self, place: bytes, offset: Mapping[str, Any]) -> str | None:
        """Why the binlog cannot contain what was read: it ends before it (a reset, a restore)."""
        with self._translated("asking where the binlog ends"):
            last = self._rows("SHOW BINARY LOGS")[-1]
            ends = self.sequences(str(self._rows(self.ended)[0]["at"]))
        for domain, number in self.sequences(str(offset.get("gtids") or "")).items():
            if (end := ends.get(domain, number)) < number:
                ended = f"its binlog ends at transaction {end:,} of domain {domain}"
                return f"{ended}, and {number:,} was read of it before"
        at = (last_number(last["Log_name"]) or 0, int(last["File_size"]))
        read = [each for each in (binlog_place(place), _place(offset)) if each is not None]
        if not read or at >= max(read):
            return None
        file, position = max(read)
        ended = f"its binlog ends at {last['Log_name']}, position {at[1]:,}"
        return f"{ended}, and position {position:,} of file {file} was read of it before"

    @staticmethod
    def sequences(text: str) -> dict[str, int]:
        """GTIDs, such as ``0-1-270,1-1-3``: who numbers transactions → number of the last one."""
        return {domain: int(number) for domain, number in re.findall(r"(\d+)-\d+-(\d+)", text)}

    def standing(self, offset: Mapping[str, Any]) -> ConnectorStanding:
        """Whether a session of the connector's user reads the binlog, and how much is unread."""
        with self._translated("asking for the binlog"):
            dumps = self._rows(
                f"SELECT id FROM {self.processes} WHERE user = %s AND command LIKE 'Binlog Dump%%'",
                self.address.user,
            )
            logs = self._rows("SHOW BINARY LOGS")
            newest = str(self._rows(self.ended)[0]["at"])
        sizes = {str(row["Log_name"]): int(row["File_size"]) for row in logs}
        if newest and _gtids(newest) == _gtids(str(offset.get("gtids", ""))):
            # A connector that starts from a GTID stores the binlog's start until it reads a row.
            return ConnectorStanding(bool(dumps), 0, None, idle=True)
        file, position = offset.get("file"), offset.get("pos")
        if file is None or position is None:
            note = "the connector has stored no position yet"
            return ConnectorStanding(bool(dumps), None, None, note)
        if file not in sizes:
            note = f"the server has removed {file}, which the connector needs"
            return ConnectorStanding(bool(dumps), None, None, note, is_lost=True)
        names = list(sizes)
        after = names[names.index(file) :]
        behind = max(0, sum(sizes[name] for name in after) - int(position))
        unread = list(islice(self.events(f"{file}:{position}"), _EVENTS_MAX))
        maps = tuple(f"({table})" for table in self._capture.captured_tables)
        idle = len(unread) < _EVENTS_MAX and not any(
            event.kind == "Table_map" and event.info.endswith(maps) for event in unread
        )
        return ConnectorStanding(bool(dumps), behind, None, idle=idle)

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

    def _literal(self, value: Any, kind: str, is_raw: bool) -> str:
        if kind.lower() in _INTEGERS:
            return str(int(value))
        given = from_raw(value, kind.lower()) if is_raw else value
        if isinstance(given, bytes):
            return f"x'{given.hex()}'"
        return str(self._connection.literal(given))

    def _execute(self, query: str, *arguments: object) -> int:
        with self._connection.cursor() as cursor:
            return int(cursor.execute(query, arguments or None))

    def _rows(self, query: str, *arguments: object) -> list[dict[str, Any]]:
        with self._connection.cursor() as cursor:
            cursor.execute(query, arguments or None)
            return list(cursor.fetchall())

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.begin()
        try:
            yield
            self._connection.commit()
        except BaseException:
            self._connection.rollback()
            raise

    @contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        driver = _driver(self._capture)
        try:
            yield
        except driver.MySQLError as cause:
            code = cause.args[0] if cause.args else None
            reason = without_secret(str(cause.args[-1] if cause.args else cause)).rstrip(".")
            is_away = code in _AWAY or isinstance(cause, driver.InterfaceError)
            raise self._failed(doing, reason, is_away=is_away) from cause


def _place(offset: Mapping[str, Any]) -> tuple[int, int] | None:
    """Number of the file and position in it, of a stored source position."""
    if offset.get("file") is None or offset.get("pos") is None:
        return None
    return last_number(offset["file"]) or 0, int(offset["pos"])


def _gtids(text: str) -> set[str]:
    return {part.strip() for part in text.split(",") if part.strip()}


def _driver(capture: Capture) -> Any:
    """The module pymysql, which is imported only where a binlog is captured."""
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
