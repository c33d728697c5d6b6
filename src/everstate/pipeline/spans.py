"""Where a keeper reads each partition's next range: in the log, or in the archive (C27)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from everstate.archive import ArchiveLog, ArchiveReader, Ledger
from everstate.archive.ledger import ledger_rows
from everstate.config import Config
from everstate.errors import DataLoss
from everstate.log.positions import Range


@dataclass(frozen=True, slots=True)
class Sources:
    """Ranges of one topic by where they are read; no partition is in both."""

    log: Mapping[int, Range] = field(default_factory=dict)
    archive: Mapping[int, Range] = field(default_factory=dict)

    @property
    def spans(self) -> dict[int, Range]:
        """All ranges by partition."""
        return {**self.log, **self.archive}


@dataclass(frozen=True, slots=True)
class Archived:
    """Offsets of each partition that an archive has: from where it began, up to its position."""

    begins: Mapping[int, int]
    position: Mapping[int, int]

    def has(self, partition: int, offset: int) -> bool:
        """Whether the record at an offset is archived, if there was one."""
        if partition not in self.begins:
            return False
        return self.begins[partition] <= offset < self.position.get(partition, 0)


class ArchivedOffsets:
    """Asks archives how far they reach; where one began is asked once."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._begins: dict[tuple[str, int], dict[int, int]] = {}

    def of(self, entity: str, generation: int = 1) -> Archived:
        """What the archive of an entity type has now; nothing when there is none."""
        position = ArchiveReader(self._config, entity).position().get(generation, {})
        if position and (entity, generation) not in self._begins:
            self._begins[entity, generation] = self._first(entity, generation)
        return Archived(self._begins.get((entity, generation), {}), position)

    def _first(self, entity: str, generation: int) -> dict[int, int]:
        rows = Ledger(self._config, entity).rows()
        known = max((row.commit_version for row in rows), default=-1)
        for commit in ArchiveLog(self._config, entity).commits(known):
            rows += ledger_rows(commit)
        begins: dict[int, int] = {}
        for row in rows:
            if row.generation == generation:
                begins[row.partition] = min(row.start, begins.get(row.partition, row.start))
        return begins


def divided(
    topic: str, spans: Mapping[int, Range], log_begins: Mapping[int, int], archived: Archived
) -> Sources:
    """Each range from the log where it still has its start, else from the archive.

    An archived range ends where the archive does, which trails the log: the rest is read in a
    later step. ``log_begins`` must be asked before ``archived``. Raises DataLoss when a range
    starts at an offset that neither has (C8).
    """
    log, archive = {}, {}
    for partition, span in spans.items():
        begin = log_begins[partition]
        if span.start >= begin:
            log[partition] = span
        elif archived.has(partition, span.start):
            archive[partition] = Range(span.start, min(span.end, archived.position[partition]))
        else:
            raise DataLoss(
                f"{topic}[{partition}]: offsets {span.start:,} to {begin:,} are neither in the log "
                "nor in the archive; nothing was skipped.",
                advice="Restore the topic or the archive.",
            )
    return Sources(log, archive)
