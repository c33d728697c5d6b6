"""Makes the pages of the repository into pages of the site."""

from __future__ import annotations

import re
from typing import Any

_FILE = re.compile(r"^```(\S*)[^\n]*?\bfile=(\S+)[^\n]*$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Show the name of a file above its block: ```X file=NAME."""
    return _FILE.sub(r'```\1 title="\2"', markdown)
