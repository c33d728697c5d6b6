"""Settings of Debezium's connectors for a declared capture; pure: nothing here connects."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from everstate.config import Config
from everstate.declarations.captures import Capture
from everstate.log.client import raw_bytes_max
from everstate.sources.cdc import placeholders
from everstate.sources.cdc.mariadb_statements import FILTER, unread_statements
from everstate.sources.cdc.names import CaptureNames
from everstate.sources.cdc.rows import AGGREGATE, HEARTBEAT, KIND, MESSAGE, SCHEMA, TRANSACTION

POSTGRES_SCHEMA = "everstate_capture"
"""Schema of our own tables in a captured PostgreSQL database."""

CLASSES = {
    "postgresql": "io.debezium.connector.postgresql.PostgresConnector",
    "mariadb": "io.debezium.connector.mariadb.MariaDbConnector",
    "mysql": "io.debezium.connector.mysql.MySqlConnector",
}
SAFE_VERSIONS = {"postgresql": (3, 7)}
"""Lowest version of Debezium whose task, when it is stopped within a COPY, resumes within it.
Earlier versions resume after the page of rows, and the rest of the page is lost
(debezium/dbz#1554)."""
_JSON = "org.apache.kafka.connect.json.JsonConverter"
_ALWAYS = {
    "tasks.max": "1",
    # The record of a delete is enough; no tombstone after it is needed.
    "tombstones.on.delete": "false",
    "skipped.operations": "none",
    "decimal.handling.mode": "string",
    # JSON has bytes in base64 too; with `base64` an unchanged long value would become null.
    "binary.handling.mode": "bytes",
    # A value that cannot be converted would be null otherwise, with a line in Connect's log.
    "event.converting.failure.handling.mode": "fail",
    "poll.interval.ms": "50",
    # These would be four headers on each record that name its connector, for other tools.
    "extended.headers.enabled": "false",
    "retriable.restart.connector.wait.ms": "1000",
    "max.batch.size": "8192",
    "max.queue.size": "32768",
    "max.queue.size.in.bytes": str(64 * 1_048_576),
    "incremental.snapshot.chunk.size": "4096",
    "producer.override.compression.type": "lz4",
    "producer.override.linger.ms": "5",
    "producer.override.batch.size": "262144",
    # A cluster without auto-creation of topics may lack some.
    "topic.creation.default.partitions": "1",
    # JSON without schemas, whatever the cluster's own default is. A null stays null, also where the
    # column has a default; a decimal number has all its digits, as bytes would need the schema.
    **{
        f"{side}.converter{name}": value
        for side in ("key", "value")
        for name, value in {
            "": _JSON,
            ".schemas.enable": "false",
            ".replace.null.with.default": "false",
            ".decimal.format": "NUMERIC",
        }.items()
    },
}
"""The settings that every connector has."""
_TRANSFORMS = "org.apache.kafka.connect.transforms"
_ROUTER = "io.debezium.transforms.outbox.EventRouter"
_OPTIONS = "driver.options"
_TABLES = "table.include.list"
_TLS_OF_MYSQL = {"trust": "required", "verify-full": "verify_identity", "verify-ca": "verify_ca"}
"""Names in the settings of MySQL's connector; MariaDB's has those of a ``dsn``."""
_LEFT_OUT = "everstate.left.out"
"""Setting of a connector that Debezium ignores: the tables that it does not read, and why."""
SESSION = (
    "-c bytea_output=hex -c intervalstyle=postgres -c datestyle=ISO -c extra_float_digits=3 "
    "-c lc_monetary=C -c row_security=off"
)
"""Options of each session of a connector of PostgreSQL. The server writes values as its session's
settings say, and those of a role or a database would hold otherwise. With `row_security` off a
query fails, where it would leave out rows."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a captured database is and who reads it; ``password`` is never shown."""

    host: str
    port: int
    user: str
    database: str
    options: Mapping[str, str]
    """Options of the URL, such as ``sslmode``."""


@dataclass(frozen=True, slots=True)
class Peculiarities:
    """Facts about the captured tables that a connector needs in its settings."""

    left_out: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Table → columns at which the connector would fail → why."""
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Table without a primary key → the columns that the declaration gives as its key."""


ColumnUnit = Literal["days", "times", "times of day", "numbers"]
"""Days since 1970, microseconds since 1970, microseconds since midnight, or whole numbers."""


@dataclass(frozen=True, slots=True)
class SourceColumn:
    """A column of a captured table, as far as its values reach the raw log."""

    name: str
    absent: str | None = None
    """Why no record has its values, or not as they are; ``None``: records have them."""
    unmarked: str | None = None
    """Why a record may have null in place of a value that did not change; ``None``: it has not."""
    is_generated: bool = False
    """The database computes its values, and its log has none of them."""
    is_required: bool = False
    """It is NOT NULL, so the connector fails at such a null."""
    sql: tuple[str, ...] = ()
    """Statements that repair what is wrong with it."""
    numbers: ColumnUnit | None = None
    """What its whole numbers in the raw log are; ``None``: it has none."""
    stops: str | None = None
    """Why a connector fails at its table, whatever is left out; ``None``: it does not."""
    fails: bool = False
    """A connector that does not leave it out fails at its values."""
    kind: str = ""
    """Its type as ``printed`` names it."""
    is_reformatted: bool = False
    """It has JSON, of which a change may have another text than a snapshot has."""


@dataclass(frozen=True, slots=True)
class TableShape:
    """Columns of a captured table, and those that name a row of it."""

    columns: tuple[SourceColumn, ...]
    key: tuple[str, ...]
    """The declared key columns, or else those of the primary key."""
    has_primary_key: bool = True


@dataclass(frozen=True, slots=True)
class OwnTables:
    """Our tables in the captured database, as the connector names them."""

    signals: str
    heartbeats: str | None = None
    """None: this kind of database keeps no log for an idle connector, so it needs no heartbeats."""
    beat: str | None = None
    """Statement that the connector runs with each heartbeat."""

    @property
    def tables(self) -> tuple[str, ...]:
        """All of them."""
        return (self.signals,) if self.heartbeats is None else (self.signals, self.heartbeats)


def connector_settings(
    config: Config,
    capture: Capture,
    names: CaptureNames,
    address: Address,
    own: OwnTables,
    *,
    password: str,
    brokers: str,
    snapshot: bool = True,
    peculiar: Peculiarities | None = None,
) -> dict[str, str]:
    """All settings of the connector of ``capture``.

    ``password`` is a reference for Connect's config providers; ``snapshot=False`` begins with
    what is committed from now on; ``peculiar`` are the facts about the database's tables.
    """
    settings = {
        **_ALWAYS,
        "name": names.connector,
        "connector.class": CLASSES[capture.kind],
        "topic.prefix": names.raw_log,
        "database.hostname": address.host,
        "database.port": str(address.port),
        "database.user": address.user,
        "database.password": password,
        _TABLES: ",".join(map(re.escape, capture.captured_tables)),
        "snapshot.mode": "initial" if snapshot else "no_data",
        "producer.override.max.request.size": str(raw_bytes_max(config)),
        "topic.creation.default.replication.factor": str(config.log.replication),
        **_transactions(capture),
        **_signalling(config, names, own),
        **_transforms(capture, names, own),
    }
    if capture.kind == "postgresql":
        settings |= _postgres(capture, names, address)
    else:
        settings |= _binlog(config, capture, names, address, brokers, own)
    peculiar = peculiar or Peculiarities()
    keyed = {table: ",".join(columns) for table, columns in peculiar.keys.items() if columns}
    keys = ";".join(f"{re.escape(table)}:{columns}" for table, columns in keyed.items())
    return {
        **settings,
        # Of tables without a primary key the declared key columns.
        **({"message.key.columns": keys} if keys else {}),
        **capture.settings,
        **_session(capture),
        **_left_out(peculiar, capture, own),
    }


def without_tables(
    settings: Mapping[str, str], capture: Capture, left_out: Mapping[str, str]
) -> dict[str, str] | None:
    """Settings of a connector that goes on without some tables (→ why); ``None``: none is left."""
    # Of an empty list Debezium would read all.
    kept = [table for table in capture.captured_tables if table not in left_out]
    left = {_TABLES: ",".join(map(re.escape, kept)), _LEFT_OUT: json.dumps(dict(left_out))}
    return {**settings, **(left if left_out else {})} if kept else None


def left_out_tables(settings: Mapping[str, str] | None) -> dict[str, str]:
    """The tables that a connector with these settings does not read → why."""
    return dict(json.loads((settings or {}).get(_LEFT_OUT, "{}")))


def _transactions(capture: Capture) -> dict[str, str]:
    """Of MariaDB always: a transaction without an END record may be prepared only."""
    wanted = capture.transactions or capture.kind == "mariadb"
    return {"provide.transaction.metadata": "true" if wanted else "false"}


def _session(capture: Capture) -> dict[str, str]:
    """Options of the connector's sessions: ours come last, and the last one of a name holds."""
    options = f"{capture.settings.get(_OPTIONS, '')} {SESSION}".strip()
    return {_OPTIONS: options} if capture.kind == "postgresql" else {}


def _left_out(peculiar: Peculiarities, capture: Capture, own: OwnTables) -> dict[str, str]:
    """Excludes the columns at which a connector of PostgreSQL would fail.

    Columns that the declaration excludes stay excluded; if it declares which columns to include,
    nothing is set. The list has at least one entry: with an empty list the connector selects all
    columns that a table has by then, and a snapshot ends at the first one that it does not know.
    """
    if capture.kind != "postgresql" or "column.include.list" in capture.settings:
        return {}
    declared = capture.settings.get("column.exclude.list")
    columns = [*([declared] if declared else []), *_named(peculiar)]
    return {"column.exclude.list": ",".join(columns or [re.escape(f"{own.signals}.none")])}


def not_left_out(settings: Mapping[str, str], peculiar: Peculiarities) -> list[str]:
    """Columns that these settings do not exclude, and that `add` leaves out, with the reason."""
    if "column.include.list" in settings:
        return []
    known = settings.get("column.exclude.list", "").split(",")
    return [why for pattern, why in _named(peculiar).items() if pattern not in known]


def _named(peculiar: Peculiarities) -> dict[str, str]:
    """Expression that names a column in a connector's settings → the column and the reason."""
    return {
        re.escape(f"{table}.{column}"): f"{table}.{column}: {why}"
        for table, columns in peculiar.left_out.items()
        for column, why in columns.items()
    }


def _signalling(config: Config, names: CaptureNames, own: OwnTables) -> dict[str, str]:
    return {
        "signal.data.collection": own.signals,
        "signal.enabled.channels": "source",
        # Rows of a closed window are deleted again, so that the table stays small.
        "incremental.snapshot.watermarking.strategy": "insert_delete",
        "notification.enabled.channels": "sink",
        "notification.sink.topic.name": names.notifications,
        "heartbeat.interval.ms": str(int(config.capture.heartbeat_s * 1000)),
        **({} if own.beat is None else {"heartbeat.action.query": own.beat}),
        "topic.heartbeat.prefix": names.heartbeat_prefix,
    }


def _transforms(capture: Capture, names: CaptureNames, own: OwnTables) -> dict[str, str]:
    """Transforms that send all records to the one raw log, in the order of the connector's task.

    A record that is not a row gets a header with its kind before its topic's name is replaced; a
    row contains the name of its table. Changes of our own signal table are dropped. Notifications
    go to a topic of their own, for those who follow snapshots and clean nothing.
    """
    kinds = {
        TRANSACTION: re.escape(f"{names.raw_log}.transaction"),
        MESSAGE: re.escape(f"{names.raw_log}.message"),
        HEARTBEAT: re.escape(f"{names.heartbeat_prefix}.{names.raw_log}"),
        SCHEMA: re.escape(names.raw_log),
    }
    settings = _predicate("own", "own", f"{_TRANSFORMS}.Filter", _pattern(names, own.signals))
    chain = ["own", *map(bytes.decode, kinds)]
    predicates = list(chain)
    for name, pattern in zip(chain[1:], kinds.values(), strict=True):
        settings |= _predicate(name, name, f"{_TRANSFORMS}.InsertHeader", pattern)
        settings |= {f"transforms.{name}.header": KIND, f"transforms.{name}.value.literal": name}
    if capture.outbox is not None:
        # Rows of the outbox become records with their aggregate type in a header; the payload stays
        # unchanged text, as one JSON string. Truncations are skipped, as the router fails on them.
        chain.append("route")
        predicates.append("outbox")
        headers = f"type:header:eventType,aggregatetype:header:{AGGREGATE}"
        settings |= {
            "skipped.operations": "t",
            **_predicate("route", "outbox", _ROUTER, _pattern(names, capture.outbox.table)),
            "transforms.route.route.topic.replacement": names.raw_log,
            "transforms.route.table.fields.additional.placement": headers,
        }
    return {
        **settings,
        "transforms": ",".join([*chain, "one"]),
        "transforms.one.type": f"{_TRANSFORMS}.RegexRouter",
        "transforms.one.regex": f"(?!{re.escape(names.notifications)}$).*",
        "transforms.one.replacement": names.raw_log,
        "predicates": ",".join(predicates),
    }


def _predicate(transform: str, name: str, kind: str, pattern: str) -> dict[str, str]:
    """A transform of records whose topic has a name of this pattern."""
    return {
        f"transforms.{transform}.type": kind,
        f"transforms.{transform}.predicate": name,
        f"predicates.{name}.type": f"{_TRANSFORMS}.predicates.TopicNameMatches",
        f"predicates.{name}.pattern": pattern,
    }


def _pattern(names: CaptureNames, table: str) -> str:
    """Expression for the topic that the connector itself gives a table."""
    return rf"{re.escape(names.raw_log)}\.{re.escape(table)}"


def is_current(settings: Mapping[str, str], capture: Capture) -> bool:
    """Whether a connector has what the clean role needs; one of an earlier version may lack it."""
    needed = _session(capture) | (_transactions(capture) if capture.kind == "mariadb" else {})
    return needed.items() <= settings.items()


def _postgres(capture: Capture, names: CaptureNames, address: Address) -> dict[str, str]:
    prefixes = {
        table.provenance.message_prefix
        for table in capture.tables.values()
        if table.provenance.message_prefix
    }
    settings = {
        "database.dbname": address.database,
        "plugin.name": "pgoutput",
        "slot.name": names.identifier,
        "publication.name": names.identifier,
        "publication.autocreate.mode": "disabled",
        "slot.drop.on.stop": "false",
        "status.update.interval.ms": "2000",
        "hstore.handling.mode": "json",
        "interval.handling.mode": "string",
        "time.precision.mode": "microseconds",
        placeholders.NAME: placeholders.OWN_SETTING,
    }
    if "sslmode" in address.options:
        settings["database.sslmode"] = address.options["sslmode"]
    if prefixes:
        listed = ",".join(re.escape(prefix) for prefix in sorted(prefixes))
        return {**settings, "message.prefix.include.list": listed}
    return {**settings, "message.prefix.exclude.list": ".*"}


def _binlog(
    config: Config,
    capture: Capture,
    names: CaptureNames,
    address: Address,
    brokers: str,
    own: OwnTables,
) -> dict[str, str]:
    history = "schema.history.internal"
    databases = {table.partition(".")[0] for table in capture.captured_tables}
    mode = address.options.get("ssl-mode", "disable")
    clients = {
        f"{history}.{client}.{name}": value
        for name, value in config.capture.worker_options.items()
        if name.startswith(("security.", "sasl.", "ssl."))
        for client in ("producer", "consumer")
    }
    return {
        "database.server.id": str(names.server_id),
        "database.ssl.mode": _TLS_OF_MYSQL.get(mode, mode) if capture.kind == "mysql" else mode,
        "database.include.list": ",".join(re.escape(name) for name in sorted(databases)),
        # By these records everstate notices that a captured table was dropped, or is another one.
        "include.schema.changes": "true",
        # How soon a lost connection is detected and opened again. With the default of a minute the
        # task reads nothing meanwhile and is still reported as RUNNING.
        "connect.keep.alive.interval.ms": "5000",
        "time.precision.mode": "microseconds",
        # Numbers above 2^63 would be negative otherwise.
        "bigint.unsigned.handling.mode": "precise",
        # A snapshot would fail at the year 0000, also in a column that no field has.
        "driver.yearIsDateType": "false",
        # It would move the years 1 to 99 to 1970 to 2069.
        "enable.time.adjuster": "false",
        f"{history}.kafka.bootstrap.servers": brokers,
        f"{history}.kafka.topic": names.schema_history,
        f"{history}.store.only.captured.tables.ddl": "true",
        FILTER: unread_statements([*capture.captured_tables, *own.tables]),
        **clients,
    }
