"""What became of the rows that were read: counted per table, committed with the position."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec
from prometheus_client import Counter as Metric
from prometheus_client import Gauge

from everstate.changes.keys import EntityKey
from everstate.config import Config
from everstate.declarations.captures import Capture
from everstate.errors import LogError
from everstate.log.lag import ReaderPosition
from everstate.log.positions import Offsets
from everstate.log.publisher import read_progress
from everstate.log.topics import TopicNames
from everstate.sources.cdc.composing import RawPlace, RefusedRecord
from everstate.sources.cdc.holding import HeldEntity
from everstate.sources.cdc.mapping import CleanRow
from everstate.sources.cdc.stream import StreamStanding

logger = logging.getLogger("everstate.sources.cdc")

ROWS = Metric(
    "everstate_clean_rows",
    "Rows since the capture was cleaned first: read, deletes added, and what became of them",
    ["capture", "table", "outcome"],
)
HELD_ROWS = Gauge("everstate_clean_held_rows", "Rows that wait", ["capture", "table"])
VANISHED_ROWS = Gauge(
    "everstate_clean_vanished_rows", "Rows that were read and became nothing", ["capture", "table"]
)
COVERAGE = Gauge(
    "everstate_clean_provenance_percent",
    "Percentage of changes whose writer the source names",
    ["capture"],
)
_shown: Counter[tuple[str, str, str]] = Counter()
"""Counts that this process has added to the metrics, by capture, table and outcome."""

RowOutcome = Literal["published", "skipped", "dead"]
PUBLISHED: Final[RowOutcome] = "published"
SKIPPED: Final[RowOutcome] = "skipped"
DEAD: Final[RowOutcome] = "dead"
Outcomes = Counter[tuple[str, RowOutcome]]
"""(Table, outcome) → rows."""


class RowCounts(msgspec.Struct, array_like=True, frozen=True):
    """Rows of one table since its capture was cleaned first."""

    read: int = 0
    """Read from the raw topics."""
    published: int = 0
    """Became changes."""
    skipped: int = 0
    """Changed nothing: read before, superseded, or with the state that the entity has."""
    dead: int = 0
    """Refused, each with a dead letter."""
    held: int = 0
    """Held now."""
    added: int = 0
    """Deletes without a row of their own: of the entities of a table that was truncated, or that
    are missing in a first snapshot that was taken again."""

    @property
    def vanished(self) -> int:
        """Read or added, and in none of the other counts: always 0."""
        return self.read + self.added - self.published - self.skipped - self.dead - self.held


class Cut(msgspec.Struct, frozen=True):
    """Where a batch ended within the deletes of one raw record, of which there are too many.

    The next batch goes on behind the entity that was deleted last.
    """

    part: int
    """Number of the raw partition, in the process that made the cut."""
    offset: int
    table: str = ""
    key: str = ""
    """Of the entity that was deleted last; empty: none was."""


class CaptureNote(msgspec.Struct):
    """The position record of a capture: how far it was read, and the counts of its rows.

    It is stored in the publisher's progress, in the transaction of each batch.
    """

    at: dict[str, dict[int, int]]
    """Raw positions, by the last part of the topic's name."""
    topics: dict[str, str]
    """Cluster id and topic id of each of them (C8)."""
    rows: dict[str, RowCounts] = {}
    stream: StreamStanding | None = None
    """Standing of the one raw log at its position; ``None``: the capture has none."""
    cut: Cut | None = None
    """The rows between the position and this record are published, and a part of its deletes."""


decode_note = msgspec.json.Decoder(CaptureNote).decode
encode_note = msgspec.json.Encoder().encode


@dataclass(slots=True)
class NumberedBatch:
    """The outcome of one batch of rows."""

    refused: list[RefusedRecord] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    outcomes: Outcomes = field(default_factory=Counter)
    """What became of each row, by table; rows that wait have none yet."""
    read: Counter[str] = field(default_factory=Counter)
    """Rows that were read, by table."""
    added: Counter[str] = field(default_factory=Counter)
    """Deletes by a truncation or a repeated first snapshot, by table."""
    changes: int = 0
    overdue: int = 0
    """Held rows that were released without their parent, or without the name of a code."""
    held_changed: set[EntityKey] = field(default_factory=set)
    cut: Cut | None = None
    """Where it ended within the deletes of one record; ``None``: it did not."""
    left: int = 0
    """Number of its last rows that the next batch begins with: from that record on."""

    def skip(self, table: str, reason: str, rows: int = 1) -> None:
        """Count rows that change nothing."""
        self.skipped[reason] += rows
        self.outcomes[table, SKIPPED] += rows

    def refuse(
        self,
        table: str,
        entity: str | None,
        reason: str,
        place: RawPlace,
        raw: tuple[bytes | None, bytes | None] | None = None,
    ) -> None:
        """Record a row that becomes a dead letter."""
        self.refused.append(RefusedRecord(entity, reason, place, raw))
        self.outcomes[table, DEAD] += 1

    def refuse_row(self, row: CleanRow, entity: str, reason: str) -> None:
        """Record a row that no change is made of; its bytes are read again."""
        assert row.at is not None
        self.refuse(row.table, entity, reason, RawPlace(*row.at))


def publisher_name(capture: str) -> str:
    """Name of the publisher that cleans a capture."""
    return f"clean-{capture}"


@dataclass(frozen=True, slots=True)
class TableBalance:
    """What became of the rows of one table; see :class:`RowCounts`."""

    table: str
    read: int
    published: int
    skipped: int
    dead: int
    held: int
    added: int
    vanished: int


@dataclass(frozen=True, slots=True)
class Balance:
    """What became of the rows of a capture."""

    tables: tuple[TableBalance, ...] = ()
    unread: int | None = None
    """Records of the raw log that are not cleaned yet: rows of all tables, and other records of the
    connector. ``None``: the capture was never cleaned, or the raw log is gone."""

    @property
    def vanished(self) -> int:
        """Rows that were read and are in none of the other counts: always 0."""
        return sum(one.vanished for one in self.tables)


def counted(
    counts: Mapping[str, RowCounts],
    read: Counter[str],
    added: Counter[str],
    outcomes: Outcomes,
    held: Counter[str],
) -> dict[str, RowCounts]:
    """Counts after a batch; ``held``: the rows that are held after it."""
    tables = {*counts, *read, *added, *held, *(table for table, _ in outcomes)}
    found = {}
    for table in sorted(tables):
        before = counts.get(table, RowCounts())
        found[table] = RowCounts(
            before.read + read[table],
            before.published + outcomes[table, PUBLISHED],
            before.skipped + outcomes[table, SKIPPED],
            before.dead + outcomes[table, DEAD],
            held[table],
            before.added + added[table],
        )
    return found


def held_rows(held: Iterable[HeldEntity]) -> Counter[str]:
    """Number of held rows, by table."""
    return Counter(row.table for one in held for row in one.rows)


def read_balance(config: Config, capture: Capture) -> Balance:
    """What became of a capture's rows, as the log has it; by table.

    Reads Kafka only: neither Kafka Connect nor the database has to run. Raises Unavailable.
    """
    note = note_of(config, capture)
    if note is None:
        return Balance()
    tables = tuple(
        TableBalance(table=table, **msgspec.structs.asdict(one), vanished=one.vanished)
        for table in sorted({*note.rows, *capture.tables})
        for one in (note.rows.get(table, RowCounts()),)
    )
    return Balance(tables, _unread(config, capture, note))


def clean_positions(config: Config, capture: Capture) -> list[ReaderPosition]:
    """How far a capture was cleaned, by raw partition; raises Unavailable."""
    note, reader = note_of(config, capture), f"clean {capture.name}"
    listed = {} if note is None else _positions(config, capture, note)
    return [ReaderPosition(reader, topic, *at) for topic, all_of in listed.items() for at in all_of]


def _positions(config: Config, capture: Capture, note: CaptureNote) -> dict[str, list[Any]]:
    """Raw topic → number and position of its partitions."""
    names, source = TopicNames(config.log.prefix), capture.name
    return {
        names.raw(source, name) if name else names.raw_prefix(source): list(at.items())
        for name, at in note.at.items()
    }


def note_of(config: Config, capture: Capture) -> CaptureNote | None:
    """The position record of a capture; ``None``: it was never cleaned. Reads Kafka only."""
    with suppress(LogError):
        progress = read_progress(config, publisher_name(capture.name))
        return None if progress is None else decode_note(progress.note)
    return None


def _unread(config: Config, capture: Capture, note: CaptureNote) -> int | None:
    """Number of raw records after the position; ``None``: there is no raw topic."""
    found = None
    with Offsets(config) as offsets:
        for topic, at in _positions(config, capture, note).items():
            with suppress(LogError):
                ends = offsets.stable_ends([topic])
                behind = (end - dict(at).get(part, 0) for (_, part), end in ends.items())
                found = (found or 0) + sum(max(0, count) for count in behind)
    return found


def show_balance(capture: str, rows: Mapping[str, RowCounts]) -> None:
    """Set the counts of a capture's rows in the metrics as the log has them, over all restarts."""
    for table, one in rows.items():
        counts = {"read": one.read, "added": one.added, PUBLISHED: one.published}
        for outcome, count in {**counts, SKIPPED: one.skipped, DEAD: one.dead}.items():
            more = count - _shown[capture, table, outcome]
            if more > 0:
                ROWS.labels(capture, table, outcome).inc(more)
                _shown[capture, table, outcome] = count
        HELD_ROWS.labels(capture, table).set(one.held)
        VANISHED_ROWS.labels(capture, table).set(one.vanished)
        if one.vanished != _shown[capture, table, "vanished"]:
            _shown[capture, table, "vanished"] = one.vanished
            logger.error(
                "capture %s: %d rows of %s were read and became nothing",
                *(capture, one.vanished, table),
            )
