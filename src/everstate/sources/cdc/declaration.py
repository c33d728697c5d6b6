"""Declaring a capture: which tables of a database become which entity types, and how.

Pure data: nothing here connects anywhere. `everstate cdc` makes connectors from it, `clean` makes
changes of what the connectors wrote to ``<prefix>.raw.<source>.<table>``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from everstate.changes import DomainEvent, EntityType, Provenance
from everstate.changes.keys import NAME
from everstate.errors import InvalidCapture
from everstate.sources.cdc import placeholders

Kind = Literal[
    "postgresql", "mariadb", "mysql", "oracle", "sqlserver", "db2", "mongodb", "cassandra", "other"
]
Form = Literal["debezium", "maxwell", "canal", "goldengate", "dms"]
Naming = Literal["as_is", "lower", "snake"]
State = Mapping[str, Any]
"""A state of an entity, its field names and JSON values."""
Row = Mapping[str, Any]
"""A row of a table, its column names as the source spells them, and JSON values."""
Times = Literal["ms", "us", "ns", "s"]

CAPTURE_KINDS: Final = ("postgresql", "mariadb", "mysql")
"""Kinds that `everstate cdc add` can make a connector for; the others are only cleaned."""
OUTBOX_KINDS: Final = ("mariadb", "mysql")
"""Kinds whose outbox tables are read; PostgreSQL has its own relay."""
_AGGREGATE: Final = re.compile(r"[A-Za-z0-9_-]{1,100}")

Convert = (
    Callable[[Any], Any] | Literal["days", "s", "ms", "us", "ns", "json", "bool", "text", "numeric"]
)
"""How one column's values become the field's: numbers as days or as time since 1970, text that
is JSON, 0 and 1 as false and true, anything as text; a ``numeric`` column that may hold NaN or
infinity, which Debezium spells in words of Java (NAN), as text that PostgreSQL reads; or a
function of your own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A code becomes a name by a table of codes that is kept as an entity type of its own.

    The code is the key in ``entity``, the name is its ``field``. A code that is not there yet
    makes the change wait as for a parent (``wait``, up to ``Capture.parent_wait_s``), or gives
    null, or the code itself. Changing a name changes no entity that used it before.
    """

    entity: str
    field: str
    missing: Literal["wait", "null", "code"] = "wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenanceFrom:
    """Where a captured change's provenance is found; what is not found falls back.

    Each mapping is provenance field → place. Fields: ``service_name``, ``identifier``, ``actor``,
    ``reason``, ``correlation_id``, ``causation_id``, ``api_version``. Looked up in this order:
    messages of the transaction, columns of the row, fields of Debezium's ``source`` block. Else:
    service = the connector, identifier = the database user or the transaction.
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

    Fields of the entity type that no column gives must have a default in its model. A column
    without a field of that name is ignored.
    """

    entity: str
    """Name of a registered entity type."""
    key_columns: tuple[str, ...] = ()
    """Columns of the primary key, as the source spells them; empty: those of the message's key.
    Forms without keys in their messages (Canal has ``pkNames``, Maxwell none) need them."""
    naming: Naming = "snake"
    """How a column's name becomes a field's when ``columns`` does not say it."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Column → field, where the names differ by more than ``naming``."""
    types: Mapping[str, Convert] = field(default_factory=dict)
    """Column → how its values are read, where model and message do not tell."""
    translations: Mapping[str, Translation | Mapping[Any, Any]] = field(default_factory=dict)
    """Column → table of codes (kept as an entity type), or a fixed mapping code → name."""
    drop: tuple[str, ...] = ()
    """Columns that must never leave the raw topic (secrets, personal data)."""
    computed: Mapping[str, Callable[[State], Any]] = field(default_factory=dict)
    """Field → function of the state as far as it is known; the way to a computed key. A computed
    key must follow from key columns alone, since a delete may give no more."""
    parents: Mapping[str, str] = field(default_factory=dict)
    """Foreign keys: field of this entity → entity type of the parent, whose key it holds."""
    before: Literal["auto", "whole", "key"] = "auto"
    """What is believed of an image before: all of it, or its key columns only. ``auto``: the key
    for PostgreSQL, whose default replica identity gives "" for text it does not know; declare
    ``whole`` with REPLICA IDENTITY FULL. It matters for entities never seen before, only."""
    provenance: ProvenanceFrom = ProvenanceFrom()
    occurred_at: str | None = None
    """Field with the world's time of a change; ``None``: the source's commit time."""
    event: Callable[[State | None, State | None], DomainEvent | None] | None = None
    """Domain event of a change, from its states before and after; ``None``: a plain change."""
    events: str | None = None
    """Entity type (of events) where each domain event is published by itself, too."""
    partials: bool = False
    """Also publish the changed fields only, on ``<prefix>.<entity>.partials``."""
    truncate: Literal["refuse", "delete"] = "refuse"
    """What TRUNCATE means: a dead letter that says so, or a delete of every entity known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregate:
    """One aggregate type of an outbox table, as entities of one type."""

    entity: str
    """Name of a registered entity type."""
    facts: bool = False
    """Its payloads are facts: entities of kind ``event``, each under its row's own id."""
    provenance: Provenance | None = None
    """For payloads that say none, which facts cannot; ``None``: those are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outbox:
    """An outbox table in the form of Debezium's outbox event router, and what is in it.

    Columns: ``id``, ``aggregatetype``, ``aggregateid``, ``type`` and ``payload``; for others name
    them in ``Capture.settings``, in the router's own options. Rows are inserted once, never
    updated; those that are deleted again are no loss.
    """

    table: str
    """As the source names it (``shop.outbox``)."""
    aggregates: Mapping[str, Aggregate]
    """Value of ``aggregatetype`` → what it is; rows of other types stay unread in raw topics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A database whose changes are captured; ``name`` is the source in topic names.

    The connector writes ``<prefix>.raw.<name>.<table>`` for each table (``schema.table`` keeps
    only what is after its last dot), ``<prefix>.raw.<name>.transaction`` for transaction
    metadata and ``<prefix>.raw.<name>.message`` for logical messages. Raises InvalidCapture.
    """

    name: str
    kind: Kind
    tables: Mapping[str, Table] = field(default_factory=dict)
    """Table as the source names it (``public.orders``, ``shop.orders``) → mapping."""
    outbox: Outbox | None = None
    """Instead of tables: an outbox of MariaDB or MySQL, whose rows are changes already. Its
    aggregate types are this capture's tables then, each with a raw topic, and ``transactions``
    is off: a change has its own version, and no block."""
    dsn: str | None = None
    """URL of the database (``postgresql://user:password@host/db``); ``$NAME`` or ``${NAME}`` is
    taken from the environment. ``None``: rows come from a capture that somebody else runs."""
    form: Form = "debezium"
    """Shape of the messages in the raw topics."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """More settings of the connector, in its own names; they win over ours."""
    transactions: bool = True
    """Changes wait for the end of their source transaction (from the transaction topic, or the
    form's own commit mark) and carry its block; off for forms that do not tell it."""
    transaction_wait_s: float = 10.0
    """How long to wait for a transaction's end; then its rows go without a block, reported."""
    parents_first: bool = False
    """Hold a child until its parent is in the log, for ``Table.parents``."""
    parent_wait_s: float = 30.0
    """How long a child waits; then it goes as it is, reported."""
    times: Times = "us"
    """Unit of numbers in time columns where neither ``types`` nor the message says it."""
    epoch: int = 1
    """Raise it when the database was restored or replaced and its log positions start over;
    positions of a higher epoch are newer. Without it, rows below known positions are re-reads."""
    on_loss: Literal["stop", "resume"] = "stop"
    """What to do when raw records went out of retention before they were cleaned."""
    connect_url: str | None = None
    """REST address of a Connect cluster; ``None``: the local stack's worker."""

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise InvalidCapture(self.name, f"the name must match {NAME.pattern}")
        if self.outbox is not None:
            self._take_outbox(self.outbox)
        if not self.tables:
            raise InvalidCapture(self.name, "no table is declared")
        seen: dict[str, str] = {}
        for table, mapping in self.tables.items():
            short = topic_table(table)
            if short in seen:
                raise InvalidCapture(
                    self.name, f"{table} and {seen[short]} would share one raw topic"
                )
            if short in ("transaction", "message", "held"):
                raise InvalidCapture(self.name, f"{short} is the name of a topic of its own")
            seen[short] = table
            lost = set(mapping.key_columns) & set(mapping.drop)
            if lost:
                raise InvalidCapture(self.name, f"{table}: key column {min(lost)} is dropped")
            if mapping.provenance.message_prefix and not self.transactions:
                raise InvalidCapture(
                    self.name, f"{table}: provenance from messages needs transactions"
                )

    def _take_outbox(self, outbox: Outbox) -> None:
        """Have the aggregate types as tables; raises InvalidCapture."""
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
    def captured_tables(self) -> tuple[str, ...]:
        """Tables of the source that its connector reads, as the source names them."""
        return tuple(self.tables) if self.outbox is None else (self.outbox.table,)

    @property
    def entities(self) -> tuple[str, ...]:
        """Entity types that this capture is the source of truth of, without doubles."""
        named = [table.entity for table in self.tables.values()]
        named += [table.events for table in self.tables.values() if table.events]
        return tuple(dict.fromkeys(named))

    @property
    def placeholder(self) -> str:
        """What the connector writes for a value that it does not know, as its setting says it.

        It is the declared one, or ours where `everstate cdc add` makes the connector. Of a
        connector that somebody else runs it is Debezium's own, unless ``settings`` says another.
        """
        is_ours = self.kind == "postgresql" and self.dsn is not None
        default = placeholders.OWN_SETTING if is_ours else placeholders.DEFAULT_SETTING
        return self.settings.get(placeholders.NAME, default)

    def by_topic(self) -> dict[str, str]:
        """Last part of the raw topic's name → table as the source names it."""
        return {topic_table(table): table for table in self.tables}


def topic_table(table: str) -> str:
    """Last part of a table's raw topic: what is after the last dot of its name."""
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
        referred = [t for t in table.translations.values() if isinstance(t, Translation)]
        for parent in {*table.parents.values(), *(t.entity for t in referred)}:
            if parent not in capture.entities:
                raise InvalidCapture(
                    capture.name, f"{name}: {parent!r} is no entity type of this capture"
                )
