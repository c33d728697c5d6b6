"""What is imported when: no circle, and a short command loads no more than it needs."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

from everstate.app import App
from everstate.errors import InvalidView
from everstate.lazily import loader
from everstate.views.declaring import views_compiled_later

_APP = """
from pydantic import BaseModel
from everstate.app import App

app = App("hotel")

@app.entity("guest", key="guest_id")
class Guest(BaseModel):
    '''Who stays.'''
    guest_id: str
    city: str

app.view("by_city", sql="SELECT city, count(*) AS guests FROM guest GROUP BY city")
"""
_PROGRAM = """
import sys
from typer.testing import CliRunner
from everstate.cli import cli
result = CliRunner().invoke(cli, sys.argv[1:])
heavy = (
    *("sqlglot", "pyarrow", "numpy", "pandas", "confluent_kafka", "fastapi", "pyspark"),
    *("tenacity", "werkzeug", "cachetools", "psutil"),
    "everstate.sources.stores.postgres.importing",
)
print(result.exit_code, [name for name in heavy if name in sys.modules])
"""


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = grimp.build_graph("everstate", cache_dir=None)
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            chain = graph.find_shortest_chain(imported, module)
            assert chain is None, " imports ".join([module, *chain])


@pytest.mark.parametrize("verb", ["get", "history"])
def test_a_look_at_an_entity_loads_neither_parser_nor_arrow_nor_kafka(
    tmp_path: Path, verb: str
) -> None:
    """They would take longer than the answer; no server is needed to see that."""
    (tmp_path / "hotel.py").write_text(_APP)
    (tmp_path / "everstate.toml").write_text(
        '[project]\napp = "hotel:app"\n[log]\nbootstrap_servers = "127.0.0.1:1"\n'
        '[store]\ndsn = "postgresql://127.0.0.1:1/none"\n'
    )
    done = subprocess.run(
        (sys.executable, "-c", _PROGRAM, "-C", str(tmp_path), verb, "guest", "g1"),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "6 []\n", "the database is not there, and nothing else was loaded"


def test_the_list_of_ways_in_loads_no_server_and_no_driver_that_is_an_extra() -> None:
    heavy = ("fastapi", "pyspark", "cassandra", "pymysql", "rocksdict", "confluent_kafka")
    code = (
        "import sys\nfrom everstate.app import App\nfrom everstate.config import Config\n"
        "from everstate.sources.ways import ways_in\n"
        "print(len(ways_in(Config(), App('hotel'))))\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True)
    assert done.stdout == "6\n[]\n"


@pytest.mark.parametrize(
    ("package", "least"),
    [
        ("everstate.sources.outbox", 10),
        ("everstate.sources.commands", 10),
        ("everstate.sources.stores.postgres", 5),
    ],
)
def test_each_name_of_a_package_is_found_when_it_is_used(package: str, least: int) -> None:
    found = importlib.import_module(package)
    source = Path(found.__file__ or "").read_text("utf-8")
    names = re.findall(r"^ *from .* import \w+ as (\w+)$", source, re.MULTILINE)
    assert len(names) > least
    assert [name for name in names if not callable(getattr(found, name))] == []


def test_a_name_that_a_package_does_not_have_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'everstate' has no attribute 'door'"):
        loader("everstate")("door")


def test_a_view_that_is_compiled_later_is_refused_when_it_is_needed() -> None:
    app = App("hotel")
    with views_compiled_later():
        plan = app.view("all_of_it", sql="SELECT * FROM nothing")
    with pytest.raises(InvalidView, match="nothing"):
        _ = plan.kind
    assert dict(app.views) == {}
    assert "nothing" in app.refused_views["all_of_it"].message
