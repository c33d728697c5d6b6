"""Files of servers: archives unpacked once per user, passwords, paths that Java can read."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from everstate.errors import LocalStackError
from everstate.private import write_private


def unpacked(home: Path, unpack: Callable[[Path], None]) -> Path:
    """``home``, which ``unpack`` fills if it does not exist; two processes may do so at once."""
    if home.exists():
        return home
    home.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=home.parent))
    try:
        unpack(folder)
        folder.chmod(0o755)
        try:
            os.rename(folder, home)
        except OSError:
            # Another process may have been faster; its copy is equal.
            if not home.exists():
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return home


@contextmanager
def created(folder: Path) -> Iterator[Path]:
    """A folder to be filled, which then gets the name ``folder``: a kill leaves no partial one."""
    new = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(mode=0o700)
    yield new
    os.rename(new, folder)


def fill(command: Sequence[str], env: Mapping[str, str], server: str, folder: Path) -> None:
    """Run a program that makes a server's data in its folder; raises LocalStackError."""
    done = subprocess.run(
        command, env=dict(env), cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise LocalStackError(
            f"{server}'s data folder cannot be created: {(done.stdout + done.stderr).strip()}",
            advice=f"Look at {folder}; `everstate doctor` checks Java, disk and rights.",
        )


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Raise LocalStackError for an OSError of the block, which writes files in ``place``."""
    try:
        yield
    except OSError as cause:
        raise LocalStackError(
            f"the local stack cannot use {cause.filename or place}: {cause.strerror or cause}.",
            advice="`everstate doctor` checks disk and rights. Run the command again afterwards.",
        ) from cause


def make_password(file: Path) -> None:
    """Write a random password, unless the file has one; a full disk may have left it empty."""
    if not file.exists() or not file.read_text("utf-8").strip():
        write_private(file, secrets.token_urlsafe(24) + "\n")


def listed(path: Path, setting: str) -> str:
    """A path as the single entry of a list in a Java server's settings.

    Raises LocalStackError for a path that such a list cannot have: the server would split it, and
    work in another folder.
    """
    text = str(path)
    if "," in text:
        raise LocalStackError(
            f"the path {text} has a comma, at which Kafka splits a list of folders.",
            advice=f"Move the folder, or set {setting} to a path without a comma.",
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise LocalStackError(
            f"the path {text!r} is not UTF-8, and Java cannot open it.",
            advice=f"Rename the folder, or set {setting} to a path in UTF-8.",
        ) from None
    return text
