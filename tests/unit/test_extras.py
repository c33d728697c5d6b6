"""The base package is what a service needs that emits and reads; the rest names its extra."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from everstate.errors import MissingExtra

ROOT = Path(__file__).parents[2]
# Only what the base package has can be imported, as in a new environment.
_BARE = """
import sys
class Bare:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {extras!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Bare())
"""
_SERVICE = """
from pydantic import BaseModel
from everstate.app import App
from everstate.changes import Provenance
from everstate.serving import Reader
from everstate.serving.changes import Changes
from everstate.serving.snapshots import read_snapshot
from everstate.sources.stores.postgres import EntityStore
from everstate.sources.outbox import emit, install_outbox
app = App("shop")
class Order(BaseModel):
    order_id: str
app.entity("ordr", key="order_id")(Order)
app.view("orders", sql="SELECT count(*) AS orders FROM ordr")
assert app.views["orders"].kind == "linear"
"""
_CLI = """
import importlib
for name in ("get", "list_", "history", "outbox", "status", "doctor", "psql", "gaps", "import_"):
    importlib.import_module(f"everstate.cli.{name}")
from everstate.cli import cli
cli(["archive", "verify"])
"""


def in_bare_environment(program: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    bare = _BARE.format(extras=set(MissingExtra._EXTRAS))
    command = (sys.executable, "-c", bare + program)
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)


def test_a_service_emits_and_reads_with_the_base_package(tmp_path: Path) -> None:
    done = in_bare_environment(_SERVICE, tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_verb_that_needs_more_names_the_extra_in_one_sentence(tmp_path: Path) -> None:
    done = in_bare_environment(_CLI, tmp_path)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "this needs the package deltalake, which is not installed" in done.stderr
    # Everstate is on no package index: the command names packages that are.
    assert 'the extra `lake` of everstate: pip install "deltalake' in done.stderr


def test_each_extra_is_one_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert set(MissingExtra._EXTRAS.values()) <= set(project["optional-dependencies"])
    base = {name.partition(">")[0].partition("[")[0] for name in project["dependencies"]}
    assert not base & set(MissingExtra._EXTRAS)


@pytest.mark.parametrize("package", sorted(MissingExtra._EXTRAS))
def test_the_advice_installs_what_the_extra_has(package: str) -> None:
    extra = MissingExtra._EXTRAS[package]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = project["optional-dependencies"][extra]
    advice = MissingExtra(package, extra).advice or ""
    assert re.findall(r'"([\w-]+)', advice) == [re.split("[^\\w-]", name)[0] for name in wanted]


@pytest.mark.parametrize("module", ["pyspark.sql", "everstate.nothing", ""])
def test_only_modules_of_extras_are_told_so(module: str) -> None:
    found = MissingExtra.of(ModuleNotFoundError("no", name=module))
    assert (found is not None) == module.startswith("pyspark")
