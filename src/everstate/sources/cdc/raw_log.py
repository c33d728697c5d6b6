"""The raw log of a capture: one topic with one partition, or other tools' topics, one per table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from everstate.config import Config
from everstate.declarations.captures import Capture, Translation, topic_table
from everstate.errors import LogError
from everstate.log.client import raw_bytes_max
from everstate.log.consumer import Consumer
from everstate.log.positions import Offsets
from everstate.log.topics import Topics
from everstate.sources.cdc.holding import HELD
from everstate.sources.cdc.names import CaptureNames
from everstate.sources.cdc.shapes.places import stream_place

_HOUR_MS: Final = 3_600_000
_TAIL: Final = 100


class Parts(NamedTuple):
    """Partitions of a raw log, by number."""

    places: Sequence[tuple[str, int]]
    """Topic and partition."""
    names: Sequence[str]
    """Last part of each one's topic: a table's, or "" for the one raw log."""


def newest_lsn(config: Config, capture: Capture) -> int:
    """The last place of PostgreSQL's log that the end of a raw log names; 0: it names none.

    Cost: one read of at most a hundred records.
    """
    topic = CaptureNames(config.log.prefix, capture.name).raw_log
    # There may be no such topic yet.
    with Consumer(config, client_id="everstate-cdc") as consumer, suppress(LogError):
        records = consumer.read_topic(topic, last=_TAIL)
        return max((place for each in records for place in _places(each.value)), default=0)
    return 0


def _places(value: bytes | None) -> list[int]:
    """Places of the log in a row, or in the end of a transaction."""
    body = json.loads(value or b"{}")
    body = body if isinstance(body, dict) else {}
    place = stream_place("postgresql", body.get("source") or {}) or b""
    end = str(body.get("id")).partition(":")[2]
    rows = [int.from_bytes(place[at : at + 8], "big") for at in range(0, len(place), 8)]
    return [*rows, int(end) if end.isdecimal() else 0]


def parts_of(
    capture: Capture, topics: Topics, offsets: Offsets, at: Mapping[str, Mapping[int, int]]
) -> Parts:
    """The raw partitions of a capture.

    ``at``: positions by the topic's last part. Raises LogError when the one raw log does not have
    exactly one partition, or the capture was read from a topic for each table until now.
    """
    names = topics.names
    if not capture.is_ours:
        named = {names.raw(capture.name, part): part for part in _in_order(capture)}
        rank = {topic: number for number, topic in enumerate(named)}
        places = sorted(offsets.beginnings(named), key=lambda place: (rank[place[0]], place[1]))
        return Parts(places, [named[topic] for topic, _ in places])
    one = names.raw_prefix(capture.name)
    count = topics.partitions(one)
    if count != 1:
        raise LogError(
            f"{one} has {count} partitions. A raw log has one: its order is that of the source.",
            advice="Make it anew with one partition (`everstate cdc remove --topics`, then "
            "`cdc add`), and never add partitions to it.",
        )
    if at and "" not in at:
        raise LogError(
            f"capture {capture.name} was read from a topic for each table until now, and the "
            f"connector of a capture with `dsn` writes to {one} only: rows between the two would "
            "be missing.",
            advice="Declare the capture without `dsn`, or begin a new log: `everstate log begin "
            "--help` shows the steps.",
        )
    return Parts([(one, 0)], [""])


def ensure_topics(config: Config, capture: Capture, topics: Topics) -> None:
    """Make the topics that a capture is cleaned from and to, where they are missing."""
    topics.ensure(capture.entities)
    size = {"max.message.bytes": str(raw_bytes_max(config))}
    if capture.is_ours:
        ensure_raw_log(config, capture, topics)
    else:
        raw = [topics.names.raw(capture.name, part) for part in capture.by_topic()]
        topics.ensure_raw(raw, partitions=config.log.partitions, settings=raw_settings(config))
    partials = []
    for entity in sorted({t.entity for t in capture.tables.values() if t.partials}):
        log = config.log.of(entity)
        settings = {"retention.ms": str(int(log.changes_retention_hours * _HOUR_MS)), **size}
        partials.append(topics.names.partials(entity))
        topics.ensure_raw(partials[-1:], partitions=log.partitions, settings=settings)
    held = topics.names.capture(capture.name, HELD)
    topics.ensure_raw([held], partitions=1, settings={"cleanup.policy": "compact", **size})
    # The topics that connectors write to belong to them, or were made by `everstate cdc add`.
    topics.raise_sizes([*partials, held], raw_bytes_max(config))


def ensure_raw_log(config: Config, capture: Capture, topics: Topics) -> list[str]:
    """Make the one raw topic of a capture, with exactly one partition; out: topics made."""
    one = topics.names.raw_prefix(capture.name)
    made = topics.ensure_raw([one], partitions=1, settings=raw_settings(config))
    topics.raise_sizes([one], raw_bytes_max(config))
    return made


def raw_settings(config: Config) -> dict[str, str]:
    """Settings of a raw topic."""
    return {
        "retention.ms": str(int(config.capture.retention_hours * _HOUR_MS)),
        "retention.bytes": str(config.capture.retention_bytes),
        "max.message.bytes": str(raw_bytes_max(config)),
    }


def _in_order(capture: Capture) -> Iterator[str]:
    """Last parts of the tables' raw topics, so that tables come after those they refer to."""
    waits: dict[str, set[str]] = {}
    for name, table in capture.tables.items():
        named = {t.entity for t in table.translations.values() if isinstance(t, Translation)}
        parents = set(table.parents.values()) if capture.parents_first else set()
        wanted = (named | parents) - {table.entity}
        waits[name] = {n for n, other in capture.tables.items() if other.entity in wanted}
    while waits:
        # Tables that refer to each other have no order: the first one of them begins.
        ready = (name for name, before in waits.items() if not before & waits.keys())
        name = next(ready, next(iter(waits)))
        del waits[name]
        yield topic_table(name)
