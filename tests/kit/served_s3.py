"""An object store for tests, whose buckets are folders, and the lakes of tests."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import pytest
from pyarrow.fs import S3FileSystem

from everstate.config import Config, load
from everstate.local import Stack
from everstate.sections import LOCAL_S3_KEY, S3Config

KEYS = {"AWS_ACCESS_KEY_ID": LOCAL_S3_KEY, "AWS_SECRET_ACCESS_KEY": LOCAL_S3_KEY}
"""The keys of the object store as its users have them: in the environment."""
BUCKET = "lake"
_LAKES = ("disk", "s3")

each_lake = pytest.mark.parametrize("lake", _LAKES, indirect=True)
"""Runs a test with a lake on disk and with one on S3."""
each_lake_in_full = pytest.mark.parametrize(
    "lake", ["disk", pytest.param("s3", marks=pytest.mark.full)], indirect=True
)
"""The same; with the one on S3 in the full tier only."""


@dataclass(frozen=True)
class LakeOfTest:
    """Where a test's lake is: its settings, for `altered`, and the folder of its files."""

    settings: dict[str, Any]
    folder: Path


class ServedS3:
    """The object store of a local stack."""

    name = "s3"

    def __init__(self, servers: Stack, config: Config) -> None:
        self.servers, self.config = servers, config
        self.data = config.project.data_dir / self.name / "data"
        self.port = urlsplit(config.archive.s3.endpoint or "").port or 0

    @classmethod
    @contextmanager
    def alone(cls, folder: Path) -> Iterator[Self]:
        """A local stack of the object store alone."""
        given = load(
            folder,
            log={"bootstrap_servers": "elsewhere:1"},
            store={"dsn": "host=elsewhere"},
            archive={"path": f"s3://{BUCKET}", "s3": {"local": True}},
        )
        with Stack(given) as servers:
            yield cls(servers, servers.resolve())

    def lake(self) -> LakeOfTest:
        """A lake that no other test has."""
        prefix = uuid.uuid4().hex
        path = f"s3://{BUCKET}/{prefix}"
        return LakeOfTest({**self.section(), "path": path}, self.data / BUCKET / prefix)

    def section(self, **changed: Any) -> dict[str, Any]:
        """`[archive.s3]` as a user has it for a server of their own, with keys elsewhere."""
        own = S3Config(endpoint=address(self.port), path_style=True)
        return {"s3": own.model_copy(update=changed)}

    def files(self) -> S3FileSystem:
        """Its buckets as another client of S3 has them."""
        key = LOCAL_S3_KEY
        return S3FileSystem(
            access_key=key, secret_key=key, endpoint_override=address(self.port), region="us-east-1"
        )

    def start(self) -> None:
        self.servers.revive([self.name])

    def kill(self) -> None:
        self.servers.kill(self.name)


def address(port: int) -> str:
    """The endpoint on this machine."""
    return f"http://127.0.0.1:{port}"
