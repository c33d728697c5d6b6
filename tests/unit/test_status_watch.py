"""`everstate status --watch` ends at Ctrl-C with the exit code of the last whole status."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from everstate.cli import cli


@pytest.mark.parametrize(("code", "shown"), [(0, 1), (6, 1), (1, 3)])
def test_ctrl_c_while_a_status_is_made_ends_with_the_code_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, shown: int
) -> None:
    codes: Iterator[int] = iter([code] * shown)

    def show(*_: object, **__: object) -> int:
        found = next(codes, None)
        if found is None:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr("everstate.cli.status._show", show)
    monkeypatch.setattr("everstate.cli.status._WATCH_S", 0.0)
    ended = CliRunner().invoke(cli, ["-C", str(tmp_path), "status", "--watch"])
    assert ended.exit_code == code
