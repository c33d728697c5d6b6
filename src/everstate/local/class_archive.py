"""Class-data archives of the JVMs: eight seconds off a start of Spark, one off that of a server.

The first JVM of a kind on a machine writes down the classes that it loaded, when it exits; the
next ones map that file instead of reading, checking and linking ten thousand classes again. The
JVM checks by itself that the file fits (its own build, the jars and their times), and does
without it when not. Source: JEP 350.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Final

from everstate.config import Config
from everstate.local.artifacts import cache_dir
from everstate.local.jvm import Jvm, find_jvm

_KEPT: Final = 3
"""Archives of as many installations of a kind stay in the cache, 50 to 200 MB each."""


def class_archive_options(
    config: Config, kind: str, jars: Sequence[str], *, writes: bool = True
) -> tuple[str, ...]:
    """Options for a JVM that has ``jars`` in its class path: use its kind's archive, or write it.

    None for a runtime without the archive of its own classes, on which ours would build. A helper
    that loads few of the classes (``writes=False``) uses an archive and never writes it.
    """
    jvm = find_jvm()
    if not (jvm.home / "lib" / "server" / "classes.jsa").exists():
        return ()
    archive = _place(cache_dir(config) / "classes", kind, jvm, jars)
    # The JVM says so on stdout when a file does not fit; that is no news for anybody.
    quiet = "-Xlog:disable", "-Xlog:all=error:stderr"
    if _is_complete(archive):
        return (f"-XX:SharedArchiveFile={archive}", *quiet)
    if not writes:
        return ()
    archive.parent.mkdir(parents=True, exist_ok=True)
    _forget_old(archive.parent, kind)
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
    """Whether the JVM that wrote it came to the end: the header, at the start, is written last."""
    try:
        with archive.open("rb") as file:
            return any(file.read(4))
    except FileNotFoundError:
        return False


def _forget_old(folder: Path, kind: str) -> None:
    """Make room for one more: archives of installations that are gone have no other end."""
    archives = folder.glob(f"{kind}-*.jsa")
    known = sorted(archives, key=lambda path: path.stat().st_mtime, reverse=True)
    for archive in known[_KEPT - 1 :]:
        archive.unlink(missing_ok=True)
