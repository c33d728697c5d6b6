"""Checks whether this machine has what the local stack and Spark need."""

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
    """Result of one check."""

    name: str
    outcome: Literal["ok", "warn", "fail"]
    found: str
    advice: str | None = None
    """The step that corrects the problem; None when there is none."""


def machine_checks(config: Config) -> list[Check]:
    """Python, Java, root, memory, disk, ports and cache; takes about a second."""
    return [
        _python(),
        _java(config),
        _root(),
        _memory(),
        disk_check("data folder", config.project.data_dir),
        *_closed(config.project.data_dir),
        disk_check("cache folder", cache_dir(config)),
        _ports(),
        _cache(config),
    ]


def stack_checks(config: Config) -> list[Check]:
    """The servers of the project; probes each running one (at most 3 s each)."""
    stack = Stack(config)
    if not stack.names:
        return [
            Check("stack", "ok", "no local server is needed, because all addresses are configured")
        ]
    checks = []
    for server in stack.status():
        found = f"{server.state} on {server.address}" if server.address else server.state
        if server.state == "running":
            checks.append(Check(server.name, "ok", found))
        elif server.state == "stopped":
            checks.append(Check(server.name, "warn", found, "everstate up"))
        else:
            step = f"read {server.log}, then run everstate up"
            checks.append(Check(server.name, "fail", found, step))
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
        return Check("user", "ok", "everstate runs as root; PostgreSQL runs in a user namespace")
    if shutil.which("setpriv"):
        return Check("user", "ok", "everstate runs as root; PostgreSQL runs as the user nobody")
    return Check(
        "user",
        "fail",
        "everstate runs as root, and neither unshare nor setpriv works",
        "run everstate as another user, or set store.dsn to a server of your own",
    )


def _memory() -> Check:
    free = psutil.virtual_memory().available
    found = f"{free / 1e9:.1f} GB available"
    if free >= _MEMORY_BYTES_MIN:
        return Check("memory", "ok", found)
    return Check("memory", "warn", found, "lower pipeline.driver_memory in everstate.toml")


def disk_check(name: str, folder: Path) -> Check:
    """Whether a folder, or the one in which it will be made, is writable and has some room."""
    there = folder
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    found = f"{folder}: {free / 1e9:.1f} GB free"
    if not os.access(there, os.W_OK):
        return Check(
            name,
            "fail",
            f"{found}, and not writable",
            f"give your user write permission on {there}",
        )
    if free < _FREE_BYTES_MIN:
        return Check(
            name,
            "warn",
            found,
            "free disk space, or move the folder (project.data_dir, local.cache_dir)",
        )
    return Check(name, "ok", found)


def _closed(folder: Path) -> list[Check]:
    """Whether other users of this machine can read the data; no check while there is none."""
    if not folder.exists() or not folder.stat().st_mode & 0o077:
        return []
    found = f"{folder}: other users of this machine can read it"
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
        return Check(
            "cache", "warn", found, "everstate up downloads them, which needs the network once"
        )
    return Check(
        "cache", "ok", f"{len(wanted)} files are cached, so that everstate up works offline"
    )
