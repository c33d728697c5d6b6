"""Where a keeper reads each partition's next range: in the log, or in the archive (C27)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from everstate.archive import ArchiveReader
from everstate.config import Config
from everstate.errors import DataLoss
from everstate.log.positions import Range


@dataclass(frozen=True, slots=True)
class Sources:
    """Ranges of one topic to read from the log or from the archive; no partition is in both."""

    log: Mapping[int, Range] = field(default_factory=dict)
    archive: Mapping[int, Range] = field(default_factory=dict)

    @property
    def spans(self) -> dict[int, Range]:
        """All ranges by partition."""
        return {**self.log, **self.archive}

    def cut(self, spans: Mapping[int, Range]) -> Sources:
        """The same sources, for only these ranges, which must lie within the present ones."""
        return Sources(
            {partition: span for partition, span in spans.items() if partition in self.log},
            {partition: span for partition, span in spans.items() if partition in self.archive},
        )


@dataclass(frozen=True, slots=True)
class Archived:
    """Offsets that an archive has, by partition: from its first offset up to its position."""

    begins: Mapping[int, int]
    position: Mapping[int, int]

    @property
    def is_whole(self) -> bool:
        """Whether it began, or will begin, at offset 0 of each partition: it has all changes."""
        return not any(self.begins.values())

    def has(self, partition: int, offset: int) -> bool:
        """Whether an offset is archived; a marker or aborted record has no row there."""
        if partition not in self.begins:
            return False
        return self.begins[partition] <= offset < self.position.get(partition, 0)

    def vector(self, core: Mapping[int, int]) -> dict[int, int]:
        """The vector to build to: by partition the lower offset of archive and core (V6)."""
        return {p: min(offset, self.position.get(p, 0)) for p, offset in core.items()}


class ArchivedOffsets:
    """Reads the positions of archives; their first offsets are read only once."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._begins: dict[tuple[str, int], dict[int, int]] = {}

    def of(self, entity: str, generation: int = 1) -> Archived:
        """The offsets that an entity type's archive has now; empty without an archive."""
        reader = ArchiveReader(self._config, entity)
        position = reader.position().get(generation, {})
        if position and (entity, generation) not in self._begins:
            self._begins[entity, generation] = reader.begins(generation)
        return Archived(self._begins.get((entity, generation), {}), position)


def divided(
    topic: str, spans: Mapping[int, Range], log_begins: Mapping[int, int], archived: Archived
) -> Sources:
    """Each range from the log when the log still has its start, else from the archive.

    A range from the archive ends at the archive's position, which is behind the log: the rest is
    read in a later step. ``log_begins`` must be read before ``archived``. Raises DataLoss when a
    range starts at an offset that neither has (C8).
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
                "nor in the archive; no record was skipped.",
                advice="Restore the topic or the archive.",
            )
    return Sources(log, archive)
