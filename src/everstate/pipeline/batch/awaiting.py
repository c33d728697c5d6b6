"""Waiting until an archive has reached the positions that are to be proved."""

from __future__ import annotations

import time
from typing import Final

from everstate.archive import ArchiveReader
from everstate.config import Config
from everstate.errors import Unavailable
from everstate.pipeline.batch.accepted import PartitionOffsets
from everstate.pipeline.spark.progress import OnProgress, Progress

_WAIT_POLL_S: Final = 0.5
_WAIT_SPARE_S: Final = 60.0


def await_archive(
    config: Config,
    entity: str,
    positions: PartitionOffsets,
    on_progress: OnProgress = lambda _progress: None,
) -> None:
    """Wait until the archive has everything before these positions; raises Unavailable."""
    reader = ArchiveReader(config, entity)
    deadline = time.monotonic() + 2 * config.archive.trigger_s + _WAIT_SPARE_S
    while behind := _behind(reader, positions):
        if time.monotonic() > deadline:
            raise Unavailable(
                f"the archive of {entity} is {behind:,} offsets behind the views.",
                advice="Let `everstate run` continue until it has archived them.",
            )
        on_progress(
            Progress(f"waiting until {behind:,} more offsets of {entity} are archived", 0.0)
        )
        time.sleep(_WAIT_POLL_S)


def _behind(reader: ArchiveReader, positions: PartitionOffsets) -> int:
    archived = reader.position()
    return sum(
        max(0, end - archived.get(generation, {}).get(partition, 0))
        for (generation, partition), end in positions.items()
    )
