"""A real browser for tests: Debian's Chromium."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Browser, sync_playwright

CHROMIUM: Final = Path("/usr/bin/chromium")
OPTIONS: Final = (
    *(
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-sync",
        "--disable-breakpad",
    ),
    *("--disable-component-update", "--no-first-run", "--disable-crash-reporter"),
)


@pytest.fixture
def browser() -> Iterator[Browser]:
    """Debian's Chromium, new for each test; in CI its absence is a failure."""
    if not CHROMIUM.exists() and not os.environ.get("CI"):
        pytest.skip(f"{CHROMIUM} is not installed: apt-get install chromium")
    with sync_playwright() as player:
        made = player.chromium.launch(executable_path=CHROMIUM, args=[*OPTIONS])
        yield made
        made.close()
