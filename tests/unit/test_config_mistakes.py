"""What is wrong in a project's folder or settings is told in a sentence: where, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstate.cli.console import AppSession
from everstate.config import load
from everstate.errors import EverstateError, InvalidConfig, InvalidProject, UnknownSetting


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
            "[log.entities.guest]\npartition = 12",
            "everstate.toml:2: there is no setting log.entities.guest.partition.",
            "Did you mean log.entities.guest.partitions?",
        ),
        (
            "[log.entities.guest]\npartitions = 0",
            "everstate.toml:2: log.entities.guest.partitions is 0; expected greater than",
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


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("EVERSTATE_STOER_DSN", "EVERSTATE_STORE_DSN"),
        ("EVERSTATE_METRIC_PORT", "EVERSTATE_METRICS_PORT"),
        ("everstate_logs_prefix", "EVERSTATE_LOG_PREFIX"),
        ("EVERSTATE_STOER", "EVERSTATE_STORE"),
    ],
)
def test_a_variable_with_a_mistyped_section_is_refused_without_its_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, meant: str
) -> None:
    monkeypatch.setenv(variable, "s3cret")
    with pytest.raises(UnknownSetting) as raised:
        load(tmp_path)
    assert raised.value.message.startswith(f"{variable}: there is no section [")
    assert raised.value.advice == f"Did you mean {meant}?"
    assert "s3cret" not in str(raised.value)


def test_a_variable_of_another_program_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes sets the first ones in each pod when there is a Service `everstate`."""
    for name in ("SERVICE_HOST", "SERVICE_PORT_HTTP", "PORT", "PORT_80_TCP_ADDR", "BENCH_DATA"):
        monkeypatch.setenv(f"EVERSTATE_{name}", "tcp://10.0.0.1:80")
    monkeypatch.setenv("EVERSTATES_STOER_DSN", "x")
    assert load(tmp_path).api.port == 8080


def test_paths_are_relative_to_the_folder_of_the_settings_and_begin_at_home_with_a_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir("/")
    text = "[project]\ndata_dir = '{0}d'\n[archive]\npath = '{0}a'\n[commands]\nstate_path = '{0}c'"
    (tmp_path / "everstate.toml").write_text(text.format("~/"))
    at_home = load(tmp_path)
    assert at_home.project.data_dir == home / "d"
    assert (at_home.archive_path, at_home.commands_path) == (str(home / "a"), home / "c")
    (tmp_path / "everstate.toml").write_text(text.format(""))
    beside = load(tmp_path)
    assert beside.project.data_dir == tmp_path / "d"
    assert (beside.archive_path, beside.commands_path) == (f"{tmp_path}/a", tmp_path / "c")
    assert load(tmp_path, archive={"path": "s3://lake/~x"}).archive_path == "s3://lake/~x"
    with pytest.raises(InvalidConfig, match=r"^commands\.state_path "):
        load(tmp_path, commands={"state_path": "~nobody-of-that-name/c"})


def test_an_entity_type_has_the_values_of_its_own_and_else_those_of_the_log(tmp_path: Path) -> None:
    (tmp_path / "everstate.toml").write_text(
        "[log]\nreplication = 3\npartitions = 8\n[log.entities.guest]\npartitions = 12\n"
        "changes_retention_hours = 240\n"
    )
    log = load(tmp_path).log
    own, other = log.of("guest"), log.of("room")
    assert (own.partitions, own.changes_retention_hours, own.replication) == (12, 240, 3)
    assert (other.partitions, other.changes_retention_hours, other.replication) == (8, 72, 3)


def test_settings_of_an_entity_type_that_the_app_does_not_have_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mistyped_app.py").write_text(
        "from pydantic import BaseModel\nfrom everstate import App\napp = App('hotel')\n"
        "@app.entity('guest', key='id')\nclass Guest(BaseModel):\n    id: str\n"
    )
    (tmp_path / "everstate.toml").write_text("[log.entities.gest]\npartitions = 12\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidConfig) as raised:
        AppSession(tmp_path, "mistyped_app:app").connected()
    expected = "log.entities is 'gest'; expected an entity type of the app: guest."
    assert raised.value.message.endswith(expected)
