"""The settings of a lake on S3: what each client gets, and that no key of a user is among them."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake.exceptions import DeltaError

from everstate.archive import table_path
from everstate.archive.layout import archive_errors, ledger_path, options_of
from everstate.config import load
from everstate.errors import (
    ArchiveError,
    ArchiveUnreachable,
    InvalidConfig,
    LocalStackError,
    UnknownSetting,
)
from everstate.local import Stack
from everstate.local import s3 as local_s3
from everstate.local.progress import SILENT
from everstate.pipeline.spark.object_store import s3_settings
from everstate.pipeline.spark.session import session_settings, translate

PATH = "s3://lake/hotel/"


def test_the_section_is_read_from_the_file_and_the_environment_has_priority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f'[archive]\npath = "{PATH}"\n[archive.s3]\nendpoint = "http://a:1"\nregion = "r1"\n'
    (tmp_path / "everstate.toml").write_text(text, "utf-8")
    monkeypatch.setenv("EVERSTATE_ARCHIVE_S3_REGION", "r2")
    monkeypatch.setenv("EVERSTATE_ARCHIVE_S3_PATH_STYLE", "true")
    config = load(tmp_path)
    s3 = config.archive.s3
    assert (s3.endpoint, s3.region, s3.path_style, s3.local) == ("http://a:1", "r2", True, False)
    assert table_path(config, "order") == "s3://lake/hotel/order"
    assert ledger_path(config, "order") == "s3://lake/hotel/_ledger/order"


def test_a_mistyped_setting_is_named_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "everstate.toml").write_text("[archive.s3]\nendpiont = 'x'\n", "utf-8")
    with pytest.raises(UnknownSetting, match=r"toml:2.*s3\.endpiont.*archive\.s3\.endpoint"):
        load(tmp_path)


def test_an_endpoint_with_a_login_is_refused(tmp_path: Path) -> None:
    for endpoint in ("https://me:hush@s3.example.org", "s3.example.org", "https://a/bucket"):
        with pytest.raises(InvalidConfig, match=r"archive\.s3\.endpoint"):
            load(tmp_path, archive={"s3": {"endpoint": endpoint}})


@pytest.mark.parametrize(
    ("section", "url", "virtual"),
    [
        ({"endpoint": "http://a:1/", "path_style": True}, "http://a:1", "false"),
        ({"endpoint": "https://s3.example.org"}, "https://lake.s3.example.org", "true"),
        ({}, None, "true"),
    ],
)
def test_what_delta_rs_gets(
    tmp_path: Path, section: dict[str, object], url: str | None, virtual: str
) -> None:
    config = load(tmp_path, archive={"path": PATH, "s3": section})
    options = options_of(table_path(config, "order"))
    assert options is not None
    assert options.get("aws_endpoint_url") == url
    assert options["aws_virtual_hosted_style_request"] == virtual
    assert options["aws_conditional_put"] == "etag"
    is_plain = None if url is None else str(url.startswith("http:")).lower()
    assert options.get("aws_allow_http") == is_plain
    assert not any("key" in name for name in options)


def test_a_folder_has_no_options(tmp_path: Path) -> None:
    assert options_of(table_path(load(tmp_path), "order")) is None
    assert options_of("s3://lake/hotel/order") is None


def test_spark_gets_no_key_and_no_other_class_for_commits(tmp_path: Path) -> None:
    config = load(tmp_path, archive={"path": PATH, "s3": {"endpoint": "http://a:1"}})
    settings = s3_settings(config)
    assert settings["fs.s3a.endpoint"] == "http://a:1"
    assert not any("access.key" in name or "secret" in name for name in settings)
    other = {"spark.delta.logStore.s3.impl": "io.delta.storage.S3SingleDriverLogStore"}
    with pytest.raises(InvalidConfig, match=r"logStore\.s3\.impl"):
        session_settings(load(tmp_path, pipeline={"options": other}))


def test_the_local_store_is_part_of_the_stack_and_needs_a_start(tmp_path: Path) -> None:
    config = load(tmp_path, archive={"path": PATH, "s3": {"local": True}})
    assert Stack(config).names == ("kafka", "postgres", "s3")
    with pytest.raises(InvalidConfig, match=r"archive\.s3\.endpoint.*everstate up"):
        table_path(config, "order")
    reached = local_s3.S3Server(config).reached(config, {"client": 7})
    options = options_of(table_path(reached, "order")) or {}
    assert options["aws_endpoint_url"] == "http://127.0.0.1:7"
    assert options["aws_secret_access_key"] == "everstate"


def test_without_go_the_error_names_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    config = load(tmp_path, archive={"path": PATH, "s3": {"local": True}}, local={"cache_dir": "c"})
    with pytest.raises(LocalStackError, match=r"no Go to build it with.*Install Go"):
        local_s3.S3Server(config).obtain(SILENT)


def test_a_source_with_another_sum_is_not_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = tmp_path / "go"
    go.write_text('#!/bin/sh\necho \'{"Sum": "h1:other", "Dir": "/"}\'\n', "utf-8")
    go.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    config = load(tmp_path, archive={"path": PATH, "s3": {"local": True}}, local={"cache_dir": "c"})
    with pytest.raises(LocalStackError, match="has another sum: h1:other"):
        local_s3.S3Server(config).obtain(SILENT)
    assert not local_s3.cached_program(config).exists()


@pytest.mark.parametrize(
    ("text", "kind", "shown"),
    [
        (
            "Generic S3 error\nError performing GET http://a:1/b in 1ms - 503 Service Unavailable "
            "<?xml version='1.0'?><Error><Code>SlowDown</Code><KeyId>AKIA</KeyId>",
            ArchiveUnreachable,
            "SlowDown",
        ),
        ("Kernel error -> no credentials found in chain", ArchiveUnreachable, "no credentials"),
        ("version 7 is not there", ArchiveError, "version 7"),
    ],
)
def test_a_refusal_has_its_code_and_not_its_whole_answer(
    text: str, kind: type[ArchiveError], shown: str
) -> None:
    with pytest.raises(ArchiveError, match=shown) as raised:
        with archive_errors("reading"):
            raise DeltaError(text)
    assert type(raised.value) is kind
    assert "AKIA" not in str(raised.value)


def test_an_error_of_the_store_in_spark_is_one_that_passes_and_a_missing_file_is_not() -> None:
    refused = "…\nCaused by: software.amazon.awssdk.services.s3.model.S3Exception: (Status 403)"
    assert isinstance(translate(RuntimeError(refused), "archiving"), ArchiveUnreachable)
    gone = "…\nCaused by: software.amazon.awssdk.services.s3.model.NoSuchKeyException: gone"
    assert not isinstance(translate(RuntimeError(gone), "archiving"), ArchiveUnreachable)
