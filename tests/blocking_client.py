"""Writes the blocking client from the one for asyncio, so that only one of them is edited.

``python tests/blocking_client.py`` writes ``client/blocking.py``; ``test_blocking_client`` fails
while the file is another one. The idea is that of httpcore's and psycopg's sources.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

CLIENT: Final = Path(__file__).parents[1] / "src" / "everstate" / "client"
BLOCKING: Final = CLIENT / "blocking.py"
_NOTE: Final = "# Written by tests/blocking_client.py from asynchronous.py: edit that file.\n"
_INSIDE: Final = r"(?:[^()]|\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))*"
"""What may be between two parentheses, with others up to three deep."""
_CHANGES: Final = (
    (r'"""The client for asyncio."""', '"""The blocking client."""'),
    (r"import asyncio\n", "import time\n"),
    (r"asyncio\.sleep", "time.sleep"),
    (rf"(?<!\w)\(await ({_INSIDE})\)", r"\1"),
    (r"async for (\w+) in (.+):\n +yield \1\n", r"yield from \2\n"),
    (r"    for (\w+) in (page\.rows|page\[\"items\"\]):\n +yield \1\n", r"    yield from \2\n"),
    (r"\b(?:async|await) ", ""),
    (r"\bAsync(Client|Iterator)\b", r"\1"),
    (r"__aenter__", "__enter__"),
    (r"__aexit__", "__exit__"),
    (r"\.(?:aclose|aread|aiter_bytes)\b", lambda found: "." + found[0][2:]),
)


def blocking(asynchronous: str) -> str:
    """The text of the blocking client, formatted."""
    for pattern, replacement in _CHANGES:
        asynchronous = re.sub(pattern, replacement, asynchronous)
    head, _, rest = asynchronous.partition("\n")
    return subprocess.run(
        [sys.executable, "-m", "ruff", "format", "-"],
        input=f"{head}\n{_NOTE}{rest}",
        capture_output=True,
        text=True,
        check=True,
        cwd=CLIENT,
    ).stdout


if __name__ == "__main__":
    BLOCKING.write_text(blocking((CLIENT / "asynchronous.py").read_text("utf-8")), "utf-8")
