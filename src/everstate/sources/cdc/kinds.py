"""Kinds of captures: what reads their raw records, and what numbers their rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from everstate.changes import EntityType
from everstate.changes.keys import EntityKey
from everstate.config import Config
from everstate.declarations.captures import Capture
from everstate.log.record import OutRecord
from everstate.log.topics import TopicNames
from everstate.sources.cdc.absent import AbsentRows
from everstate.sources.cdc.balance import Cut
from everstate.sources.cdc.columns import Rows
from everstate.sources.cdc.composing import CaptureComposer
from everstate.sources.cdc.holding import HeldEntity
from everstate.sources.cdc.numbered import NumberedBatch
from everstate.sources.cdc.numbering import Numbering, RawPartitions
from everstate.sources.cdc.outbox_numbering import OutboxNumbering, RoutedRecords
from everstate.sources.cdc.outbox_reading import RoutedReader
from everstate.sources.cdc.overlaps import Overlaps
from everstate.sources.cdc.reading import RawReader
from everstate.sources.cdc.states import States

HeldEntities = dict[EntityKey, HeldEntity]


class CaptureKind(Protocol):
    """How the rows of a capture become records."""

    @property
    def reader(self) -> RawReader:
        """Reads one raw record."""

    def number(
        self,
        rows: Rows,
        places: RawPartitions,
        states: States,
        now_s: float,
        cut: Cut | None,
        *,
        has_read_all: bool,
    ) -> NumberedBatch:
        """One batch of rows; see :meth:`Numbering.run`."""

    def delete_absent(
        self, absent: AbsentRows, states: States, now_s: float, cut: Cut | None
    ) -> NumberedBatch:
        """One batch of deletes: entities that are missing in a first snapshot taken again."""

    def records(self) -> list[OutRecord]:
        """The records of that batch."""

    def begin(
        self,
        held: HeldEntities,
        epoch: int,
        *,
        is_trusted: bool,
        overlaps: Overlaps | None = None,
    ) -> None:
        """Begin with these held rows; see :class:`Numbering` for the other arguments."""

    @property
    def coverage_percent(self) -> float:
        """Percent of the changes since the start for which the source gave provenance."""


def kind_of(config: Config, capture: Capture, entities: Mapping[str, EntityType]) -> CaptureKind:
    """The kind of a declared capture."""
    known = {name: entities[name] for name in capture.entities}
    kind: CaptureKind = Tables(config, capture, known)
    if capture.outbox is not None:
        kind = OutboxRows(config, capture, known)
    return kind


class Tables:
    """Tables: their rows are completed to whole states and numbered with versions here."""

    def __init__(
        self, config: Config, capture: Capture, entities: Mapping[str, EntityType]
    ) -> None:
        self.reader = RawReader(capture, entities)
        self._held_max = config.pipeline.held_max
        self._composer = CaptureComposer(config, capture, entities)
        self.begin({}, 1, is_trusted=False)

    def begin(
        self,
        held: HeldEntities,
        epoch: int,
        *,
        is_trusted: bool,
        overlaps: Overlaps | None = None,
    ) -> None:
        """Begin with these held rows."""
        self._numbering = Numbering(
            self.reader,
            self._composer,
            held,
            held_max=self._held_max,
            epoch=epoch,
            is_trusted=is_trusted,
            overlaps=overlaps,
        )

    def number(
        self,
        rows: Rows,
        places: RawPartitions,
        states: States,
        now_s: float,
        cut: Cut | None,
        *,
        has_read_all: bool,
    ) -> NumberedBatch:
        """One batch of rows."""
        self._composer.begin(now_s)
        return self._numbering.run(rows, places, states, now_s, cut, has_read_all=has_read_all)

    def delete_absent(
        self, absent: AbsentRows, states: States, now_s: float, cut: Cut | None
    ) -> NumberedBatch:
        """One batch of deletes."""
        self._composer.begin(now_s)
        return self._numbering.delete_absent(absent, states, now_s, cut)

    def records(self) -> list[OutRecord]:
        """The records of that batch."""
        return self._composer.records()

    @property
    def coverage_percent(self) -> float:
        """Percent of the changes since the start for which the source gave provenance."""
        composed = self._composer.composed
        return 100.0 * self._composer.with_provenance / composed if composed else 100.0


class OutboxRows:
    """An outbox: its rows are changes already, whose versions the service has assigned.

    A row is published once the version before it is in the log; until then it is held. A row that
    cannot be read, or whose state before differs from our newest state, becomes a dead letter; its
    version is then awaited from a corrected row.
    """

    coverage_percent = 100.0

    def __init__(
        self, config: Config, capture: Capture, entities: Mapping[str, EntityType]
    ) -> None:
        log = config.log
        self.reader = RoutedReader(
            *(capture, entities),
            message_bytes_max=log.message_bytes_max,
            ahead_hours=log.occurred_ahead_hours,
        )
        self._capture, self._entities = capture, entities
        self._held_max = config.pipeline.held_max
        self._records = RoutedRecords(TopicNames(config.log.prefix))
        self.begin({}, 1, is_trusted=False)

    def begin(
        self,
        held: HeldEntities,
        epoch: int,
        *,
        is_trusted: bool,
        overlaps: Overlaps | None = None,
    ) -> None:
        """Begin with these held rows; versions, not source positions, decide what is new."""
        del epoch, is_trusted, overlaps
        self._numbering = OutboxNumbering(
            self._capture, self._entities, self._records, held, held_max=self._held_max
        )

    def number(
        self,
        rows: Rows,
        places: RawPartitions,
        states: States,
        now_s: float,
        cut: Cut | None,
        *,
        has_read_all: bool,
    ) -> NumberedBatch:
        """One batch of rows; it is never cut."""
        del cut, has_read_all
        self._records.begin()
        return self._numbering.run(rows, places, states, now_s)

    def delete_absent(
        self, absent: AbsentRows, states: States, now_s: float, cut: Cut | None
    ) -> NumberedBatch:
        """An empty batch: a row missing in the outbox does not mean that its entity is deleted."""
        del absent, states, now_s, cut
        self._records.begin()
        return NumberedBatch()

    def records(self) -> list[OutRecord]:
        """The records of that batch."""
        return self._records.all()
