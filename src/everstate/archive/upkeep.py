"""Deletes files that no version of the last days needs."""

from __future__ import annotations

from typing import Final

from deltalake import PostCommitHookProperties

from everstate.archive.layout import archive_errors, table_path
from everstate.archive.sums import COMMITS, summed, table_of
from everstate.config import Config

KEPT_HOURS: Final = 168
"""Longer than the longest rebuild (C26); the table's properties have the same value."""


def delete_unneeded(config: Config, entity: str) -> int:
    """Delete files that compaction replaced, or a failed append left, more than seven days ago.

    Returns how many. Cost: a listing of the table's folder; no commit if nothing is deleted.
    """
    with archive_errors(f"cleaning the archive of {entity}"):
        table = table_of(table_path(config, entity))
        if not table.vacuum(KEPT_HOURS, dry_run=True, full=True):
            return 0
        with summed(table.table_uri, COMMITS):
            deleted = table.vacuum(
                KEPT_HOURS,
                dry_run=False,
                full=True,
                # Spark writes checkpoints and cleans the log, after the ledger is filled.
                post_commithook_properties=PostCommitHookProperties(
                    create_checkpoint=False, cleanup_expired_logs=False
                ),
            )
        return len(deleted)
