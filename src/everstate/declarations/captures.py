"""Declaring a capture: which tables of a database become which entity types, and how.

Pure data: nothing here opens a connection. `everstate cdc` makes connectors from a declaration;
the clean role turns the records that they write to the raw topics into changes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from everstate.changes import DomainEvent, EntityType, Provenance
from everstate.changes.keys import NAME
from everstate.changes.triggers import State
from everstate.errors import InvalidCapture

DatabaseKind = Literal[
    "postgresql", "mariadb", "mysql", "oracle", "sqlserver", "db2", "mongodb", "cassandra", "other"
]
CaptureForm = Literal["debezium", "maxwell", "canal", "goldengate", "dms"]
Naming = Literal["as_is", "lower", "snake"]
Times = Literal["ms", "us", "ns", "s"]

CAPTURE_KINDS: Final = ("postgresql", "mariadb", "mysql")
"""Kinds for which `everstate cdc add` makes a connector, which writes one raw log."""
OUTBOX_KINDS: Final = ("mariadb", "mysql")
"""Kinds with a binlog. Their outbox tables are read; PostgreSQL has its own relay."""
_AGGREGATE: Final = re.compile(r"[A-Za-z0-9_-]{1,100}")

_TOPIC: Final = re.compile(r"[A-Za-z0-9._-]{1,150}")
"""What Kafka takes as a part of a topic's name."""

Convert = (
    Callable[[Any], Any] | Literal["days", "s", "ms", "us", "ns", "json", "bool", "text", "numeric"]
)
"""How one column's values become the field's: numbers as days or as time since 1970, text that
is JSON (a field of text has it without blanks), 0 and 1 as false and true, anything as text; a
``numeric`` column that may hold NaN or infinity, which Debezium writes as names of Java constants
(``NAN``), as text that PostgreSQL reads; or a function of your own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A code is replaced by a name from a table of codes that is captured as an entity type.

    The code is the key of an entity of type ``entity``, the name is its ``field``. While no such
    entity exists, ``missing`` decides: the row waits for it (``wait``, at most
    ``Capture.parent_wait_s``), or the field is null, or the code itself. A later change of the
    name does not change entities that use it already.
    """

    entity: str
    field: str
    missing: Literal["wait", "null", "code"] = "wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenanceFrom:
    """Where the provenance of a captured change is looked up; fields not found get defaults.

    Each mapping is provenance field → where it is. Fields: ``service_name``, ``identifier``,
    ``actor``, ``reason``, ``correlation_id``, ``causation_id``, ``api_version``. Looked up in
    this order: logical messages of the transaction, columns of the row, fields of Debezium's
    ``source`` block. Defaults: the service is the capture's name; the identifier is the database
    user, else the source transaction, else ``snapshot`` or the kind of the database.
    """

    message_prefix: str | None = None
    """Prefix of `pg_logical_emit_message(true, prefix, json)`; its JSON has the fields above in
    snake or camel case. Needs ``Capture.transactions``."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Provenance field → audit column (of the row after; before, for a delete)."""
    source: Mapping[str, str] = field(default_factory=dict)
    """Provenance field → field of the message's source block, such as Oracle's ``user_name``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """How the rows of one table become entities of one type.

    Each field of the entity type needs a column, or is ``computed``; a row that lacks the column of
    a field is refused. A field whose column is in ``drop`` has its default. A column without a
    field of that name is ignored.
    """

    entity: str
    """Name of a registered entity type."""
    key_columns: tuple[str, ...] = ()
    """Columns of the primary key, as the source spells them; empty: those of the message's key.
    Needed where messages name no key columns (DMS; Maxwell without ``primary_key_columns``)."""
    naming: Naming = "snake"
    """How a column's name becomes the name of its field, where ``columns`` does not map it."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Column → field, where the names differ by more than ``naming``."""
    types: Mapping[str, Convert] = field(default_factory=dict)
    """Column → how its values are converted; overrides the message's schema and the model."""
    translations: Mapping[str, Translation | Mapping[Any, Any]] = field(default_factory=dict)
    """Column → table of codes (kept as an entity type), or a fixed mapping code → name."""
    drop: tuple[str, ...] = ()
    """Columns that must never leave the raw topic (secrets, personal data)."""
    computed: Mapping[str, Callable[[State], Any]] = field(default_factory=dict)
    """Field → function of the fields that are known; the key can be computed this way too. A
    computed key must depend on key columns only, since a delete may contain no other columns."""
    parents: Mapping[str, str] = field(default_factory=dict)
    """Foreign keys: field of this entity → entity type of the parent, whose key it holds."""
    before: Literal["auto", "whole", "key"] = "auto"
    """How much of a row's before image is trusted: all of it, or its key columns only. ``auto``
    is ``key`` for PostgreSQL, whose default replica identity gives "" for text it does not know;
    declare ``whole`` with REPLICA IDENTITY FULL. It matters for entities that are not in the log
    yet and for rows that lack columns."""
    provenance: ProvenanceFrom = ProvenanceFrom()
    occurred_at: str | None = None
    """Field with the time at which the change happened; ``None``: the source's commit time."""
    event: Callable[[State | None, State | None], DomainEvent | None] | None = None
    """Domain event of a change, from its states before and after; ``None``: a plain change."""
    events: str | None = None
    """Entity type of kind ``event`` as which each domain event is also published on its own."""
    partials: bool = False
    """Also publish a record with only the changed fields, to ``<prefix>.<entity>.partials``."""
    truncate: Literal["refuse", "delete"] = "refuse"
    """What a TRUNCATE becomes: a dead letter with that reason, or a delete of every entity of the
    table. ``delete`` is refused where another table has the same entity type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregate:
    """One aggregate type of an outbox table, as entities of one type."""

    entity: str
    """Name of a registered entity type."""
    facts: bool = False
    """Its payloads are facts: entities of kind ``event``, each under its row's own id."""
    provenance: Provenance | None = None
    """For payloads without provenance, such as all facts; ``None``: these are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outbox:
    """An outbox table in the form of Debezium's outbox event router, and its aggregate types.

    Columns: ``id``, ``aggregatetype``, ``aggregateid``, ``type`` and ``payload``; other names are
    declared in ``Capture.settings``, with the router's own options. Rows are inserted and never
    updated; the service may delete them at any time, since the insert stays in the binlog.
    """

    table: str
    """As the source names it (``shop.outbox``)."""
    aggregates: Mapping[str, Aggregate]
    """Value of ``aggregatetype`` → its declaration; rows of other types are ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A database whose changes are captured; ``name`` is the source in topic names.

    A connector made by `everstate cdc` writes all its records to one topic,
    ``<prefix>.raw.<name>``. Of a connector that somebody else runs, one topic per table is read:
    ``<prefix>.raw.<name>.<table>`` (of ``schema.table`` only the part after the last dot).
    Raises InvalidCapture.
    """

    name: str
    kind: DatabaseKind
    tables: Mapping[str, Table] = field(default_factory=dict)
    """Table as the source names it (``public.orders``, ``shop.orders``) → mapping."""
    outbox: Outbox | None = None
    """Instead of tables: an outbox of MariaDB or MySQL, whose rows are changes already. Its
    aggregate types then take the place of ``tables``, and ``transactions`` is off: each change
    has the version that the service assigned, and no transaction block."""
    dsn: str | None = None
    """URL of the database (``postgresql://user:password@host/db``); ``$NAME`` or ``${NAME}`` is
    taken from the environment. ``None``: rows come from a capture that somebody else runs."""
    form: CaptureForm = "debezium"
    """Shape of the messages in the raw topics."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """More settings of the connector, by Debezium's names; they override those that
    `everstate cdc` makes."""
    transactions: bool = True
    """Changes wait for the END record of their source transaction and carry its block (id, index,
    count). Only a connector made by `everstate cdc` has it; changes of others carry no block. One
    of MariaDB always writes END records, since a transaction without one may be prepared only."""
    transaction_wait_s: float = 300.0
    """Seconds after the last row of a transaction until its END record must have been read, while
    no other record is left to read; then its rows are published without a block, with a warning in
    the log."""
    parents_first: bool = False
    """Hold a child until its parent is in the log, for ``Table.parents``."""
    parent_wait_s: float = 30.0
    """Seconds that a child waits for its parent; then it is published without, with a warning in
    the log."""
    times: Times = "us"
    """Unit of numbers in time columns where neither ``types`` nor the message defines it."""
    epoch: int = 1
    """Raise it when the database was restored or replaced and its log positions start over;
    positions of a higher epoch are newer. Otherwise rows at positions that were read before are
    skipped as re-reads. Only of a capture whose connector is somebody else's: where `everstate
    cdc` runs it, `everstate cdc snapshot NAME --new-epoch` begins one."""
    on_loss: Literal["stop", "resume"] = "stop"
    """What to do when raw records were deleted by retention before they were cleaned."""
    connect_url: str | None = None
    """REST address of a Connect cluster; ``None``: the local stack's worker."""

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise InvalidCapture(self.name, f"the name must match {NAME.pattern}")
        if self.outbox is not None:
            self._take_outbox(self.outbox)
        if not self.tables:
            raise InvalidCapture(self.name, "no table is declared")
        if self.is_ours and self.epoch != 1:
            # A number alone would leave entities in the log whose rows the restored database lacks.
            raise InvalidCapture(
                self.name,
                f"it has a dsn, and epoch={self.epoch} is declared",
                advice="Remove it from the declaration, its number is kept in the log: `everstate "
                f"cdc snapshot {self.name} --new-epoch` begins an epoch and reads all rows.",
            )
        seen: dict[str, str] = {}
        for table, mapping in self.tables.items():
            short = topic_table(table)
            if short in seen:
                raise InvalidCapture(
                    self.name, f"{table} and {seen[short]} would share one raw topic"
                )
            if short in ("transaction", "message", "held"):
                raise InvalidCapture(self.name, f"{short} is the name of a topic of its own")
            if not self.is_ours and not _TOPIC.fullmatch(short):
                raise InvalidCapture(
                    self.name,
                    f"{table} names a raw topic, and a topic's name cannot have {short!r}",
                    advice=f"Have its tool write to a topic that matches {_TOPIC.pattern}, and "
                    "declare the table by that name.",
                )
            seen[short] = table
            lost = set(mapping.key_columns) & set(mapping.drop)
            if lost:
                raise InvalidCapture(self.name, f"{table}: key column {min(lost)} is dropped")
            if mapping.provenance.message_prefix and not self.transactions:
                raise InvalidCapture(
                    self.name, f"{table}: provenance from messages needs transactions"
                )
            self._check_truncate(table, mapping)

    def _check_truncate(self, table: str, mapping: Table) -> None:
        """Raise InvalidCapture where a TRUNCATE would delete entities of other tables.

        The log has no table of an entity's row, only its entity type.
        """
        others = [
            name
            for name, other in self.tables.items()
            if name != table and other.entity == mapping.entity
        ]
        if mapping.truncate == "delete" and others:
            instead = "empty the table with DELETE, which its log has row by row"
            if self.is_ours:
                instead = (
                    f"`everstate cdc snapshot {self.name} --new-epoch` then deletes each entity "
                    "whose row is gone"
                )
            raise InvalidCapture(
                self.name,
                f"{table}: truncate='delete' would also delete those of {', '.join(others)}, "
                f"which have the same entity type {mapping.entity!r}",
                advice=f"Remove it, so that a TRUNCATE becomes a dead letter; {instead}.",
            )

    def _take_outbox(self, outbox: Outbox) -> None:
        """Use the aggregate types of an outbox as tables; raises InvalidCapture."""
        if self.tables:
            raise InvalidCapture(self.name, "declare tables or an outbox, not both")
        if self.kind not in OUTBOX_KINDS:
            raise InvalidCapture(
                self.name,
                f"an outbox is read of {' or '.join(OUTBOX_KINDS)}, not of {self.kind}",
                advice="In PostgreSQL use `everstate outbox install` and emit.",
            )
        if self.form != "debezium":
            raise InvalidCapture(self.name, "an outbox is read in Debezium's form only")
        for aggregate in outbox.aggregates:
            if not _AGGREGATE.fullmatch(aggregate):
                raise InvalidCapture(
                    self.name,
                    f"aggregate type {aggregate!r} names a topic: it must match "
                    f"{_AGGREGATE.pattern}",
                )
        entities = [each.entity for each in outbox.aggregates.values()]
        if len(set(entities)) < len(entities):
            raise InvalidCapture(self.name, "two aggregate types are of one entity type")
        tables = {name: Table(entity=each.entity) for name, each in outbox.aggregates.items()}
        object.__setattr__(self, "tables", tables)
        object.__setattr__(self, "transactions", False)

    @property
    def is_ours(self) -> bool:
        """Whether `everstate cdc` runs its connector, which writes one raw log for all tables."""
        return self.dsn is not None and self.form == "debezium" and self.kind in CAPTURE_KINDS

    @property
    def captured_tables(self) -> tuple[str, ...]:
        """Tables of the source that its connector reads, as the source names them."""
        return tuple(self.tables) if self.outbox is None else (self.outbox.table,)

    @property
    def entities(self) -> tuple[str, ...]:
        """Entity types that this capture is the source of truth of, without duplicates."""
        named = [table.entity for table in self.tables.values()]
        named += [table.events for table in self.tables.values() if table.events]
        return tuple(dict.fromkeys(named))

    def by_topic(self) -> dict[str, str]:
        """Last part of the raw topic's name → table as the source names it."""
        return {topic_table(table): table for table in self.tables}


def topic_table(table: str) -> str:
    """Last part of a table's raw topic: the part after the last dot of the table's name."""
    return table.rsplit(".", 1)[-1]


def check_declaration(capture: Capture, entities: Mapping[str, EntityType]) -> None:
    """Raise InvalidCapture when the declaration and the registered entity types do not fit."""
    for entity in capture.entities:
        if entity not in entities:
            raise InvalidCapture(
                capture.name,
                f"entity type {entity!r} is not registered",
                advice="Register it with @app.entity(…, source='capture') before the capture.",
            )
    for name, table in capture.tables.items():
        fields = entities[table.entity].field_names
        named = {*table.columns.values(), *table.computed, *table.parents}
        named |= {table.occurred_at} if table.occurred_at else set()
        for missing in sorted(named - {*fields, entities[table.entity].key}):
            raise InvalidCapture(capture.name, f"{name}: {table.entity} has no field {missing!r}")
        key = entities[table.entity].key
        if len(table.key_columns) > 1 and key in fields and key not in table.computed:
            listed = ", ".join(table.key_columns)
            raise InvalidCapture(
                capture.name,
                f"{name}: a row is named by {listed}, and the key {key!r} of {table.entity} is one "
                "of these only, so that different rows would become one entity",
                advice=f"Declare computed={{{key!r}: …}}, a function of all these columns.",
            )
        referred = [t for t in table.translations.values() if isinstance(t, Translation)]
        for parent in {*table.parents.values(), *(t.entity for t in referred)}:
            if parent not in capture.entities:
                raise InvalidCapture(
                    capture.name, f"{name}: {parent!r} is no entity type of this capture"
                )
