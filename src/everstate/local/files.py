"""Files of servers: archives unpacked once per user."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


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
