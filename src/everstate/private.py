"""Files and folders that nobody else on the machine may read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def private_folder(folder: Path) -> Path:
    """Make a folder with all that is missing above it; what is made lets nobody else in.

    A project's data folder has the states of its entities, logs and passwords. One that exists
    keeps its mode.
    """
    if not folder.is_dir():
        private_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def write_private(path: Path, text: str) -> None:
    """Write a file that only we may read, whole or not at all."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    os.replace(part, path)


def properties(settings: Mapping[str, str]) -> str:
    """Settings as Java reads them from a properties file."""
    return "".join(f"{_escaped(name)}={_escaped(value)}\n" for name, value in settings.items())


def _escaped(text: str) -> str:
    for character, escaped in (
        ("\\", "\\\\"),
        ("\n", "\\n"),
        ("\r", "\\r"),
        (" ", "\\ "),
        ("=", "\\="),
        (":", "\\:"),
        ("#", "\\#"),
        ("!", "\\!"),
    ):
        text = text.replace(character, escaped)
    return text
