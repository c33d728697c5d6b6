"""`make land` moves main to a tested snapshot of the work tree, or leaves everything as it is."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

LAND = Path(__file__).parents[2] / ".ci" / "land"
RUN = 'set -eu\ntest -f new.txt\ntest "$(cat told.txt)" = green\n'


def git(folder: Path, *arguments: str) -> str:
    told = subprocess.run(
        ["git", "-c", "user.name=A", "-c", "user.email=a@example.org", *arguments],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    )
    return told.stdout.strip()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with one commit, a changed file and a new one."""
    folder = tmp_path / "project"
    (folder / ".ci").mkdir(parents=True)
    shutil.copy(LAND, folder / ".ci" / "land")
    (folder / ".ci" / "run").write_text(RUN)
    (folder / "told.txt").write_text("old")
    git(folder, "init", "--quiet", "-b", "main")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "-m", "first")
    (folder / "new.txt").write_text("new")
    return folder


def land(folder: Path, message: str) -> int:
    names = {"NAME": "A", "EMAIL": "a@example.org"}
    who = {f"GIT_{role}_{k}": v for role in ("AUTHOR", "COMMITTER") for k, v in names.items()}
    env = {**os.environ, **who, "MESSAGE": message}
    return subprocess.run(["sh", ".ci/land"], cwd=folder, env=env, capture_output=True).returncode


def test_a_green_work_tree_is_put_on_main(project: Path) -> None:
    (project / "told.txt").write_text("green")
    assert land(project, 'says "what" changed') == 0
    assert git(project, "log", "-1", "--format=%s") == 'says "what" changed'
    assert git(project, "status", "--porcelain") == ""
    assert git(project, "rev-list", "--count", "main") == "2"


def test_a_red_one_stays_in_the_work_tree(project: Path) -> None:
    (project / "told.txt").write_text("red")
    assert land(project, "something") != 0
    assert git(project, "rev-list", "--count", "main") == "1"
    assert git(project, "status", "--porcelain").split("\n") == ["M told.txt", "?? new.txt"]


def test_without_a_message_nothing_is_tested(project: Path) -> None:
    (project / "told.txt").write_text("green")
    assert land(project, "") == 2
    assert git(project, "rev-list", "--count", "main") == "1"
