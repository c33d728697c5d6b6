"""Paths of an archive, and properties of its table on which other programs may rely."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import urlsplit

import pyarrow as pa
from deltalake.exceptions import DeltaError, TableNotFoundError

from everstate.config import Config
from everstate.errors import ArchiveDamaged, ArchiveError, ArchiveFull, ArchiveUnreachable
from everstate.sections import LOCAL_S3_KEY, S3Config

INDEXED_COLUMNS: Final = ("partition", "offset", "key", "recorded_at")
"""First columns of the table; only these have statistics. ``recorded_at`` is null only in
unreadable records, so a file's null count is the number of these, without reading the file."""

TABLE_PROPERTIES: Final = {
    "delta.dataSkippingNumIndexedCols": str(len(INDEXED_COLUMNS)),
    # Positions are in the commits; the ledger copies them long before these are deleted.
    "delta.logRetentionDuration": "interval 30 days",
    "delta.deletedFileRetentionDuration": "interval 7 days",
}


_OF_S3: Final = r"AWS Error|Error performing [A-Z]+ http|Generic S3 error|no credentials found"
"""What Arrow and delta-rs say when the object store does not answer or refuses."""


class LakePath(str):
    """Folder or URL of a table of the lake, and how it is opened when it is on S3.

    A text to everybody else, without the options: they may have a key, and are never shown.
    """

    __slots__ = ("files", "options")
    options: dict[str, str] | None
    """What delta-rs takes; ``None`` for a folder."""
    files: dict[str, Any]
    """What Arrow's filesystem for S3 takes."""


def lake_path(config: Config, name: str) -> LakePath:
    """The path of a table by its name below the lake's folder."""
    path = LakePath(f"{config.archive_path.rstrip('/')}/{name}")
    path.options = None
    if path.startswith("s3://"):
        _open_on_s3(path, config.archive.s3, config.s3_endpoint)
    return path


def table_path(config: Config, entity: str) -> LakePath:
    """Folder or URL of an entity type's table."""
    return lake_path(config, entity)


def ledger_path(config: Config, entity: str) -> LakePath:
    """Folder or URL of the ledger of an entity type's archive."""
    return lake_path(config, f"_ledger/{entity}")


def _open_on_s3(path: LakePath, s3: S3Config, endpoint: str | None) -> None:
    path.files = {"region": s3.region, "force_virtual_addressing": not s3.path_style}
    path.options = {
        "aws_region": s3.region,
        "aws_virtual_hosted_style_request": str(not s3.path_style).lower(),
        # A commit is a file that is created only if it is not there: a second one is refused.
        "aws_conditional_put": "etag",
        # Else delta-rs looks into no profile when there is an endpoint.
        "aws_force_credential_load": "true",
        "retry_timeout": "30s",
    }
    if endpoint is not None:
        scheme, _, host = endpoint.rstrip("/").partition("://")
        path.files |= {"endpoint_override": host, "scheme": scheme}
        bucket = "" if s3.path_style else urlsplit(path).netloc + "."
        path.options["aws_endpoint_url"] = f"{scheme}://{bucket}{host}"
        path.options["aws_allow_http"] = str(scheme == "http").lower()
    if s3.local:
        path.files |= {"access_key": LOCAL_S3_KEY, "secret_key": LOCAL_S3_KEY}
        path.options |= {"aws_access_key_id": LOCAL_S3_KEY, "aws_secret_access_key": LOCAL_S3_KEY}


def options_of(path: str) -> dict[str, str] | None:
    """The options of a path, which delta-rs takes; ``None`` for a folder."""
    return path.options if isinstance(path, LakePath) else None


def app_id(entity: str) -> str:
    """Constant writer id of the table's transactions: it fences a second writer (C25)."""
    return f"everstate-archive-{entity}"


@contextmanager
def archive_errors(doing: str) -> Iterator[None]:
    """Translate errors of the lake's reader in the block into ArchiveError."""
    try:
        yield
    except TableNotFoundError as cause:
        raise ArchiveError(
            f"{doing}: there is no archive yet.", advice="Start one with `everstate run`."
        ) from cause
    except (DeltaError, pa.ArrowException, OSError, ValueError) as cause:  # ValueError: no JSON
        plain = re.sub(r"\x1b\[[0-9;]*m", "", str(cause))
        refusal = re.search(r"<Code>(\w+)</Code>", plain)
        reason = re.sub(r"\s+", " ", plain.partition("<?xml")[0]).strip()[:300]
        reason += f" ({refusal[1]})" if refusal else ""
        if "No space left on device" in reason:
            raise ArchiveFull(f"{doing}: the disk is full ({reason}).") from cause
        if "CRC checksum" in reason:
            raise ArchiveDamaged(f"{doing}: a page differs from its sum ({reason}).") from cause
        if re.search(_OF_S3, reason):
            raise ArchiveUnreachable(f"{doing}: {reason}") from cause
        raise ArchiveError(f"{doing}: {reason}") from cause
