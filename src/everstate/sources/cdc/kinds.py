"""Kinds of captures: what reads their raw records, and what numbers their rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from everstate.changes import EntityType
from everstate.config import Config
from everstate.declarations.captures import Capture
from everstate.log.topics import TopicNames
from everstate.sources.cdc.composing import CaptureComposer
from everstate.sources.cdc.numbering import Numbering
from everstate.sources.cdc.outbox_numbering import OutboxNumbering, RoutedRecords
from everstate.sources.cdc.outbox_reading import RoutedReader
from everstate.sources.cdc.reading import RawReader


@dataclass(frozen=True, slots=True)
class CaptureKind:
    """How the rows of a capture become records."""

    reader: RawReader
    """Reads one raw record."""
    records: CaptureComposer | RoutedRecords
    """Collects the records of a batch."""
    numbering: Callable[..., Numbering | OutboxNumbering]
    """Makes what numbers rows, from held rows and the options of :class:`Numbering`."""


def kind_of(config: Config, capture: Capture, entities: Mapping[str, EntityType]) -> CaptureKind:
    """The kind of a declared capture: tables, or an outbox, whose rows are changes already."""
    known = {name: entities[name] for name in capture.entities}
    held_max = config.pipeline.held_max
    if capture.outbox is None:
        reader, composer = RawReader(capture, known), CaptureComposer(config, capture, known)
        numbering = partial(Numbering, reader, composer, held_max=held_max)
        return CaptureKind(reader, composer, numbering)
    routed = RoutedReader(
        *(capture, known),
        message_bytes_max=config.log.message_bytes_max,
        ahead_hours=config.log.occurred_ahead_hours,
    )
    records = RoutedRecords(TopicNames(config.log.prefix))
    return CaptureKind(
        routed, records, partial(OutboxNumbering, capture, known, records, held_max=held_max)
    )
