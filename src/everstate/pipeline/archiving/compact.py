"""Compaction: few large files instead of many small ones, clustered by key; nothing changes."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Final

from pyspark.sql import SparkSession

from everstate.archive import ArchiveLog, ArchiveReader, Ledger
from everstate.archive.sums import require_sums
from everstate.archive.upkeep import delete_unneeded
from everstate.config import Config
from everstate.errors import NoArchive
from everstate.pipeline.spark.session import spark_errors

_NOTE: Final = "everstate_compaction"
_ROW_GROUP_BYTES: Final = 16 << 20
"""Size of a row group before compression: what one look-up of a key decodes."""


@dataclass(frozen=True, slots=True)
class Compaction:
    """What a compaction did."""

    entity: str
    files_before: int
    files_after: int
    bytes: int
    clustered: bool
    """Whether all files were rewritten, ordered by key."""
    files_deleted: int
    """How many unneeded files of older versions were deleted; they are kept for seven days."""
    seconds: float


def compact(
    spark: SparkSession, config: Config, entity: str, *, cluster: bool | None = None
) -> Compaction:
    """Merge the small files of an archive; readers and appends continue meanwhile.

    Small files are packed to ``archive.file_mib``. ``cluster`` orders the whole table by key, so
    that one key's history is in few files; ``None`` does so when the table has doubled since the
    last time, which bounds the work to a few rewrites of each byte. Files older than seven days
    that no version needs are deleted. The commits have no position: concurrent appends keep
    theirs. Raises NoArchive, ArchiveFull, PositionMoved when another
    compaction committed first (nothing changed).
    """
    began = time.monotonic()
    log = ArchiveLog(config, entity)
    if not log.exists():
        raise NoArchive(entity)
    # Any commit may clean up the table's log, so its commits are copied to the ledger first.
    Ledger(config, entity).sync(log)
    reader = ArchiveReader(config, entity)
    before = reader.files()
    bytes_before = sum(file.bytes for file in before)
    if cluster is None:
        cluster = bytes_before >= 2 * _clustered_bytes(log)
    # A session of its own, because the file size and the commit's metadata are session settings.
    session = spark.newSession()
    size = config.archive.file_mib << 20
    settings = {
        "spark.databricks.delta.optimize.maxFileSize": size,
        "spark.databricks.delta.optimize.minFileSize": size * 3 // 4,
        # A look-up then reads one small row group of a file, and not the whole file.
        "spark.databricks.io.skipping.mdc.sortWithinFiles": "true",
        "spark.databricks.io.skipping.mdc.rangeId.max": max(1_000, 16 * bytes_before // size),
        "parquet.block.size": _ROW_GROUP_BYTES,
        "spark.databricks.delta.commitInfo.userMetadata": json.dumps(
            {_NOTE: {"clustered_bytes": bytes_before if cluster else None}}
        ),
    }
    for name, value in settings.items():
        session.conf.set(name, str(value))
    require_sums(reader.path)
    table = f"delta.`{reader.path}`"
    with spark_errors(f"compacting the archive of {entity}"):
        session.sql(f"OPTIMIZE {table}" + (" ZORDER BY (key)" if cluster else ""))
    deleted = delete_unneeded(config, entity)
    after = reader.files()
    return Compaction(
        entity=entity,
        files_before=len(before),
        files_after=len(after),
        bytes=sum(file.bytes for file in after),
        clustered=cluster,
        files_deleted=deleted,
        seconds=time.monotonic() - began,
    )


def _clustered_bytes(log: ArchiveLog) -> int:
    """Size of the table when it was last clustered; 0 when no commit has it any more."""
    sizes = [0]
    for commit in log.commits():
        if commit.operation == "OPTIMIZE" and commit.user_metadata:
            try:
                note = json.loads(commit.user_metadata).get(_NOTE) or {}
            except (ValueError, AttributeError):
                continue
            if note.get("clustered_bytes"):
                sizes.append(int(note["clustered_bytes"]))
    return sizes[-1]
