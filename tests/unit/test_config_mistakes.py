"""What is wrong in a project's folder or settings is told in a sentence: where, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstate.config import load
from everstate.errors import EverstateError, InvalidConfig, InvalidProject


@pytest.mark.parametrize(
    ("toml", "message", "advice"),
    [
        ("[archiv]\ntrigger_s = 2", "everstate.toml:1: there is no section [archiv].", "[archive]"),
        (
            "[archive]\n\ntriger_s = 2",
            "everstate.toml:3: there is no setting archive.triger_s.",
            "Did you mean archive.trigger_s?",
        ),
        ('app = "hotel:app"', "everstate.toml:1: there is no setting app.", "project.app"),
        ("[zzz]\nx = 1", "everstate.toml:1: there is no section [zzz].", "config.md"),
        (
            "[archive]\ntrigger_s = 'two'",
            "everstate.toml:2: archive.trigger_s is 'two'; expected a valid number",
            "Correct it there",
        ),
        (
            "[log]\nlinger_ms = 1\npartitions = 0",
            "everstate.toml:3: log.partitions is 0; expected greater than or equal to 1.",
            "Correct it there",
        ),
        (
            "[views]\non_change = 'reb'",
            "everstate.toml:2: views.on_change is 'reb'; expected 'rebuild' or 'ask'.",
            "Correct it there",
        ),
        (
            "archive = 3",
            "everstate.toml:1: archive has an invalid value; expected a table: [archive]",
            "Correct it there",
        ),
        (
            "[api.tokens.desk]\ntoken = 'a token of some length'",
            "everstate.toml:1: api.tokens.desk has an invalid value; "
            "expected token_hash and permissions instead of token",
            "Correct it there",
        ),
        (
            "[commands]\nremember_hours = 99",
            "everstate.toml:1: commands has an invalid value; "
            "expected remember_hours to be at most retention_hours.",
            "Correct it there",
        ),
        ("[archive\ntrigger_s = 2", "everstate.toml:1: this is not TOML", "Correct"),
        ("[project]\napp = hotel:app", "everstate.toml:2: this is not TOML", "needs quotes"),
    ],
)
def test_a_mistake_in_the_settings_is_told_with_its_line_and_remedy(
    tmp_path: Path, toml: str, message: str, advice: str
) -> None:
    (tmp_path / "everstate.toml").write_text(toml)
    with pytest.raises(EverstateError) as raised:
        load(tmp_path)
    assert raised.value.message.startswith(message)
    assert "\n" not in raised.value.message
    assert advice in (raised.value.advice or "")
    assert raised.value.exit_code == 2


def test_a_mistake_in_the_environment_is_told_with_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTATE_LOG_PARTITIONS", "none")
    (tmp_path / "everstate.toml").write_text("[log]\npartitions = 3")
    with pytest.raises(InvalidConfig) as raised:
        load(tmp_path)
    assert raised.value.message.startswith("EVERSTATE_LOG_PARTITIONS: log.partitions is 'none'")


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidProject, match=r"there is no folder .*nowhere"):
        load(tmp_path / "nowhere")


def test_settings_that_are_not_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "everstate.toml").write_bytes(b"\xff\xfe[project]")
    with pytest.raises(InvalidProject, match=r"everstate\.toml cannot be read"):
        load(tmp_path)
