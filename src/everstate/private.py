"""Files and folders that no other user of the machine may read."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path


def private_folder(folder: Path) -> Path:
    """Create a folder and its missing parents, accessible only to the current user.

    A project's data folder has the states of its entities, logs and passwords. An existing folder
    keeps its mode.
    """
    if not folder.is_dir():
        private_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def write_private(path: Path, text: str) -> None:
    """Write a file atomically, in UTF-8, that only the current user may read."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def properties(settings: Mapping[str, str]) -> str:
    """Settings in the format of a Java properties file, all in ASCII.

    Java reads such a file as ISO-8859-1 unless a program chooses another encoding.
    """
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
    return "".join(each if " " <= each <= "~" else _units(each) for each in text)


def _units(character: str) -> str:
    r"""A character as ``\uXXXX``, or two of them: Java's characters have 16 bits."""
    units = struct.iter_unpack(">H", character.encode("utf-16-be"))
    return "".join(f"\\u{unit:04x}" for (unit,) in units)
