"""Files of the local stack: the lock file of jars and archives, and the cache for them."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from everstate.config import Config
from everstate.errors import HIDDEN, InvalidConfig, LocalStackError
from everstate.local.fetch import digest_of, fetch
from everstate.local.progress import SILENT, StackProgress
from everstate.private import write_private

_MACHINES = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64v8", "arm64": "arm64v8"}


@dataclass(frozen=True, slots=True)
class Artifact:
    """One file of the lock: its path in a Maven repository, its hash and its size."""

    path: str
    sha256: str
    size: int
    """Bytes."""


@cache
def _lock() -> dict[str, Any]:
    text = resources.files("everstate.local").joinpath("stack.lock.json").read_text("utf-8")
    lock: dict[str, Any] = json.loads(text)
    return lock


def artifacts_of(group: str) -> tuple[Artifact, ...]:
    """The files of `kafka`, `cassandra`, `spark` (Kafka's connector, Delta), `s3` or `debezium`.

    `connect`: the jars that it needs beside the broker's.
    """
    return tuple(Artifact(**entry) for entry in _lock()[group])


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
        raise LocalStackError(f"the lock file has no {what} binaries for {name}.", advice=advice)
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
    config: Config, artifacts: Iterable[Artifact], progress: StackProgress | None = None
) -> list[Path]:
    """Paths of ``artifacts`` in the cache; missing ones are fetched.

    Works offline when all are cached. Cost when cached: one stat for each file; a file that is new
    or was changed is read and compared once. Raises LocalStackError when a file cannot be fetched
    or does not match the lock.
    """
    wanted = list(artifacts)
    checked = _Checked(cache_dir(config) / "jars" / "checked.json")
    missing = [a for a in wanted if not checked.is_whole(cached(config, a), a)]
    if missing:
        base = _base_url(config)
        fetch(
            [(f"{base}/{a.path}", cached(config, a), a.sha256, a.size) for a in missing],
            progress or SILENT,
        )
        for artifact in missing:
            checked.is_whole(cached(config, artifact), artifact)
    checked.keep()
    return [cached(config, a) for a in wanted]


def spark_jars(config: Config, progress: StackProgress | None = None) -> list[Path]:
    """The jars for ``spark.jars``: Kafka connector and Delta, fetched when not cached."""
    return obtain(config, artifacts_of("spark"), progress)


def s3_jars(config: Config) -> list[Path]:
    """The jars for a lake on S3: Hadoop's client, and Amazon's parts that it needs."""
    return obtain(config, artifacts_of("s3"))


def _base_url(config: Config) -> str:
    """The repository's address; raises InvalidConfig for one whose login cannot be told apart."""
    url = config.local.jars_url
    if url is None:
        # Imported here: jgo, which has the address of the public repository (decision 0005), takes
        # longer than starting PostgreSQL, and is needed for downloads only.
        from jgo.constants import MAVEN_CENTRAL_URL

        return str(MAVEN_CENTRAL_URL).rstrip("/")
    try:
        parts = urlsplit(url)
        is_misread = "@" in parts.path + parts.query + parts.fragment
    except ValueError:
        is_misread = True
    if is_misread:
        raise InvalidConfig(
            "local.jars_url",
            HIDDEN,
            "https://host/path, or https://user:password@host/path with %2F for /, %3F for ?, "
            "%23 for # and %5B for [ in the password",
        ) from None
    return url.rstrip("/")


class _Checked:
    """Records which files of the cache were compared with the lock, and their status then.

    A file that was changed since has another ctime, which only the system sets.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._new: dict[str, str] = {}
        self._known = self._read()

    def is_whole(self, path: Path, artifact: Artifact) -> bool:
        """Whether a file matches the lock; it is read only if its status has changed."""
        try:
            found = path.stat()
            if found.st_size != artifact.size:
                return False
            look = f"{found.st_size} {found.st_ctime_ns} {artifact.sha256}"
            if self._known.get(artifact.path) != look:
                if digest_of(path) != artifact.sha256:
                    return False
                self._known[artifact.path] = self._new[artifact.path] = look
        except OSError:
            return False
        return True

    def keep(self) -> None:
        """Save new records; if the cache cannot be written, files are read again next time."""
        if self._new:
            with suppress(OSError):
                write_private(self._file, json.dumps({**self._read(), **self._new}))

    def _read(self) -> dict[str, str]:
        try:
            known = json.loads(self._file.read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return dict(known) if isinstance(known, dict) else {}
