"""What `everstate doctor` says of the folders of a machine."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from everstate.local import disk_check


def test_a_folder_on_a_disk_that_is_nearly_full_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def usage(folder: Path) -> SimpleNamespace:
        asked.append(folder)
        return SimpleNamespace(free=1_999_999_999)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    full = disk_check("archive", tmp_path / "not" / "made" / "yet")
    assert (full.outcome, asked) == ("warn", [tmp_path])
    assert "2.0 GB free" in full.found
    assert full.advice is not None
    assert "free disk space" in full.advice
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2_000_000_000))
    assert disk_check("archive", tmp_path).outcome == "ok"
