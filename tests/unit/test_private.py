"""What a project keeps on the disk is nobody else's business."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from everstate.config import load
from everstate.local.checks import machine_checks
from everstate.local.memory import Memory, Remembered
from everstate.parts import Journal, states_folder
from everstate.private import private_folder, properties, write_private
from everstate.runtime.claim import claimed
from everstate.runtime.supervisor import Supervisor
from everstate.sources.cdc.secrets import password_reference


@pytest.fixture(autouse=True)
def a_mask_that_lets_everybody_in() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_whatever_makes_the_data_folder_first_lets_nobody_else_in(tmp_path: Path) -> None:
    """With servers of one's own nothing else makes it: it was open to all."""
    makers: list[Callable[[Path], object]] = [
        lambda data: Journal("pipeline", states_folder(data)).beat(),
        lambda data: Supervisor({}, data / "logs", Journal("run", states_folder(data))),
        lambda data: Memory(data).write({"kafka": Remembered({"client": 1}, None)}),
        lambda data: password_reference(load(data.parent), "shop", "s3cret", local=True),
        lambda data: private_folder(data / "a" / "b"),
    ]
    for at, make in enumerate(makers):
        data = tmp_path / str(at) / ".everstate"
        data.parent.mkdir()
        make(data)
        assert mode(data) == 0o700, at
        for path in data.rglob("*"):
            assert mode(path) == (0o700 if path.is_dir() else 0o600), path


def test_a_run_that_claims_its_project_lets_nobody_else_in(tmp_path: Path) -> None:
    with claimed(load(tmp_path)):
        assert mode(tmp_path / ".everstate") == 0o700


def test_a_folder_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    open_folder = tmp_path / "open"
    open_folder.mkdir(mode=0o755)
    assert mode(private_folder(open_folder / "inner")) == 0o700
    assert mode(open_folder) == 0o755


def test_the_doctor_sees_a_data_folder_that_others_may_read(tmp_path: Path) -> None:
    config = load(tmp_path)
    config.project.data_dir.mkdir(mode=0o750)
    (found,) = [each for each in machine_checks(config) if "other users" in each.found]
    assert (found.outcome, found.advice) == ("warn", f"chmod 700 {config.project.data_dir}")
    config.project.data_dir.chmod(0o700)
    assert not [each for each in machine_checks(config) if "other users" in each.found]


def test_a_private_file_is_replaced_whole(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("old")
    write_private(file, "new")
    assert (file.read_text(), mode(file), len(list(tmp_path.iterdir()))) == ("new", 0o600, 1)


def test_settings_are_written_as_java_reads_them() -> None:
    text = properties({"a b": " x=y:\\z", "note": "#1!\nend"})
    assert text == "a\\ b=\\ x\\=y\\:\\\\z\nnote=\\#1\\!\\nend\n"


def test_java_reads_what_is_not_ascii_as_it_is_meant() -> None:
    """Java's default for such files is ISO-8859-1, and its characters have 16 bits."""
    text = properties({"log.dirs": "/srv/J\u00f6rg\t\U0001f600"})
    assert text == "log.dirs=/srv/J\\u00f6rg\\u0009\\ud83d\\ude00\n"


def test_a_private_file_that_cannot_be_written_leaves_no_part(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        write_private(tmp_path / "secret", "\udc80")
    assert list(tmp_path.iterdir()) == []
