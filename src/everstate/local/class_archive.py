"""Class-data archives (CDS) of JVMs: a start of Spark takes eight seconds less, of a server one.

The first JVM of a kind on a machine writes the classes that it loaded to a file when it exits; the
next ones map that file instead of loading, verifying and linking ten thousand classes again. The
JVM itself checks that the file matches (its own build, the jars and their times), and ignores it
otherwise. Source: JEP 350.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Final

from everstate.config import Config
from everstate.local.artifacts import cache_dir
from everstate.local.jvm import Jvm, find_jvm

_KEPT: Final = 3
"""Number of archives of each kind that stay in the cache, 50 to 200 MB each."""


def class_archive_options(
    config: Config, kind: str, jars: Sequence[str], *, writes: bool = True
) -> tuple[str, ...]:
    """Options for a JVM that has ``jars`` in its class path: use its kind's archive, or write it.

    No options for a runtime without the default CDS archive, which this one extends. A helper that
    loads few of the classes (``writes=False``) uses an archive and never writes it. Nobody does
    where the cache cannot be written.
    """
    jvm = find_jvm()
    if not (jvm.home / "lib" / "server" / "classes.jsa").exists():
        return ()
    archive = _place(cache_dir(config) / "classes", kind, jvm, jars)
    # Do not log to stdout that a file does not match: it is no problem.
    quiet = "-Xlog:disable", "-Xlog:all=error:stderr"
    if _is_complete(archive):
        return (f"-XX:SharedArchiveFile={archive}", *quiet)
    if not writes:
        return ()
    try:
        archive.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(archive.parent, os.W_OK):
            return ()  # the cache of an image, which is read-only
        _forget_old(archive.parent, kind)
    except OSError:
        return ()
    return (f"-XX:ArchiveClassesAtExit={archive}", *quiet)


def _place(folder: Path, kind: str, jvm: Jvm, jars: Sequence[str]) -> Path:
    """One file for each JVM and each class path, with the times of its jars."""
    digest = blake2b(digest_size=10)
    for part in (str(jvm.home), jvm.version, *jars):
        digest.update(f"{part}\n".encode())
        if part in jars:
            found = Path(part).stat()
            digest.update(f"{found.st_size} {found.st_mtime_ns}\n".encode())
    return folder / f"{kind}-{digest.hexdigest()}.jsa"


def _is_complete(archive: Path) -> bool:
    """Whether the archive is complete: the header, at the start, is written last."""
    try:
        with archive.open("rb") as file:
            return any(file.read(4))
    except OSError:
        return False


def _forget_old(folder: Path, kind: str) -> None:
    """Delete the oldest archives to make room for one more; nothing else deletes them."""
    archives = folder.glob(f"{kind}-*.jsa")
    known = sorted(archives, key=lambda path: path.stat().st_mtime, reverse=True)
    for archive in known[_KEPT - 1 :]:
        archive.unlink(missing_ok=True)
