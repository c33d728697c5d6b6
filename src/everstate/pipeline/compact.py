"""Compaction: few large files instead of many small ones, clustered by key; nothing changes."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Final

from pyspark.sql import SparkSession

from everstate.archive import ArchiveLog, ArchiveReader, Ledger, table_path
from everstate.archive.upkeep import delete_unneeded
from everstate.config import Config
from everstate.errors import ArchiveError
from everstate.pipeline.session import spark_errors

_NOTE: Final = "everstate_compaction"


@dataclass(frozen=True, slots=True)
class Compaction:
    """What a compaction did."""

    entity: str
    files_before: int
    files_after: int
    bytes: int
    clustered: bool
    """Whether all files were written anew, ordered by key."""
    files_deleted: int
    """Files of older versions that nobody needs any more, deleted after seven days."""
    seconds: float


def compact(
    spark: SparkSession, config: Config, entity: str, *, cluster: bool | None = None
) -> Compaction:
    """Write the small files of an archive together; readers and appends go on meanwhile.

    Small files are packed to ``archive.file_mib``. ``cluster`` orders the whole table by key, so
    that one key's history is in few files; ``None`` does so when the table has doubled since the
    last time, which bounds the work to a few rewrites of each byte. Files older than seven days
    that no version needs are deleted. The commits carry no position: appends beside them keep
    theirs. Raises ArchiveError without an archive, ArchiveFull, PositionMoved when another
    compaction came first (nothing changed).
    """
    began = time.monotonic()
    log = ArchiveLog(config, entity)
    if not log.exists():
        raise ArchiveError(
            f"archive of {entity}: there is none yet.", advice="Start one with `everstate run`."
        )
    # The table's log may be cleaned by any commit; what it knows goes to the ledger first.
    Ledger(config, entity).sync(log)
    reader = ArchiveReader(config, entity)
    before = reader.counts()
    if cluster is None:
        cluster = before.bytes >= 2 * _clustered_bytes(log)
    # A session of its own, because the file size and the commit's note are session settings.
    session = spark.newSession()
    size = config.archive.file_mib << 20
    settings = {
        "spark.databricks.delta.optimize.maxFileSize": size,
        "spark.databricks.delta.optimize.minFileSize": size * 3 // 4,
        "spark.databricks.delta.commitInfo.userMetadata": json.dumps(
            {_NOTE: {"clustered_bytes": before.bytes if cluster else None}}
        ),
    }
    for name, value in settings.items():
        session.conf.set(name, str(value))
    table = f"delta.`{table_path(config, entity)}`"
    with spark_errors(f"compacting the archive of {entity}"):
        session.sql(f"OPTIMIZE {table}" + (" ZORDER BY (key)" if cluster else ""))
    deleted = delete_unneeded(config, entity)
    after = reader.counts()
    return Compaction(
        entity=entity,
        files_before=before.files,
        files_after=after.files,
        bytes=after.bytes,
        clustered=cluster,
        files_deleted=deleted,
        seconds=time.monotonic() - began,
    )


def _clustered_bytes(log: ArchiveLog) -> int:
    """Size of the table when it was last clustered; 0 when nobody remembers."""
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
