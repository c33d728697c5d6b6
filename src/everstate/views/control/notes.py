"""Reads the core's exceptions together with the core's position."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from everstate.log.positions import Range
from everstate.views.control.schema import Schema
from everstate.views.tables import CORE_FINGERPRINT, Core
from everstate.views.trailing import Exceptions

_IN_RANGE: Final = (
    "SELECT partition, '{what}', {columns} FROM {{{table}}} AS recorded "
    "JOIN core USING (partition) WHERE entity = %(entity)s AND generation = %(generation)s "
    'AND recorded."{by}" >= from_offset AND recorded."{by}" < to_offset'
)
_NOTES: Final = " UNION ALL ".join(
    (
        "SELECT partition, 'core', next_offset, NULL::bigint FROM core",
        _IN_RANGE.format(what="dead", table="dead", by="offset", columns='"offset", NULL'),
        _IN_RANGE.format(what="held", table="held", by="offset", columns='"offset", NULL'),
        _IN_RANGE.format(
            what="released", table="held", by="released_at", columns='"offset", released_at'
        ),
        # Runs do not overlap: of those that begin before the range, only the last can reach into
        # it. So the index gives what is needed, however many runs there are.
        "SELECT partition, 'duplicate', first_offset, last_offset FROM core, LATERAL ("
        "SELECT first_offset, last_offset FROM {duplicate} AS recorded WHERE entity = %(entity)s "
        "AND generation = %(generation)s AND recorded.partition = core.partition "
        "AND first_offset >= from_offset AND first_offset < to_offset UNION ALL ("
        "SELECT first_offset, last_offset FROM {duplicate} AS recorded WHERE entity = %(entity)s "
        "AND generation = %(generation)s AND recorded.partition = core.partition "
        "AND first_offset < from_offset ORDER BY first_offset DESC LIMIT 1)"
        ") AS run WHERE last_offset >= from_offset AND from_offset < to_offset",
    )
)
_JUDGED: Final = (
    "WITH core AS MATERIALIZED ("
    "SELECT partition, next_offset, from_offset, least(to_offset, next_offset) AS to_offset "
    "FROM unnest(%(partitions)s::int[], %(starts)s::bigint[], %(ends)s::bigint[]) "
    "AS wanted(partition, from_offset, to_offset) JOIN {position} USING (partition) "
    "WHERE view = %(view)s AND version = %(version)s AND generation = %(generation)s "
    "AND fingerprint = %(fingerprint)s) " + _NOTES
)


@dataclass(frozen=True, slots=True)
class Judged:
    """The core's position in a partition, and its exceptions in a range up to that position."""

    position: int
    exceptions: Exceptions


class Notes(Schema):
    """Reads the exceptions that the core recorded."""

    def judged(self, core: Core, wanted: Mapping[int, Range]) -> dict[int, Judged]:
        """The core's position in each partition, and its exceptions in a range of it.

        Only the part of a range before the position is read. Exceptions and position are read by
        one statement, so that the exceptions are complete up to the position (V1). A partition
        without a position is left out. Cost: one round trip; each exception is found by an index.
        """
        parameters: dict[str, Any] = {
            "partitions": list(wanted),
            "starts": [span.start for span in wanted.values()],
            "ends": [span.end for span in wanted.values()],
            "view": core.view,
            "version": core.version,
            "entity": core.entity,
            "generation": core.generation,
            "fingerprint": CORE_FINGERPRINT,
        }
        found: dict[int, dict[str, list[tuple[int, int]]]] = {}
        for partition, what, first, second in self.run(_JUDGED, parameters):
            found.setdefault(partition, defaultdict(list))[what].append((first, second))
        return {partition: _judged(notes) for partition, notes in found.items()}


def _judged(notes: Mapping[str, list[tuple[int, int]]]) -> Judged:
    ((position, _),) = notes["core"]
    return Judged(
        position,
        Exceptions(
            dead=frozenset(offset for offset, _ in notes["dead"]),
            duplicates=tuple(sorted(notes["duplicate"])),
            held=frozenset(offset for offset, _ in notes["held"]),
            released=dict(notes["released"]),
        ),
    )
