"""The doctor's checks of a captured MariaDB database, with the SQL that repairs it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final

from everstate.declarations.captures import Capture
from everstate.sources.cdc.connectors import OwnTables
from everstate.sources.cdc.database import (
    ONE_ENTITY,
    Finding,
    FindingOutcome,
    RunQuery,
    no_table,
    quoted,
    quoted_name,
    verdict,
)
from everstate.sources.cdc.mariadb_statements import unreadable_clauses

WANTED: Final[Mapping[str, tuple[str, FindingOutcome, str]]] = {
    "binlog_format": ("ROW", "fail", "no row is in the log otherwise"),
    "binlog_row_image": ("FULL", "fail", "otherwise the log lacks columns that did not change"),
    "binlog_row_metadata": ("FULL", "warn", "column names in the log keep schema changes safe"),
}
_POSITIONS: Final = "binlog_legacy_event_pos"
"""MariaDB from 11.4 on leaves out the positions of events within a transaction, unless it is ON."""
_OWN_KEYS: Final = "innodb_native_foreign_keys"
"""MySQL from 9.6 on has the rows that a foreign key changes in its binlog, unless it is ON."""
_FAILS: Final = "the connector fails at the table"
_IN_FILE: Final = "Put it into the configuration file too"
_NO_ZERO_DATES: Final = ("NO_ZERO_DATE", "NO_ZERO_IN_DATE")
_KEEP_S_MIN: Final = 86_400
SIGN: Final = "`"
"""The sign around names in MariaDB's SQL."""
_OWN: Final = ("SELECT", "INSERT", "UPDATE", "DELETE")
_CASCADE: Final = re.compile(
    r"CONSTRAINT `(?P<name>[^`]+)` FOREIGN KEY .*? ON (?:DELETE|UPDATE) (?:CASCADE|SET NULL)"
)
_UNIQUE: Final = re.compile(r"(?:PRIMARY|UNIQUE) KEY (?:`[^`]+` )?\((?P<columns>[^)]*)\)")
_UNREAD_DEFAULTS: Final[Mapping[str, re.Pattern[str]]] = {
    "a uuid": re.compile(r"`([^`]+)` uuid(?: NOT NULL)? DEFAULT '"),
    "X''": re.compile(r"`([^`]+)` \w*blob(?: NOT NULL)? DEFAULT X''"),
}
"""Defaults that Debezium cannot read, in the result of SHOW CREATE TABLE."""
_HASHED: Final = (
    "SELECT index_name AS name FROM information_schema.statistics "
    "JOIN information_schema.columns USING (table_schema, table_name, column_name) "
    "WHERE table_schema = %s AND table_name = %s AND index_type = 'HASH' GROUP BY index_name "
    "HAVING max(sub_part IS NULL AND data_type REGEXP 'text|blob') "
    "OR sum(if(sub_part IS NULL, character_octet_length, 0)) > 3072 ORDER BY 1"
)
"""Unique keys with a hidden column: a key of another type may be declared as HASH, and is none."""
# Constraints are visible only with a right to write; columns with a right to read.
_COLUMNS: Final = """\
SELECT column_name AS name, IF(column_type = 'bit(1)', column_type, data_type) AS type,
  column_type AS whole_type, character_set_name AS charset, column_key = 'PRI' AS is_keyed,
  is_nullable = 'YES' AS may_be_null, column_default <> 'NULL' AS has_default,
  column_default LIKE 'current_timestamp%%' AS default_is_now
FROM information_schema.columns
WHERE table_schema = %s AND table_name = %s ORDER BY ordinal_position"""
"""Also a unique key makes columns ``is_keyed``, where there is no primary key."""
# An outer join with the columns would read the definitions of all tables of the server.
_PRIMARY: Final = """\
SELECT column_name AS name, seq_in_index AS place FROM information_schema.statistics
WHERE table_schema = %s AND table_name = %s AND index_name = 'PRIMARY'"""
_COLUMN: Final = re.compile(r"`([^`]+)`")
_GRANT: Final = re.compile(r"^GRANT (?P<rights>.+?) ON (?P<scope>\S+) TO ")


class MariaChecks:
    """Checks of one capture's database; a few round trips, nothing is changed."""

    wanted: ClassVar[Mapping[str, tuple[str, FindingOutcome, str]]] = {
        **WANTED,
        "gtid_strict_mode": ("ON", "warn", "a replica that is promoted keeps the same order"),
    }
    """Variable of the server → its value, what another one is, and why."""
    rights: ClassVar[Mapping[str, Sequence[str]]] = {
        "RELOAD": ("RELOAD",),
        "SHOW DATABASES": ("SHOW DATABASES",),
        "REPLICATION SLAVE": ("REPLICATION SLAVE",),
        "BINLOG MONITOR": ("BINLOG MONITOR", "REPLICATION CLIENT"),
    }
    """Server-wide right → its names in all versions."""
    other: ClassVar = 'This connector is for MariaDB: declare kind="mysql".'
    log_status: ClassVar = "SHOW MASTER STATUS"
    kept_out: ClassVar = (
        "SELECT check_clause AS text FROM information_schema.check_constraints "
        "WHERE constraint_schema = %s AND table_name = %s"
    )
    """The CHECKs of a table."""

    def __init__(self, rows: RunQuery, capture: Capture, own: OwnTables) -> None:
        self._rows, self._capture, self._own = rows, capture, own
        names = [*self.wanted, "log_bin", "server_id", "binlog_expire_logs_seconds",
                 "expire_logs_days", "sql_mode", _POSITIONS, _OWN_KEYS]  # fmt: skip
        found = rows("SHOW GLOBAL VARIABLES WHERE Variable_name IN %s", names)
        self._settings = {row["Variable_name"]: str(row["Value"]) for row in found}
        user, _, host = str(rows("SELECT current_user() AS name")[0]["name"]).rpartition("@")
        self._user = f"'{user}'@'{host}'"
        self._grants = _grants(next(iter(row.values())) for row in rows("SHOW GRANTS"))

    def everything(self) -> list[Finding]:
        """What is found of all that the connector needs."""
        rights = self._global_rights()
        return [
            *self._log(),
            rights,
            *(self._logged() if rights.outcome == "ok" else ()),
            *self.tables(),
            self._own_table(),
        ]

    def tables(self) -> list[Finding]:
        """What is found of the captured tables, and whether their rows can be told apart."""
        return [*self._captured(), *self._positions()]

    def _log(self) -> list[Finding]:
        version = str(self._rows("SELECT version() AS v")[0]["v"])
        has_log = self._settings.get("log_bin", "OFF") in ("ON", "1")
        number = self._settings.get("server_id", "0")
        told, is_ours = "ON" if has_log else "there is no binlog", self._is_ours(version)
        no_log = "Set log-bin in the server's configuration file and restart it."
        return [
            verdict("version", version, is_ours, advice=self.other),
            verdict("log_bin", told, has_log, advice=no_log),
            *(self._setting(name, *wanted) for name, wanted in self.wanted.items()),
            *self._zero_dates(),
            verdict("server_id", number, number != "0", "SET GLOBAL server_id = 1;"),
            self._retention(),
        ]

    def _is_ours(self, version: str) -> bool:
        return "mariadb" in version.lower()

    def _setting(self, name: str, wanted: str, outcome: FindingOutcome, why: str) -> Finding:
        found = self._settings.get(name, "unknown")
        if found.upper() == wanted or (wanted == "ON" and found == "1"):
            return Finding(name, "ok", found)
        statement, advice = f"SET GLOBAL {name} = '{wanted}';", f"{_IN_FILE}: {why}."
        return Finding(name, outcome, f"{found}, wanted {wanted}", (statement,), advice)

    def _positions(self) -> list[Finding]:
        """Whether events of a transaction have their positions; older servers always write them."""
        if (found := self._settings.get(_POSITIONS)) is None:
            return []
        if found in ("ON", "1"):
            return [Finding(_POSITIONS, "ok", found)]
        found += ": rows of one transaction have one position: re-read rows look like new ones"
        advice = f"{_IN_FILE}. It holds for transactions from then on."
        return [Finding(_POSITIONS, "fail", found, (f"SET GLOBAL {_POSITIONS} = ON;",), advice)]

    def _zero_dates(self) -> list[Finding]:
        """Whether the server takes dates that no calendar has; Debezium writes others for them."""
        if (found := self._settings.get("sql_mode")) is None:
            return []
        if not (missing := modes_missing(found)):
            return [Finding("sql_mode", "ok", ", ".join(_NO_ZERO_DATES))]
        lacks = f"without {', '.join(missing)} a date may have month 0 or day 0, and would be "
        lacks += "captured as null or as 1970-01-01"
        added = "".join(f",{mode}" for mode in missing)
        statement = f"SET GLOBAL sql_mode = concat(@@GLOBAL.sql_mode, '{added}');"
        advice = f"{_IN_FILE}; sessions of the application may set it."
        return [Finding("sql_mode", "warn", lacks, (statement,), advice)]

    def _retention(self) -> Finding:
        days = float(self._settings.get("expire_logs_days", "0"))
        seconds = float(self._settings.get("binlog_expire_logs_seconds", "0")) or days * 86_400
        if seconds == 0 or seconds >= _KEEP_S_MIN:
            found = "for ever" if seconds == 0 else f"{seconds / 3600:,.0f} h"
            return Finding("binlog kept", "ok", found)
        statement = "SET GLOBAL binlog_expire_logs_seconds = 604800;"
        advice = "A connector that is away for longer has lost its place."
        return Finding("binlog kept", "warn", f"{seconds / 3600:,.1f} h", (statement,), advice)

    def _global_rights(self) -> Finding:
        held = self._grants.get("*.*", set())
        missing = [r for r, names in self.rights.items() if not held & {*names, "ALL PRIVILEGES"}]
        return self._lacking("rights", missing, list(self.rights), "*.*")

    def _logged(self) -> Iterator[Finding]:
        """Captured databases that the server is configured to leave out of its binlog."""
        status = next(iter(self._rows(self.log_status)), {})
        only, ignored = _listed(status, "Binlog_Do_DB"), _listed(status, "Binlog_Ignore_DB")
        for database in sorted({t.partition(".")[0] for t in self._capture.captured_tables}):
            if database in ignored or (only and database not in only):
                found = f"the server leaves changes of {database} out of its binlog"
                advice = "Change binlog-ignore-db and binlog-do-db in its configuration file."
                yield Finding(f"log of {database}", "fail", found, advice=advice)

    def _captured(self) -> Iterator[Finding]:
        for table in self._capture.captured_tables:
            found = columns_of(self._rows, table)
            rights = self._rights(table, ("SELECT",))
            if rights.outcome == "fail" or found:
                yield rights
            else:
                yield no_table(table)
            if rights.outcome == "ok" and found:
                made = self._definition(table)
                yield self._key(table, any(column["is_keyed"] for column in found), made)
                yield from self._unlogged(table, made)

    def _definition(self, table: str) -> str:
        """The statement that makes it; a default value in it may be bytes that are no text."""
        self._rows("SET character_set_results = binary")
        try:
            made = self._rows(f"SHOW CREATE TABLE {quoted(table, SIGN)}")[0].get("Create Table")
        finally:
            self._rows("SET character_set_results = utf8mb4")
        return made.decode("utf-8", "replace") if isinstance(made, bytes) else str(made)

    def _unlogged(self, table: str, made: str) -> Iterator[Finding]:
        """Foreign keys that change rows without a record in the binlog, and what stops a connector.

        Defaults and clauses stop it whether a field has the column or not.
        """
        actions = ", ".join(sorted({m["name"] for m in _CASCADE.finditer(made)}))
        if actions and self._settings.get(_OWN_KEYS) != "OFF":
            found = f"rows changed by {actions} (ON DELETE or UPDATE) are not in the binlog"
            advice = "Have the application change these rows itself, or read them again after it: "
            advice += f"`everstate cdc snapshot {self._capture.name} --table {table}`."
            yield Finding(f"foreign keys of {table}", "warn", found, advice=advice)
        alter = f"ALTER TABLE {quoted(table, SIGN)}"
        advice = "Then the application gives the value, or CREATE TRIGGER … BEFORE INSERT does."
        for default, pattern in _UNREAD_DEFAULTS.items():
            why = f"its default is {default}, which Debezium cannot read: {_FAILS}"
            for name in pattern.findall(made):
                drop = f"{alter} ALTER COLUMN `{name}` DROP DEFAULT;"
                yield Finding(f"default of {table}.{name}", "fail", why, (drop,), advice)
        why = "it is unique over a text, and for it the binlog has a hidden column with a hash, "
        why += "which Debezium cannot read: the connector fails at the first change of the table"
        advice = "Then make it of a column with a bounded length, such as varchar(190), or of the "
        advice += "first characters: ADD UNIQUE KEY (`title`(190))."
        for row in self._rows(_HASHED, *table.split(".", 1)):
            drop = f"{alter} DROP KEY {quoted_name(str(row['name']), SIGN)};"
            yield Finding(f"key {row['name']} of {table}", "fail", why, (drop,), advice)
        if clauses := ", ".join(unreadable_clauses(made)):
            why = f"it has {clauses}, which Debezium cannot read: {_FAILS}"
            advice = "Make the table without it, or capture a table without it that is copied to."
            yield Finding(f"table {table}", "fail", why, advice=advice)

    def _own_table(self) -> Finding:
        table = self._own.signals
        rights, making = self._rights(table, _OWN), f"{create_table(table)};"
        if rights.outcome == "fail":
            return Finding(rights.name, "fail", rights.found, (making, *rights.sql))
        if not columns_of(self._rows, table):
            return Finding(f"table {table}", "fail", "there is none", (making,))
        return rights

    def _key(self, table: str, keyed: bool, made: str) -> Finding:
        """``made``: the statement that makes the table."""
        name, declared = f"key of {table}", self._capture.tables.get(table)
        columns = declared.key_columns if declared else ()
        listed = ", ".join(columns)
        if not keyed and columns:
            found = f"there is no primary key; it is read by its declared {listed}"
            return Finding(name, "warn", found, advice=ONE_ENTITY)
        if not keyed:
            statement = f"ALTER TABLE {quoted(table, SIGN)} ADD PRIMARY KEY (`id`);"
            advice = "With the columns that name a row; or declare its Table with key_columns."
            return Finding(name, "fail", "there is no primary key", (statement,), advice)
        unique = [set(_COLUMN.findall(m["columns"])) for m in _UNIQUE.finditer(made)]
        if not columns or any(each <= set(columns) for each in unique):
            return Finding(name, "ok", f"it has {listed or 'a primary key'}")
        found = f"no unique key of the table is within the declared key_columns {listed}"
        # Each unique key of a partitioned table has the columns that it is partitioned by.
        outcome: FindingOutcome = "warn" if "PARTITION BY" in made else "fail"
        return Finding(name, outcome, found, advice=ONE_ENTITY)

    def _rights(self, table: str, wanted: tuple[str, ...]) -> Finding:
        scopes = "*.*", f"{table.partition('.')[0]}.*", table
        held = set[str]().union(*(self._grants.get(scope, ()) for scope in scopes))
        missing = [right for right in wanted if not held & {right, "ALL PRIVILEGES"}]
        return self._lacking(f"rights on {table}", missing, wanted, quoted(table, SIGN))

    def _lacking(
        self, name: str, missing: Sequence[str], wanted: Sequence[str], scope: str
    ) -> Finding:
        """A failure if rights are missing, with the statement that gives them."""
        listed = ", ".join(missing)
        found = f"{self._user} lacks {listed}" if missing else ", ".join(wanted)
        return verdict(name, found, not missing, f"GRANT {listed} ON {scope} TO {self._user};")


def modes_missing(sql_mode: str) -> list[str]:
    """What a server's ``sql_mode`` lacks so that it refuses dates that no calendar has."""
    modes = set(sql_mode.split(","))
    strict = [] if modes & {"STRICT_TRANS_TABLES", "STRICT_ALL_TABLES"} else ["STRICT_TRANS_TABLES"]
    return [mode for mode in _NO_ZERO_DATES if mode not in modes] + strict


def _listed(status: Mapping[str, Any], name: str) -> set[str]:
    return {each.strip() for each in str(status.get(name) or "").split(",") if each.strip()}


def columns_of(rows: RunQuery, table: str) -> list[dict[str, Any]]:
    """The columns of a table in the order of the binlog; none of one that we cannot see.

    Of each what ``_COLUMNS`` has, and its ``key_place`` in the primary key. Cost: two round trips.
    """
    named = table.split(".", 1)
    places = {key["name"]: key["place"] for key in rows(_PRIMARY, *named)}
    return [
        {**column, "key_place": places.get(column["name"])} for column in rows(_COLUMNS, *named)
    ]


def create_table(table: str) -> str:
    """The statement that makes our table, which may exist already."""
    columns = "id varchar(64) PRIMARY KEY, type varchar(64) NOT NULL, data text"
    return f"CREATE TABLE IF NOT EXISTS {quoted(table, SIGN)} ({columns})"


def _grants(lines: Iterable[object]) -> dict[str, set[str]]:
    """Scope (``*.*``, ``db.*``, ``db.table``) → rights, from the lines of SHOW GRANTS."""
    found: dict[str, set[str]] = {}
    for match in filter(None, (_GRANT.match(str(line)) for line in lines)):
        rights = {right.strip().upper() for right in match["rights"].split(",")}
        found.setdefault(match["scope"].replace("`", ""), set()).update(rights)
    return found
