"""What became of the rows that were read: counted per table, committed with the position."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from everstate.config import Config
from everstate.errors import LogError
from everstate.log.positions import Offsets
from everstate.log.publisher import read_progress
from everstate.log.topics import TopicNames
from everstate.sources.cdc.declaration import Capture
from everstate.sources.cdc.gate import Told
from everstate.sources.cdc.holding import HeldEntity

Outcome = Literal["published", "skipped", "dead"]
PUBLISHED: Final[Outcome] = "published"
SKIPPED: Final[Outcome] = "skipped"
DEAD: Final[Outcome] = "dead"
Outcomes = Counter[tuple[str, Outcome]]
"""(Table, outcome) → rows."""


class Counts(msgspec.Struct, array_like=True, frozen=True):
    """Rows of one table since its capture was cleaned first."""

    read: int = 0
    """Taken over from the raw topic, and those that a truncation deleted."""
    published: int = 0
    """Became changes."""
    skipped: int = 0
    """Say nothing new: read before, or nothing of the entity changed."""
    dead: int = 0
    """Refused, each with a dead letter."""
    held: int = 0
    """Wait now."""

    @property
    def vanished(self) -> int:
        """Read, and nothing became of them: always 0."""
        return self.read - self.published - self.skipped - self.dead - self.held


class Note(msgspec.Struct):
    """What the publisher's progress says of a capture: how far it came, and what it came to."""

    at: dict[str, dict[int, int]]
    """Raw positions, by the last part of the topic's name."""
    topics: dict[str, str]
    """Which topics these are."""
    begun: dict[str, Told] = {}
    """Of transactions that are partly published what the source told of them."""
    rows: dict[str, Counts] = {}


decode_note = msgspec.json.Decoder(Note).decode
encode_note = msgspec.json.Encoder().encode


def publisher_name(capture: str) -> str:
    """Name of the publisher that cleans a capture."""
    return f"clean-{capture}"


@dataclass(frozen=True, slots=True)
class TableBalance:
    """What became of the rows of one table; see :class:`Counts`."""

    table: str
    read: int
    published: int
    skipped: int
    dead: int
    held: int
    vanished: int
    unread: int | None
    """Records of the raw topic that are not taken over yet; ``None``: the topic is gone."""


def counted(
    counts: Mapping[str, Counts], read: Counter[str], outcomes: Outcomes, held: Counter[str]
) -> dict[str, Counts]:
    """Counts after a batch; ``held`` is what waits then."""
    tables = {*counts, *read, *held, *(table for table, _ in outcomes)}
    found = {}
    for table in sorted(tables):
        before = counts.get(table, Counts())
        found[table] = Counts(
            before.read + read[table],
            before.published + outcomes[table, PUBLISHED],
            before.skipped + outcomes[table, SKIPPED],
            before.dead + outcomes[table, DEAD],
            held[table],
        )
    return found


def held_rows(held: Iterable[HeldEntity]) -> Counter[str]:
    """Rows that wait, by table."""
    return Counter(row.table for one in held for row in one.rows)


def read_balance(config: Config, capture: Capture) -> list[TableBalance]:
    """What became of a capture's rows, as the log has it; by table.

    Asks the log alone: neither Connect nor the database has to be there. Empty: the capture was
    never cleaned. Raises Unavailable.
    """
    try:
        progress = read_progress(config, publisher_name(capture.name))
    except LogError:
        progress = None
    if progress is None:
        return []
    note = decode_note(progress.note)
    unread = _unread(config, capture, note)
    parts = {table: part for part, table in capture.by_topic().items()}
    return [
        TableBalance(
            table=table,
            **msgspec.structs.asdict(one),
            vanished=one.vanished,
            unread=unread.get(parts.get(table, table)),
        )
        for table in sorted({*note.rows, *parts})
        for one in (note.rows.get(table, Counts()),)
    ]


def _unread(config: Config, capture: Capture, note: Note) -> Counter[str]:
    """Records behind the position, by the last part of the topic's name; none where it is gone."""
    names = TopicNames(config.log.prefix)
    topics = {names.raw(capture.name, part): part for part in note.at}
    found: Counter[str] = Counter()
    with Offsets(config) as offsets, suppress(LogError):
        for (topic, partition), end in offsets.stable_ends(topics).items():
            part = topics[topic]
            found[part] += max(0, end - note.at[part].get(partition, 0))
    return found
