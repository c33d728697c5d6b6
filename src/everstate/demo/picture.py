"""A picture of what the demonstration prints, for the README."""

from __future__ import annotations

import re

from rich.console import Console

_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def of_recorded(console: Console) -> str:
    """The recorded lines of a console as an SVG that loads nothing from another server."""
    own_fonts = _FONTS.sub("", console.export_svg(title="everstate demo"))
    return own_fonts.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")
