"""Modules are compiled before the tests run, also where the environment says that none is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from warming import warm_modules


def test_what_tests_import_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    (tmp_path / "shop.py").write_text("PRICE = 3\n")
    (tmp_path / "test_shop.py").write_text("import shop\n\ndef test_it(): assert shop.PRICE\n")
    warm_modules(tmp_path)
    compiled = sorted(path.name.partition(".")[0] for path in tmp_path.rglob("*.pyc"))
    assert compiled == ["shop", "test_shop"]
