"""The demonstration empties its own folder, and never anybody else's."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest
from rich.console import Console

from everstate.demo.run import DemoOptions, run_demo
from everstate.errors import LocalStackError


@pytest.mark.parametrize(
    ("name", "text"),
    [("notes.txt", "mine"), ("everstate.toml", '[project]\napp = "shop:app"\n')],
)
def test_a_folder_that_holds_something_else_is_not_touched(
    tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / ".everstate").mkdir()
    (tmp_path / ".everstate" / "archive").write_text("years of it")
    (tmp_path / name).write_text(text)
    options = DemoOptions(folder=tmp_path, first=date(2013, 2, 1), last=date(2013, 2, 2))
    with pytest.raises(LocalStackError, match="holds something else"):
        run_demo(options, Console())
    assert (tmp_path / name).read_text() == text
    assert (tmp_path / ".everstate" / "archive").read_text() == "years of it"
