"""A captured MySQL database: what differs from MariaDB, which has the same binlog otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from everstate.errors import InvalidConfig
from everstate.findings import FindingOutcome
from everstate.sources.cdc.connectors import Address, SourceColumn
from everstate.sources.cdc.mariadb import MariaDatabase, mariadb_address, source_column
from everstate.sources.cdc.mariadb_checks import WANTED, MariaChecks


def mysql_address(dsn: str) -> tuple[Address, str]:
    """Address and password of ``mysql://user:password@host:port/db``; raises InvalidConfig.

    The options are those of :func:`mariadb_address`, but that the connection is always encrypted,
    since MySQL takes passwords (`caching_sha2_password`) over TLS: ``ssl-mode`` is `trust` unless
    it is given.
    """
    address, password = mariadb_address(dsn)
    mode = address.options.get("ssl-mode", "trust")
    if mode == "disable":
        raise InvalidConfig("ssl-mode", mode, "trust, verify-ca or verify-full")
    return replace(address, options={**address.options, "ssl-mode": mode}), password


class MySqlChecks(MariaChecks):
    """The doctor's checks of MySQL."""

    wanted: ClassVar[Mapping[str, tuple[str, FindingOutcome, str]]] = {
        **WANTED,
        "binlog_row_value_options": ("", "fail", "otherwise the log has parts of JSON documents"),
        "binlog_transaction_compression": (
            "OFF", "fail", "Debezium gives all rows of a compressed transaction one position",
        ),
        "enforce_gtid_consistency": ("ON", "warn", "gtid_mode needs it"),
        "gtid_mode": ("ON", "warn", "a replica that is promoted keeps the numbers"),
    }  # fmt: skip
    rights: ClassVar[Mapping[str, Sequence[str]]] = {
        name: (name,)
        for name in ("RELOAD", "SHOW DATABASES", "REPLICATION SLAVE", "REPLICATION CLIENT")
    }
    other: ClassVar = 'This connector is for MySQL: declare kind="mariadb".'
    log_status: ClassVar = "SHOW BINARY LOG STATUS"
    kept_out: ClassVar = (
        "SELECT check_clause AS text FROM information_schema.check_constraints "
        "JOIN information_schema.table_constraints USING (constraint_schema, constraint_name) "
        "WHERE constraint_schema = %s AND table_name = %s"
    )

    def _is_ours(self, version: str) -> bool:
        return not super()._is_ours(version)


def _column(name: str, kind: str) -> SourceColumn:
    return replace(source_column(name, kind), is_reformatted=kind == "json")


class MySqlDatabase(MariaDatabase):
    """A connection to a captured MySQL database, as the connector's own user."""

    product = "MySQL"
    address_of, column = staticmethod(mysql_address), staticmethod(_column)
    ended: ClassVar = "SELECT @@global.gtid_executed AS at"
    table_ids: ClassVar = MariaDatabase.table_ids.replace("innodb_sys_tables", "innodb_tables")
    processes: ClassVar = "performance_schema.processlist"
    checks: ClassVar = MySqlChecks

    @staticmethod
    def sequences(text: str) -> dict[str, int]:
        """GTIDs, such as ``uuid:1-5:8,uuid:tag:1-3``: each server → number of its last one."""
        found: dict[str, int] = {}
        for each in text.split(","):
            server, *parts = each.strip().split(":")
            numbers = (part.rpartition("-")[2] for part in parts)
            last = max((int(number) for number in numbers if number.isdigit()), default=0)
            found[server] = max(last, found.get(server, 0))
        return found
