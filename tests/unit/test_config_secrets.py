"""No message about a setting shows a secret, however the setting was mistyped."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_origin

import pytest
from pydantic import BaseModel

from callers import caller_entry
from everstate.config import Config, check_dsn, load
from everstate.errors import EverstateError, InvalidConfig
from everstate.pipeline.spark.session import session_settings
from everstate.sections import MAY_HOLD_SECRET

SECRET = "hunter2hunter2hunter2"
HARMLESS = {
    "project.app",
    "log.bootstrap_servers",
    "log.entities",
    "cassandra.user",
    "cassandra.contact_points",
    "cassandra.datacenter",
    "commands.state_path",
    "pipeline.master",
    "pipeline.driver_memory",
    "api.host",
    "api.former_masks",
    "api.masks",
    "metrics.host",
}
"""Settings of free text that nobody would put a secret into."""


def fields() -> Iterator[tuple[str, str, Any]]:
    for section, info in Config.model_fields.items():
        model = info.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        for name, field in model.model_fields.items():
            yield section, name, field


def test_every_setting_of_free_text_is_known_to_hold_a_secret_or_not() -> None:
    undecided = []
    for section, name, field in fields():
        holds_text = "str" in str(field.annotation) or "TokenConfig" in str(field.annotation)
        is_bound = "pattern" in str(field.metadata) or get_origin(field.annotation) is Literal
        marked = MAY_HOLD_SECRET in field.metadata
        if holds_text and not is_bound and marked == (f"{section}.{name}" in HARMLESS):
            undecided.append(f"{section}.{name}")
    assert undecided == []


SECRETS = [(s, n) for s, n, field in fields() if MAY_HOLD_SECRET in field.metadata]
WRONG: list[Any] = [[SECRET], {"a": [SECRET]}, [[SECRET]], {SECRET: {"b": SECRET}}, 7, SECRET]


def told(folder: Path, **sections: Any) -> str:
    """All that is told of a refusal, traceback and causes too; empty when it is taken."""
    try:
        load(folder, **sections)
    except EverstateError as refusal:
        return "".join(traceback.format_exception(refusal))
    return ""


@pytest.mark.parametrize(("section", "name"), SECRETS)
def test_a_setting_that_may_hold_a_secret_is_refused_without_it(
    tmp_path: Path, section: str, name: str
) -> None:
    refused = [told(tmp_path, **{section: {name: wrong}}) for wrong in WRONG]
    assert len([each for each in refused if f"{section}.{name}" in each]) >= 2
    assert not [each for each in refused if SECRET in each.replace(f"{name}.{SECRET}", "")]


@pytest.mark.parametrize(("section", "name"), SECRETS)
def test_a_mistyped_name_is_refused_without_the_value(
    tmp_path: Path, section: str, name: str
) -> None:
    for text in (
        f'[{section}]\n{name}x = "{SECRET}"',
        f'[{section}x]\n{name} = "{SECRET}"',
        f'{section} = "{SECRET}"',
        f'{section} = ["{SECRET}"]',
    ):
        (tmp_path / "everstate.toml").write_text(text)
        refusal = told(tmp_path)
        assert section in refusal
        assert SECRET not in refusal


@pytest.mark.parametrize(("section", "name"), SECRETS)
def test_a_variable_that_is_wrong_is_refused_without_its_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str, name: str
) -> None:
    for variable in (f"EVERSTATE_{section}_{name}X", f"EVERSTATE_{section}_{name}"):
        monkeypatch.setenv(variable.upper(), f'{{"{SECRET}')
        assert SECRET not in told(tmp_path)
        monkeypatch.delenv(variable.upper())


def test_a_token_table_with_a_slip_hides_the_token(tmp_path: Path) -> None:
    for wrong in ({"tokn": SECRET}, {"token": [SECRET]}, {"token": SECRET, "service": 7}):
        refusal = told(tmp_path, api={"tokens": {"desk": wrong}})
        assert "api.tokens.desk" in refusal
        assert SECRET not in refusal


def test_a_setting_that_holds_no_secret_is_shown_as_it_is(tmp_path: Path) -> None:
    assert "log.partitions is 0" in told(tmp_path, log={"partitions": 0})
    assert "views.on_change is 'ak'" in told(tmp_path, views={"on_change": "ak"})


@pytest.mark.parametrize(
    "dsn",
    [
        f"postgresql://u:a@{SECRET}@db/x",
        f"postgresql://u:100%{SECRET}@db/x",
        f"postgresql://u:a/{SECRET}@db/x",
        f"postgresql://u:2024/{SECRET}@db/x",
        f"postgresql://u:/{SECRET}@db/x",
        f"postgresql://u:a@b:2024/{SECRET}@db/x",
        f"postgresql://u:a {SECRET}@db/x",
        f"postgresql://db/x?password=100%{SECRET}",
        f"host=db password=a {SECRET}",
        f"host=db password='{SECRET}",
        f"host=db pasword={SECRET}",
        f"host=db port={SECRET}",
        SECRET,
    ],
)
def test_a_connection_string_that_libpq_would_take_apart_is_refused_before_it_is_used(
    tmp_path: Path, dsn: str
) -> None:
    for section in ("store", "views"):
        refusal = told(tmp_path, **{section: {"dsn": dsn}})
        assert f"{section}.dsn" in refusal
        assert SECRET not in refusal


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://u:p%40s%25s@db:6000,other/x?sslmode=require",
        "postgresql://u:it:s@[::1]:5432/x",
        "postgresql://u:p@db/a%40b?application_name=a@b",
        "host=db port=6000,6001 user=u password='it\\'s a secret'",
        "host=@/abstract dbname=x",
        "",
    ],
)
def test_a_connection_string_as_libpq_knows_it_is_taken(dsn: str) -> None:
    check_dsn("store.dsn", dsn)


def test_a_setting_of_spark_under_a_wrong_name_is_refused_without_its_value() -> None:
    config = Config(pipeline={"options": {"fs.s3a.secret.key": SECRET}})
    with pytest.raises(InvalidConfig, match=r"secret\.key") as refusal:
        session_settings(config)
    assert SECRET not in str(refusal.value)


def test_the_text_of_a_configuration_shows_no_secret(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        store={"dsn": f"host=db password={SECRET}"},
        pipeline={"options": {"spark.hadoop.fs.s3a.secret.key": SECRET}},
    )
    assert SECRET not in repr(config)
    assert SECRET not in repr(caller_entry(SECRET))
