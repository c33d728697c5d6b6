"""The built wheel has what the package reads at run time, and works away from this folder."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Reads every data file by the code that uses it, and starts the command line.
_PROGRAM = """
import sys
from importlib.resources import files
import everstate
from typer.testing import CliRunner
from everstate.cli import cli
from everstate.local.artifacts import artifacts_of
from everstate.pipeline.spark import session
assert everstate.__file__.startswith(sys.argv[1]), everstate.__file__
assert artifacts_of("kafka")
assert session._LOG_SETTINGS.is_file()
assert "CREATE SCHEMA" in (files("everstate.sources.stores.postgres") / "schema.sql").read_text()
assert "everstate" in CliRunner().invoke(cli, ["--help"]).output
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    subprocess.run([*build, str(ROOT)], check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    known = subprocess.run(
        ("git", "ls-files", "--cached", "--others", "--exclude-standard", "src/everstate"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    wanted = {name.removeprefix("src/") for name in known if (ROOT / name).is_file()}
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if name.startswith("everstate/")}
    assert wanted - shipped == set()
    assert any(name.endswith((".sql", ".json", ".properties")) for name in shipped)


def test_the_wheel_works_from_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path / "site")],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
