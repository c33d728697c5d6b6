"""The page of the migration is done, with writers at work all the while."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.timeout(900)
def test_the_migration_goes_forward_and_back_with_writes_running(
    reader: Any, tmp_path: Path
) -> None:
    for file in (DOCS.parent / "examples" / "migrate").iterdir():
        shutil.copy(file, tmp_path)
    assert reader.follow(DOCS / "howto" / "migrate.md") == 7
    # Some hundred writes were acknowledged while the service moved.
    assert len((tmp_path / "acknowledged.jsonl").read_text("utf-8").splitlines()) > 200
