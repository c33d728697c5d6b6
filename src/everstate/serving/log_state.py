"""The log as its readers see it: topics, their ends, and how long they hold what is unread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from everstate.config import Config
from everstate.errors import LogError, MissingExtra
from everstate.log.groups import GROUP
from everstate.log.lag import Lag, LagRow, ReaderPosition
from everstate.log.positions import Offsets
from everstate.log.topics import TopicNames, Topics
from everstate.views.control import BUILDING, KEPT, RETIRED, ViewStatuses

ARCHIVE: Final = "archive"
"""The reader that copies the log to the lake."""


@dataclass(frozen=True, slots=True)
class PartitionState:
    """Where one partition begins and ends now."""

    partition: int
    begin: int
    end: int
    """Stable end; it counts transaction markers and removed records, too."""


@dataclass(frozen=True, slots=True)
class TopicState:
    """One topic of the project."""

    name: str
    partitions: tuple[PartitionState, ...]
    retention_s: float | None
    """How long a record is kept; ``None``: for ever, or until a newer one has its key."""
    is_compacted: bool
    retention_bytes: int | None = None
    """Largest size of one partition; ``None``: there is no limit."""

    @property
    def offsets(self) -> int:
        """Offsets between the beginnings and the ends: about the number of records."""
        return sum(each.end - each.begin for each in self.partitions)


@dataclass(frozen=True, slots=True)
class LogReader:
    """How far one reader, such as a view or the archive, has read one topic."""

    reader: str
    topic: str
    partitions: tuple[LagRow, ...]
    retention_s: float | None
    lost_offsets: int = 0
    """Offsets that the log dropped before the reader has read them."""

    @property
    def lag_changes(self) -> int:
        """Offsets that it has not read."""
        return sum(row.lag_changes for row in self.partitions)

    @property
    def lag_seconds(self) -> float:
        """Age of the oldest record that it has not read; 0: it has read all."""
        return max((row.lag_seconds for row in self.partitions), default=0.0)

    @property
    def share(self) -> float | None:
        """Its lag as a share of the retention; ``None``: the log keeps records for ever."""
        return None if self.retention_s is None else self.lag_seconds / max(self.retention_s, 1.0)

    @property
    def holds_s(self) -> float | None:
        """How long the log still holds what it has not read; ``None``: for ever."""
        return None if self.retention_s is None else max(0.0, self.retention_s - self.lag_seconds)


def topic_states(config: Config) -> list[TopicState]:
    """The topics of the project, by name.

    Raises Unavailable. Cost: three requests to the brokers, whatever the number of topics.
    """
    prefix = f"{config.log.prefix}."
    with Topics(config) as topics, Offsets(config) as offsets:
        names = sorted(name for name in topics.existing() if name.startswith(prefix))
        if not names:
            return []
        settings = topics.configs(names)
        begins, ends = offsets.beginnings(names), offsets.stable_ends(names)
    return [
        TopicState(
            name,
            tuple(
                PartitionState(partition, begins[topic, partition], end)
                for (topic, partition), end in sorted(ends.items())
                if topic == name
            ),
            retention_s(settings[name]),
            "compact" in settings[name].get("cleanup.policy", ""),
            _limit(settings[name], "retention.bytes"),
        )
        for name in names
    ]


def retention_s(settings: Mapping[str, str]) -> float | None:
    """How long a topic with these settings keeps a record; ``None``: there is no limit of time."""
    kept_ms = _limit(settings, "retention.ms")
    return None if kept_ms is None else kept_ms / 1000


def _limit(settings: Mapping[str, str], name: str) -> int | None:
    """A limit after which a topic drops records; ``None``: it has none."""
    limit = int(settings.get(name, "-1"))
    return None if limit < 0 or "delete" not in settings.get("cleanup.policy", "") else limit


def log_readers(
    config: Config,
    control: ViewStatuses,
    topics: Iterable[TopicState],
    entities: Iterable[str],
    stored: Iterable[ReaderPosition] = (),
) -> list[LogReader]:
    """The archive, the views and the readers of ``stored`` positions, each with its lag, by topic.

    Raises Unavailable. Cost: the archive's newest commit for each entity type, one request to the
    brokers for each topic, and a small fetch for each distinct position that lags.
    """
    known = {topic.name: topic for topic in topics}
    found = []
    with Lag(config) as measure:
        for (reader, topic), positions in _positions(config, control, entities, stored).items():
            if topic not in known:
                continue  # a generation that was deleted
            try:
                rows = measure.rows(positions)
            except LogError:
                continue  # the topic was deleted meanwhile
            begins = {each.partition: each.begin for each in known[topic].partitions}
            # A group stores the offset after its last record, where there may be only a marker.
            read = 1 if reader.startswith(GROUP) else 0
            lost = sum(max(0, begins.get(row.partition, 0) - row.position - read) for row in rows)
            kept_s = known[topic].retention_s
            found.append(LogReader(reader, topic, tuple(rows), kept_s, lost))
    return sorted(found, key=lambda each: (each.topic, each.reader != ARCHIVE, each.reader))


def _positions(
    config: Config,
    control: ViewStatuses,
    entities: Iterable[str],
    stored: Iterable[ReaderPosition],
) -> dict[tuple[str, str], list[ReaderPosition]]:
    """Positions by reader and topic."""
    names = TopicNames(config.log.prefix)
    found: dict[tuple[str, str], list[ReaderPosition]] = {}
    for position in stored:
        found.setdefault((position.reader, position.topic), []).append(position)
    for entity in entities:
        for generation, offsets in archive_position(config, entity).items():
            topic = names.changes(entity, generation)
            found[ARCHIVE, topic] = [
                ReaderPosition(ARCHIVE, topic, partition, offset)
                for partition, offset in sorted(offsets.items())
            ]
    read = {
        (row.name, row.version): row.name if row.published else f"{row.name}, version {row.version}"
        for row in control.versions()
        # A topic that is being built begins with the first change, which the log need not have.
        if row.status not in (KEPT, RETIRED) and not (row.is_topic and row.status == BUILDING)
    }
    for place in control.positions():
        reader = read.get((place.view, place.version))
        if reader is not None:
            topic = names.changes(place.entity, place.generation)
            position = ReaderPosition(reader, topic, place.partition, place.next_offset)
            found.setdefault((reader, topic), []).append(position)
    return found


def archive_position(config: Config, entity: str) -> dict[int, dict[int, int]]:
    """Generation → partition → the next offset that the archive reads; empty without an archive.

    Raises ArchiveError when there is one that cannot be read, and MissingExtra.
    """
    try:
        # Imported here: the reader of the lake is an extra.
        from everstate.archive.reader import ArchiveReader
    except ModuleNotFoundError as error:
        raise MissingExtra.of(error) or error from error
    return ArchiveReader(config, entity).position()
