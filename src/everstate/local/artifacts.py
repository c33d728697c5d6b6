"""What the stack is made of: the lock of jars and archives, and the cache they are kept in."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from everstate.config import Config
from everstate.errors import LocalStackError
from everstate.local.fetch import fetch
from everstate.local.progress import Progress, Silent

_MACHINES = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64v8", "arm64": "arm64v8"}


@dataclass(frozen=True, slots=True)
class Artifact:
    """One file of the lock: its path in a Maven repository, and what it must be."""

    path: str
    sha256: str
    size: int
    """Bytes."""


@cache
def _lock() -> dict[str, Any]:
    text = resources.files("everstate.local").joinpath("stack.lock.json").read_text("utf-8")
    lock: dict[str, Any] = json.loads(text)
    return lock


def kafka_artifacts() -> tuple[Artifact, ...]:
    """The jars of the broker."""
    return tuple(Artifact(**entry) for entry in _lock()["kafka"])


def connect_artifacts() -> tuple[Artifact, ...]:
    """The jars that Kafka Connect needs beside the broker's."""
    return tuple(Artifact(**entry) for entry in _lock()["connect"])


def cassandra_artifacts() -> tuple[Artifact, ...]:
    """The jars of Cassandra."""
    return tuple(Artifact(**entry) for entry in _lock()["cassandra"])


def debezium_artifacts() -> tuple[Artifact, ...]:
    """The plugins of Debezium, for PostgreSQL and MariaDB."""
    return tuple(Artifact(**entry) for entry in _lock()["debezium"])


def spark_artifacts() -> tuple[Artifact, ...]:
    """The jars of Spark's Kafka connector and of Delta."""
    return tuple(Artifact(**entry) for entry in _lock()["spark"])


def postgres_artifact() -> Artifact:
    """PostgreSQL's binaries for this machine; LocalStackError where there are none."""
    advice = "Set store.dsn in everstate.toml to a server of your own."
    return _for_this_machine("postgres", "PostgreSQL", advice)


def mariadb_artifact() -> Artifact:
    """MariaDB's binaries for this machine; LocalStackError where there are none."""
    return _for_this_machine("mariadb", "MariaDB", "Use a server of your own.")


def _for_this_machine(group: str, what: str, advice: str) -> Artifact:
    name = f"{sys.platform}-{_MACHINES.get(platform.machine().lower(), platform.machine())}"
    entry = _lock()[group].get(name)
    if entry is None:
        raise LocalStackError(f"no {what} binaries are locked for {name}.", advice=advice)
    return Artifact(**entry)


def cache_dir(config: Config) -> Path:
    """Where fetched files are kept, shared by the projects of a user."""
    if config.local.cache_dir is not None:
        return config.local.cache_dir.expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "everstate"


def cached(config: Config, artifact: Artifact) -> Path:
    """Where ``artifact`` is, or would be, in the cache."""
    return cache_dir(config) / "jars" / artifact.path


def obtain(
    config: Config, artifacts: Iterable[Artifact], progress: Progress | None = None
) -> list[Path]:
    """Paths of ``artifacts`` in the cache, fetching those that are not there.

    Offline when all are cached. Cost when cached: one stat a file. Raises LocalStackError when a
    file cannot be had or is not what the lock says.
    """
    wanted = list(artifacts)
    missing = [a for a in wanted if not _is_whole(cached(config, a), a.size)]
    if missing:
        base = (config.local.jars_url or _public_url()).rstrip("/")
        fetch(
            [(f"{base}/{a.path}", cached(config, a), a.sha256, a.size) for a in missing],
            progress or Silent(),
        )
    return [cached(config, a) for a in wanted]


def spark_jars(config: Config, progress: Progress | None = None) -> list[Path]:
    """The jars for ``spark.jars``: Kafka connector and Delta, fetched when not cached."""
    return obtain(config, spark_artifacts(), progress)


def _public_url() -> str:
    """The public Maven repository, of which jgo knows the address (decision 0005)."""
    # Importing jgo takes longer than starting PostgreSQL, and is needed for downloads only.
    from jgo.constants import MAVEN_CENTRAL_URL

    return str(MAVEN_CENTRAL_URL)


def _is_whole(path: Path, size: int) -> bool:
    """A cached file was verified when it was put there; its size tells a later truncation."""
    try:
        return path.stat().st_size == size
    except OSError:
        return False
