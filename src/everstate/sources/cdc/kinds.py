"""Kinds of captures: what reads their raw records, and what numbers their rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from everstate.changes import EntityType
from everstate.config import Config
from everstate.declarations.captures import Capture
from everstate.sources.cdc.composing import CaptureComposer
from everstate.sources.cdc.numbering import Numbering
from everstate.sources.cdc.outbox_numbering import OutboxNumbering
from everstate.sources.cdc.outbox_reading import RoutedReader
from everstate.sources.cdc.reading import RawReader


@dataclass(frozen=True, slots=True)
class CaptureKind:
    """How the rows of a capture become records."""

    reader: RawReader
    """Reads one raw record."""
    records: CaptureComposer
    """Collects the records of a batch."""
    numbering: Callable[..., Numbering]
    """Makes what numbers rows, from held rows and the options of :class:`Numbering`."""


def kind_of(config: Config, capture: Capture, entities: Mapping[str, EntityType]) -> CaptureKind:
    """The kind of a declared capture: tables, or an outbox, whose rows are changes already."""
    known = {name: entities[name] for name in capture.entities}
    composer, held_max = CaptureComposer(config, capture, known), config.pipeline.held_max
    reader: RawReader = RawReader(capture, known)
    numbering = Numbering
    if capture.outbox is not None:
        numbering = OutboxNumbering
        reader = RoutedReader(
            *(capture, known),
            message_bytes_max=config.log.message_bytes_max,
            ahead_hours=config.log.occurred_ahead_hours,
        )
    make = partial(numbering, reader, composer, held_max=held_max)
    return CaptureKind(reader, composer, make)
