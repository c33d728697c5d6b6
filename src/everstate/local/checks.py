"""Look at this machine: does it have what the local stack and Spark need?"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from everstate.config import Config
from everstate.errors import LocalStackError
from everstate.local.artifacts import (
    Artifact,
    cache_dir,
    cached,
    cassandra_artifacts,
    kafka_artifacts,
    postgres_artifact,
    spark_artifacts,
)
from everstate.local.cassandra import cassandra_java
from everstate.local.jvm import find_jvm
from everstate.local.processes import free_port
from everstate.local.stack import Stack
from everstate.local.unprivileged import namespaces_work

_FREE_BYTES_MIN = 2_000_000_000
_MEMORY_BYTES_MIN = 4_000_000_000


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at."""

    name: str
    outcome: Literal["ok", "warn", "fail"]
    found: str
    mend: str | None = None
    """The step that mends it; None when there is nothing to mend."""


def machine_checks(config: Config) -> list[Check]:
    """Python, Java, root, memory, disk, ports and cache; takes about a second."""
    return [
        _python(),
        _java(config),
        _root(),
        _memory(),
        _disk("data folder", config.project.data_dir),
        *_closed(config.project.data_dir),
        _disk("cache folder", cache_dir(config)),
        _ports(),
        _cache(config),
    ]


def stack_checks(config: Config) -> list[Check]:
    """The servers of the project; asks each one that runs (at most 3 s each)."""
    stack = Stack(config)
    if not stack.names:
        return [Check("stack", "ok", "all addresses are configured: nothing to start")]
    checks = []
    for server in stack.status():
        found = f"{server.state} on {server.address}" if server.address else server.state
        if server.state == "running":
            checks.append(Check(server.name, "ok", found))
        elif server.state == "stopped":
            checks.append(Check(server.name, "warn", found, "everstate up"))
        else:
            mend = f"look at {server.log}, then everstate up"
            checks.append(Check(server.name, "fail", found, mend))
    return checks


def _python() -> Check:
    version = ".".join(str(part) for part in sys.version_info[:3])
    return Check("python", "ok", f"{version} ({sys.executable})")


def _starts_cassandra(config: Config) -> bool:
    return config.cassandra.local and not config.cassandra.contact_points


def _java(config: Config) -> Check:
    try:
        jvm = cassandra_java() if _starts_cassandra(config) else find_jvm()
    except LocalStackError as error:
        return Check("java", "fail", error.message, error.advice)
    return Check("java", "ok", f"{jvm.version} from {jvm.source} ({jvm.home})")


def _root() -> Check:
    if os.geteuid() != 0:
        return Check("user", "ok", f"uid {os.geteuid()}")
    if namespaces_work():
        return Check("user", "ok", "root; PostgreSQL runs in a user namespace")
    if shutil.which("setpriv"):
        return Check("user", "ok", "root; PostgreSQL runs as nobody")
    return Check(
        "user",
        "fail",
        "root, without unshare and setpriv",
        "run as another user, or set store.dsn to a server of your own",
    )


def _memory() -> Check:
    free = psutil.virtual_memory().available
    found = f"{free / 1e9:.1f} GB available"
    if free >= _MEMORY_BYTES_MIN:
        return Check("memory", "ok", found)
    return Check("memory", "warn", found, "lower pipeline.driver_memory in everstate.toml")


def _disk(name: str, folder: Path) -> Check:
    there = folder
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    found = f"{folder}: {free / 1e9:.1f} GB free"
    if not os.access(there, os.W_OK):
        return Check(name, "fail", f"{found}, not writable", f"give yourself rights on {there}")
    if free < _FREE_BYTES_MIN:
        return Check(
            name, "warn", found, "make room, or move it (project.data_dir, local.cache_dir)"
        )
    return Check(name, "ok", found)


def _closed(folder: Path) -> list[Check]:
    """Whether others on this machine can read the data; nothing while there is none."""
    if not folder.exists() or not folder.stat().st_mode & 0o077:
        return []
    found = f"{folder}: others on this machine may read it"
    return [Check("data folder", "warn", found, f"chmod 700 {folder}")]


def _ports() -> Check:
    port = free_port(set())
    return Check("ports", "ok", f"loopback ports can be bound (tried {port})")


def _cache(config: Config) -> Check:
    wanted: list[Artifact] = [*kafka_artifacts(), *spark_artifacts()]
    if _starts_cassandra(config):
        wanted.extend(cassandra_artifacts())
    try:
        wanted.append(postgres_artifact())
    except LocalStackError as error:
        return Check("cache", "fail", error.message, error.advice)
    missing = [artifact for artifact in wanted if not cached(config, artifact).exists()]
    if missing:
        size = sum(artifact.size for artifact in missing)
        found = f"{len(missing)} of {len(wanted)} files not cached ({size / 1e6:.0f} MB)"
        return Check("cache", "warn", found, "everstate up fetches them; needs the network once")
    return Check("cache", "ok", f"{len(wanted)} files: works offline")
