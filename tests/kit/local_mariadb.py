"""The address of the MariaDB of a local stack."""

from __future__ import annotations

from pathlib import Path

from everstate.local import Stack


def mariadb_url(stack: Stack, data_dir: Path) -> str:
    """The URL of its administrator, with the password in it."""
    (address,) = (each.address for each in stack.status() if each.name == "mariadb")
    password = (data_dir / "mariadb" / "password").read_text("utf-8").strip()
    return f"mysql://everstate:{password}@{address}/everstate"
