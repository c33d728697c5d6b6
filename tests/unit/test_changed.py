"""Which test files are run again after a change."""

from __future__ import annotations

from pathlib import Path

import pytest

from changed import files_reaching

FILES = {
    "src/everstate/__init__.py": "",
    "src/everstate/store.py": "def keep(): from everstate.tables import T",
    "src/everstate/tables.py": "",
    "src/everstate/room/__init__.py": "",
    "src/everstate/room/part.py": "",
    "src/everstate/room/part.sql": "",
    "tests/conftest.py": "from everstate.room import part\ndef stack(): ...",
    "tests/cases.py": "from everstate import store",
    "tests/unit/test_tidy.py": "",
    "tests/unit/test_store.py": "from cases import x",
    "tests/integration/test_room.py": "def test(stack): ...",
    "tests/integration/test_child.py": "PROGRAM = 'from everstate.tables import T'",
    "tests/integration/test_pages.py": "for page in Path('docs/howto').glob('*.md'): ...",
    "docs/howto/page.md": "",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ("src/everstate/tables.py", {"child", "store"}),
        ("src/everstate/store.py", {"store"}),
        ("src/everstate/room/part.py", {"room"}),
        ("src/everstate/room/part.sql", {"room"}),
        ("tests/cases.py", {"store"}),
        ("tests/conftest.py", {"room"}),
        ("docs/howto/page.md", {"pages"}),
        ("tests/integration/test_room.py", {"room"}),
        ("pyproject.toml", {"child", "pages", "room", "store"}),
    ],
)
def test_files_are_found_that_import_name_or_read_what_changed(
    project: Path, changed: str, found: set[str]
) -> None:
    files = {Path(name).stem.removeprefix("test_") for name in files_reaching([changed], project)}
    assert files == {*found, "tidy"}


def test_without_a_change_there_is_nothing_to_run(project: Path) -> None:
    assert files_reaching([], project) == []
