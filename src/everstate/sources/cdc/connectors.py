"""Settings of Debezium's connectors for a declared capture; pure: nothing here connects."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from everstate.config import Config
from everstate.log.client import raw_bytes_max
from everstate.sources.cdc import placeholders
from everstate.sources.cdc.declaration import Capture, Outbox
from everstate.sources.cdc.names import CaptureNames

POSTGRES_SCHEMA = "everstate_capture"
"""Where our own tables in a captured PostgreSQL database are."""

_CLASSES = {
    "postgresql": "io.debezium.connector.postgresql.PostgresConnector",
    "mariadb": "io.debezium.connector.mariadb.MariaDbConnector",
}
_JSON = "org.apache.kafka.connect.json.JsonConverter"
_TRANSFORMS = "org.apache.kafka.connect.transforms"
_NAMED = f"{_TRANSFORMS}.predicates.TopicNameMatches"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a captured database is and who reads it; ``password`` is never shown."""

    host: str
    port: int
    user: str
    database: str
    options: Mapping[str, str]
    """More of the URL, such as ``sslmode``."""


@dataclass(frozen=True, slots=True)
class Peculiarities:
    """What a connector must be told of the captured tables, because it cannot see it itself."""

    generated: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Table → columns that the database computes and leaves out of its log."""
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Table without a primary key → the columns that the declaration gives as its key."""


@dataclass(frozen=True, slots=True)
class OwnTables:
    """Our tables in the captured database, as the connector names them."""

    signals: str
    heartbeats: str | None = None
    """None: an idle database of this kind keeps nothing that a heartbeat would let go."""
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
    what is committed from now on; ``peculiar`` is what the database says of its tables.
    """
    settings = {
        "name": names.connector,
        "connector.class": _CLASSES[capture.kind],
        "tasks.max": "1",
        "topic.prefix": names.topic_prefix,
        "database.hostname": address.host,
        "database.port": str(address.port),
        "database.user": address.user,
        "database.password": password,
        "table.include.list": ",".join(re.escape(table) for table in capture.captured_tables),
        "snapshot.mode": "initial" if snapshot else "no_data",
        "provide.transaction.metadata": "true" if capture.transactions else "false",
        "tombstones.on.delete": "true",
        "skipped.operations": "none",
        "decimal.handling.mode": "string",
        "binary.handling.mode": "base64",
        "poll.interval.ms": "50",
        # Four headers on each record that say which connector it is of, for other tools.
        "extended.headers.enabled": "false",
        "retriable.restart.connector.wait.ms": "1000",
        **_conversion(),
        **_sizes(config),
        **_signalling(config, names, own),
        **_topics(names, own),
        **(_shortening(names) if capture.outbox is None else _routing(capture.outbox, names)),
    }
    if capture.kind == "postgresql":
        settings |= _postgres(capture, names, address)
    else:
        settings |= _mariadb(config, capture, names, address, brokers)
    peculiar = peculiar or Peculiarities()
    return {**settings, **_keys(peculiar), **capture.settings, **_left_out(peculiar, capture, own)}


def _keys(peculiar: Peculiarities) -> dict[str, str]:
    """Keys of messages of tables that have no primary key: those that are declared."""
    keys = [
        f"{re.escape(t)}:{','.join(columns)}" for t, columns in peculiar.keys.items() if columns
    ]
    return {"message.key.columns": ";".join(keys)} if keys else {}


def _left_out(peculiar: Peculiarities, capture: Capture, own: OwnTables) -> dict[str, str]:
    """Generated columns, which snapshots would have and PostgreSQL's log has not.

    What the declaration leaves out is kept; one that says which columns to read is left alone.
    There is always one column in the list: without any, the connector reads all columns that a
    table has by then, and a snapshot ends at the first one that it does not know.
    """
    if capture.kind != "postgresql" or "column.include.list" in capture.settings:
        return {}
    declared = capture.settings.get("column.exclude.list")
    columns = [*([declared] if declared else []), *_patterns(peculiar).values()]
    return {"column.exclude.list": ",".join(columns or [re.escape(f"{own.signals}.none")])}


def not_left_out(settings: Mapping[str, str], peculiar: Peculiarities) -> list[str]:
    """Generated columns that a connector with these settings does not know of yet."""
    if "column.include.list" in settings:
        return []
    known = settings.get("column.exclude.list", "").split(",")
    return [column for column, pattern in _patterns(peculiar).items() if pattern not in known]


def _patterns(peculiar: Peculiarities) -> dict[str, str]:
    """Generated column → the expression that names it in a connector's settings."""
    listed = [f"{table}.{column}" for table, columns in peculiar.generated.items()
              for column in columns]  # fmt: skip
    return {column: re.escape(column) for column in listed}


def _conversion() -> dict[str, str]:
    """JSON without schemas, whatever the cluster's own default is."""
    return {
        "key.converter": _JSON,
        "key.converter.schemas.enable": "false",
        "value.converter": _JSON,
        "value.converter.schemas.enable": "false",
    }


def _sizes(config: Config) -> dict[str, str]:
    """Batches, the largest record, and topics that a cluster without auto-creation may lack."""
    return {
        "max.batch.size": "8192",
        "max.queue.size": "32768",
        "max.queue.size.in.bytes": str(64 * 1_048_576),
        "incremental.snapshot.chunk.size": "4096",
        "producer.override.max.request.size": str(raw_bytes_max(config)),
        "producer.override.compression.type": "lz4",
        "producer.override.linger.ms": "5",
        "producer.override.batch.size": "262144",
        "topic.creation.default.replication.factor": str(config.log.replication),
        "topic.creation.default.partitions": str(config.log.partitions),
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


def _topics(names: CaptureNames, own: OwnTables) -> dict[str, str]:
    """Leave out our own signals."""
    return {
        "transforms.own.type": f"{_TRANSFORMS}.Filter",
        "transforms.own.predicate": "own",
        "predicates.own.type": _NAMED,
        "predicates.own.pattern": _pattern(names, own.signals),
    }


def _pattern(names: CaptureNames, table: str) -> str:
    """Expression for the topic that the connector itself gives a table."""
    return rf"{re.escape(names.topic_prefix)}\.{re.escape(table)}"


def _shortening(names: CaptureNames) -> dict[str, str]:
    """``<prefix>.<schema>.<table>`` becomes ``<prefix>.<table>``."""
    return {
        "transforms": "own,short",
        "transforms.short.type": f"{_TRANSFORMS}.RegexRouter",
        "transforms.short.regex": rf"{re.escape(names.topic_prefix)}\.[^.]+\.([^.]+)",
        "transforms.short.replacement": f"{names.topic_prefix}.$1",
        "predicates": "own",
    }


def _routing(outbox: Outbox, names: CaptureNames) -> dict[str, str]:
    """Rows of the outbox become records of their aggregate types' topics.

    The payload stays the text that it is, as one JSON string, and the row's type a header. Without
    truncations: the router fails at them.
    """
    return {
        "skipped.operations": "t",
        "transforms": "own,route",
        "transforms.route.type": "io.debezium.transforms.outbox.EventRouter",
        "transforms.route.predicate": "outbox",
        "transforms.route.route.topic.replacement": f"{names.topic_prefix}.${{routedByValue}}",
        "transforms.route.table.fields.additional.placement": "type:header:eventType",
        "predicates": "own,outbox",
        "predicates.outbox.type": _NAMED,
        "predicates.outbox.pattern": _pattern(names, outbox.table),
    }


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


def _mariadb(
    config: Config, capture: Capture, names: CaptureNames, address: Address, brokers: str
) -> dict[str, str]:
    history = "schema.history.internal"
    databases = {table.partition(".")[0] for table in capture.captured_tables}
    clients = {
        f"{history}.{client}.{name}": value
        for name, value in config.capture.worker_options.items()
        if name.startswith(("security.", "sasl.", "ssl."))
        for client in ("producer", "consumer")
    }
    return {
        "database.server.id": str(names.server_id),
        "database.ssl.mode": address.options.get("ssl-mode", "disable"),
        "database.include.list": ",".join(re.escape(name) for name in sorted(databases)),
        "include.schema.changes": "false",
        # How soon a lost connection is seen and made anew; the connector's own minute is a silence
        # in which its task says RUNNING.
        "connect.keep.alive.interval.ms": "5000",
        "time.precision.mode": "microseconds",
        f"{history}.kafka.bootstrap.servers": brokers,
        f"{history}.kafka.topic": names.schema_history,
        f"{history}.store.only.captured.tables.ddl": "true",
        **clients,
    }
