"""Checks whether this machine has what the local stack and Spark need."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import psutil

from everstate.config import Config
from everstate.errors import LocalStackError
from everstate.findings import Finding
from everstate.local.artifacts import (
    Artifact,
    artifacts_of,
    cache_dir,
    cached,
    postgres_artifact,
)
from everstate.local.cassandra import cassandra_java
from everstate.local.jvm import find_jvm
from everstate.local.processes import free_port
from everstate.local.stack import Stack
from everstate.local.unprivileged import namespaces_work

_FREE_BYTES_MIN = 2_000_000_000
_MEMORY_BYTES_MIN = 4_000_000_000


def machine_checks(config: Config) -> list[Finding]:
    """Python, Java, root, memory, disk, ports and cache; takes about a second."""
    version = ".".join(str(part) for part in sys.version_info[:3])
    return [
        Finding("python", "ok", f"{version} ({sys.executable})"),
        _java(config),
        _root(),
        _memory(),
        disk_check("data folder", config.project.data_dir),
        *_closed(config.project.data_dir),
        disk_check("cache folder", cache_dir(config)),
        Finding("ports", "ok", f"loopback ports can be bound (tried {free_port(set())})"),
        _cache(config),
    ]


def stack_checks(config: Config) -> list[Finding]:
    """The servers of the project; probes each running one (at most 3 s each)."""
    stack = Stack(config)
    if not stack.names:
        return [
            Finding(
                "stack", "ok", "no local server is needed, because all addresses are configured"
            )
        ]
    checks = []
    for server in stack.status():
        found = f"{server.state} on {server.address}" if server.address else server.state
        if server.state == "running":
            checks.append(Finding(server.name, "ok", found))
        elif server.state == "stopped":
            checks.append(Finding(server.name, "warn", found, advice="everstate up"))
        else:
            step = f"read {server.log}, then run everstate up"
            checks.append(Finding(server.name, "fail", found, advice=step))
    return checks


def _starts_cassandra(config: Config) -> bool:
    return config.cassandra.local and not config.cassandra.contact_points


def _java(config: Config) -> Finding:
    try:
        jvm = cassandra_java() if _starts_cassandra(config) else find_jvm()
    except LocalStackError as error:
        return Finding("java", "fail", error.message, advice=error.advice)
    return Finding("java", "ok", f"{jvm.version} from {jvm.source} ({jvm.home})")


def _root() -> Finding:
    if os.geteuid() != 0:
        return Finding("user", "ok", f"uid {os.geteuid()}")
    if namespaces_work():
        return Finding("user", "ok", "everstate runs as root; PostgreSQL runs in a user namespace")
    if shutil.which("setpriv"):
        return Finding("user", "ok", "everstate runs as root; PostgreSQL runs as the user nobody")
    return Finding(
        "user",
        "fail",
        "everstate runs as root, and neither unshare nor setpriv works",
        advice="run everstate as another user, or set store.dsn to a server of your own",
    )


def _memory() -> Finding:
    free = psutil.virtual_memory().available
    found = f"{free / 1e9:.1f} GB available"
    if free >= _MEMORY_BYTES_MIN:
        return Finding("memory", "ok", found)
    return Finding("memory", "warn", found, advice="lower pipeline.driver_memory in everstate.toml")


def disk_check(name: str, folder: Path) -> Finding:
    """Whether a folder, or the one in which it will be made, is writable and has some room."""
    there = folder
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    found = f"{folder}: {free / 1e9:.1f} GB free"
    if not os.access(there, os.W_OK):
        return Finding(
            name,
            "fail",
            f"{found}, and not writable",
            advice=f"give your user write permission on {there}",
        )
    if free < _FREE_BYTES_MIN:
        return Finding(
            name,
            "warn",
            found,
            advice="free disk space, or move the folder (project.data_dir, local.cache_dir)",
        )
    return Finding(name, "ok", found)


def _closed(folder: Path) -> list[Finding]:
    """Whether other users of this machine can read the data; no check while there is none."""
    if not folder.exists() or not folder.stat().st_mode & 0o077:
        return []
    found = f"{folder}: other users of this machine can read it"
    return [Finding("data folder", "warn", found, advice=f"chmod 700 {folder}")]


def _cache(config: Config) -> Finding:
    wanted: list[Artifact] = [*artifacts_of("kafka"), *artifacts_of("spark")]
    if _starts_cassandra(config):
        wanted.extend(artifacts_of("cassandra"))
    if config.has_s3:
        wanted.extend(artifacts_of("s3"))
    try:
        wanted.append(postgres_artifact())
    except LocalStackError as error:
        return Finding("cache", "fail", error.message, advice=error.advice)
    missing = [artifact for artifact in wanted if not cached(config, artifact).exists()]
    if missing:
        size = sum(artifact.size for artifact in missing)
        found = f"{len(missing)} of {len(wanted)} files not cached ({size / 1e6:.0f} MB)"
        return Finding(
            "cache",
            "warn",
            found,
            advice="everstate up downloads them, which needs the network once",
        )
    return Finding(
        "cache", "ok", f"{len(wanted)} files are cached, so that everstate up works offline"
    )
