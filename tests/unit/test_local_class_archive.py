"""The class-data archive: written once for each JVM and class path, and used when it is whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from everstate.config import Config, load
from everstate.local import class_archive
from everstate.local.class_archive import class_archive_options
from everstate.local.jvm import Jvm


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load(tmp_path, local={"cache_dir": str(tmp_path / "cache")})


@pytest.fixture(autouse=True)
def jvm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Java with the archive of its own classes; the path of that archive."""
    home = tmp_path / "java"
    base = home / "lib" / "server" / "classes.jsa"
    base.parent.mkdir(parents=True)
    base.write_bytes(b"x")
    found = Jvm(home=home, major=17, version="17.0.1", source="PATH")
    monkeypatch.setattr(class_archive, "find_jvm", lambda: found)
    return base


@pytest.fixture
def jar(tmp_path: Path) -> Path:
    path = tmp_path / "one.jar"
    path.write_bytes(b"a jar")
    return path


def written(options: tuple[str, ...]) -> Path:
    name, _, path = options[0].partition("=")
    assert name == "-XX:ArchiveClassesAtExit"
    return Path(path)


def options_of(config: Config, jar: Path) -> tuple[str, ...]:
    return class_archive_options(config, "spark", [str(jar)])


def test_the_first_start_writes_and_the_next_ones_use_it(config: Config, jar: Path) -> None:
    archive = written(options_of(config, jar))
    archive.write_bytes(b"\x01\x02\x03\x04 classes")
    assert options_of(config, jar)[0] == f"-XX:SharedArchiveFile={archive}"


def test_one_that_was_cut_short_is_written_again(config: Config, jar: Path) -> None:
    archive = written(options_of(config, jar))
    archive.write_bytes(b"\0" * 4096)
    assert written(options_of(config, jar)) == archive


def test_another_jar_has_another_archive(config: Config, jar: Path) -> None:
    before = written(options_of(config, jar))
    os.utime(jar, (1, 1))
    assert written(options_of(config, jar)) != before


def test_a_runtime_without_an_archive_of_its_own_gets_none(
    config: Config, jar: Path, jvm: Path
) -> None:
    jvm.unlink()
    assert options_of(config, jar) == ()


def test_a_helper_uses_the_archive_of_its_server_and_writes_none(config: Config, jar: Path) -> None:
    assert class_archive_options(config, "kafka", [str(jar)], writes=False) == ()
    archive = written(class_archive_options(config, "kafka", [str(jar)]))
    archive.write_bytes(b"\x01 classes")
    options = class_archive_options(config, "kafka", [str(jar)], writes=False)
    assert options[0] == f"-XX:SharedArchiveFile={archive}"


def test_the_cache_does_not_grow(config: Config, jar: Path) -> None:
    other = written(class_archive_options(config, "kafka", [str(jar)]))
    other.write_bytes(b"\x01 classes")
    os.utime(other, (0, 0))
    for turn in range(5):
        os.utime(jar, (turn, turn))
        archive = written(options_of(config, jar))
        archive.write_bytes(b"\x01 classes")
        os.utime(archive, (turn, turn))
    kept = sorted(archive.parent.glob("spark-*.jsa"))
    assert len(kept) == 3
    assert other.exists()
    assert archive in kept


def test_a_cache_that_cannot_be_written_is_no_failure(
    config: Config, jar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file where the folder would be")
    assert options_of(config, jar) == ()
    (tmp_path / "cache").unlink()
    # Also the administrator, whom no mode of a folder keeps out, meets a read-only file system.
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert options_of(config, jar) == ()
