"""A flipped bit in a local copy of states changes no row that anybody reads."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from everstate.errors import StateStoreFailed
from everstate.log.state_copy import CopyMeta, StateCopy, open_copy

FLIPS = 300
ROWS = {f"k{n:05}".encode(): b"value %d " % n * (n % 9 + 1) for n in range(3_000)}
TOPICS = {"t": "id"}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy with rows in two files."""
    path = tmp_path_factory.mktemp("state") / "copy"
    copy = open_copy(path, "form", TOPICS)
    copy.write(ROWS, replace(copy.meta, next={"t[0]": 3_000}))
    copy.close()
    copy = StateCopy(path, "form")
    copy.write({b"k00007": None, b"k1": b"x"})
    copy.close()
    return path


def spoilt(written: Path, path: Path, random: Random, files: str = "*") -> Path:
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(written, path)
    file = random.choice([each for each in sorted(path.glob(files)) if each.stat().st_size])
    content = bytearray(file.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    file.write_bytes(content)
    return path


Answers = tuple[CopyMeta, bytes | None, list[bytes | None], list[tuple[bytes, bytes]]]


def answers(copy: StateCopy) -> Answers:
    try:
        name = b"k00003"
        return copy.meta, copy.get(name), copy.get_many(sorted(ROWS)), list(copy.scan())
    finally:
        copy.close()


def test_no_flipped_bit_changes_a_row(written: Path, tmp_path: Path) -> None:
    random, right = Random(58), answers(StateCopy(written, "form"))
    found = 0
    for _ in range(FLIPS):
        path = spoilt(written, tmp_path / "copy", random)
        try:
            assert answers(StateCopy(path, "form")) == right
        except StateStoreFailed:
            found += 1
    assert found > FLIPS // 5


def test_a_damaged_copy_is_made_again(written: Path, tmp_path: Path) -> None:
    """Else its owner would fail at the same row after each start."""
    random = Random(58)
    for _ in range(20):
        path = spoilt(written, tmp_path / "copy", random, "*.sst")
        try:
            answers(open_copy(path, "form", TOPICS))
        except StateStoreFailed:
            pass
        meta, one, _, rows = answers(open_copy(path, "form", TOPICS))
        assert (meta.next, one, rows) == ({}, None, [])
