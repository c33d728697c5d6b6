"""Servers of the stack read the paths and values that were meant, or are not started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from everstate.config import Config, load
from everstate.errors import LocalStackError
from everstate.local.connect import ConnectServer
from everstate.local.kafka import KafkaServer
from everstate.local.mariadb import MariaDbServer
from everstate.local.server import Launch

PORTS = {"client": 1, "controller": 2}


@pytest.fixture(autouse=True)
def without_files_of_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("kafka", "connect"):
        place = f"everstate.local.{module}"
        monkeypatch.setattr(f"{place}.java_home", lambda _config: Path("/java"))
        monkeypatch.setattr(f"{place}.class_archive_options", lambda *_all, **_named: ())
    monkeypatch.setattr(KafkaServer, "_format", lambda *_all: None)
    monkeypatch.setattr(ConnectServer, "_unpack", lambda _server: Path("/plugins"))
    monkeypatch.setattr(MariaDbServer, "_unpack", lambda _server: Path("/mariadb"))
    monkeypatch.setattr(MariaDbServer, "_install", lambda *_all: None)
    monkeypatch.setattr("everstate.local.unprivileged.prefix", lambda _owned: ())


def kafka(folder: Path) -> tuple[Launch, str]:
    launch = KafkaServer(load(folder)).prepare(PORTS)
    return launch, (folder / ".everstate" / "kafka" / "server.properties").read_text("ascii")


def connect(folder: Path, **capture: Any) -> str:
    config: Config = load(folder, capture=capture)
    ConnectServer(config, lambda: "a:9092,b:9092").prepare(PORTS)
    return (folder / ".everstate" / "connect" / "connect.properties").read_text("ascii")


def project(parent: Path, name: str) -> Path:
    folder = parent / name
    folder.mkdir()
    return folder


def test_a_path_that_is_not_ascii_or_has_a_backslash_is_escaped(tmp_path: Path) -> None:
    folder = project(tmp_path, "J\u00f6rg\\x")
    launch, settings = kafka(folder)
    inner = "J\\u00f6rg\\\\x/.everstate"
    assert f"\nlog.dirs={tmp_path}/{inner}/kafka/data\n" in settings
    assert launch.env["LC_ALL"] == "C.UTF-8"
    secrets = "config.providers.file.param.allowed.paths"
    assert f"\n{secrets}={tmp_path}/{inner}/connect/secrets\n" in connect(folder)


@pytest.mark.parametrize("start", [kafka, connect])
def test_a_path_with_a_comma_is_refused_by_name(tmp_path: Path, start: Any) -> None:
    folder = project(tmp_path, "a,b")
    with pytest.raises(LocalStackError, match=r"a,b.* has a comma") as caught:
        start(folder)
    assert "project.data_dir" in str(caught.value.advice)


@pytest.mark.parametrize("start", [kafka, connect])
def test_a_path_that_is_not_utf_8_is_refused(tmp_path: Path, start: Any) -> None:
    folder = project(tmp_path, "J\udcf6rg")
    with pytest.raises(LocalStackError, match="is not UTF-8"):
        start(folder)


def test_options_of_the_worker_arrive_as_they_are_written(tmp_path: Path) -> None:
    options = {"sasl.jaas.config": 'user password="a\\b";', "task.shutdown.timeout": "5\nx=1"}
    settings = connect(tmp_path, worker_options=options)
    written = 'user\\ password\\="a\\\\b";\n'
    for client in ("", "producer.", "consumer.", "admin."):
        assert f"\n{client}sasl.jaas.config={written}" in settings
    assert "\ntask.shutdown.timeout=5\\nx\\=1\n" in settings
    assert "\nbootstrap.servers=a\\:9092,b\\:9092\n" in settings


def test_a_path_with_a_number_sign_is_no_comment_for_mariadb(tmp_path: Path) -> None:
    folder = project(tmp_path, "a#b")
    MariaDbServer(load(folder)).prepare(PORTS)
    settings = (folder / ".everstate" / "mariadb" / "my.cnf").read_text("utf-8")
    inner = f"{tmp_path}/a#b/.everstate/mariadb"
    for name, place in (("datadir", "data"), ("tmpdir", "tmp"), ("init-file", "users.sql")):
        assert f'\n{name}="{inner}/{place}"\n' in settings


@pytest.mark.parametrize("name", ["a b", "a\\tb", 'a"b'])
def test_a_path_that_mariadb_would_misread_is_refused_by_name(tmp_path: Path, name: str) -> None:
    folder = project(tmp_path, name)
    with pytest.raises(LocalStackError, match="has a space, a quote or a backslash") as caught:
        MariaDbServer(load(folder)).prepare(PORTS)
    assert "project.data_dir" in str(caught.value.advice)
