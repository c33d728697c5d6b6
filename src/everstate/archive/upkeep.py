"""Deletes files that no version of the last days needs, and takes damaged files out of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from urllib.parse import unquote

from deltalake import PostCommitHookProperties
from pyarrow.fs import FileType

from everstate.archive.layout import archive_errors, table_path
from everstate.archive.sums import COMMITS, filesystem_of, summed, sums_name, table_of
from everstate.config import Config
from everstate.errors import ArchiveError

KEPT_HOURS: Final = 168
"""Longer than the longest rebuild (C26); the table's properties have the same value."""
# Spark writes checkpoints and cleans the log, after the ledger is filled.
_HOOKS: Final = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)


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
                KEPT_HOURS, dry_run=False, full=True, post_commithook_properties=_HOOKS
            )
        return len(deleted)


def move_aside(config: Config, entity: str, names: Sequence[str]) -> None:
    """Move files of an archive to the folder `_damaged` of its table, where nobody reads them.

    ``names``: as the table's log has them; those that are gone stay so. Until
    :func:`forget_files`, every reader that needs one of them gets an error.
    """
    with archive_errors(f"moving damaged files of the archive of {entity}"):
        files = filesystem_of(table_path(config, entity))
        for name in (each for path in names for each in (unquote(path), sums_name(unquote(path)))):
            if files.get_file_info(name).type == FileType.File:
                files.move(name, f"_damaged/{name}")


def forget_files(config: Config, entity: str, names: Sequence[str]) -> None:
    """Remove files that are gone from the newest version of an archive's table.

    Raises ArchiveError, and removes nothing, when other files than these are gone.
    """
    with archive_errors(f"repairing the archive of {entity}"):
        table = table_of(table_path(config, entity))
        gone = table.repair(dry_run=True)["files_removed"]
        if {unquote(name) for name in gone} != {unquote(name) for name in names}:
            raise ArchiveError(
                f"the archive of {entity} lacks {', '.join(gone) or 'no file'} now.",
                advice=f"Run `everstate archive repair {entity}` again.",
            )
        with summed(table.table_uri, COMMITS):
            table.repair(post_commithook_properties=_HOOKS)
