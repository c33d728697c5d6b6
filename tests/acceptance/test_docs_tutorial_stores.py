"""The project of the tutorial gets a view in Redis and in OpenSearch by two lines, as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from everstate.config import load
from kit.served_store import ServedStore
from page_reader import Reader

PAGE = Path(__file__).parents[2] / "docs" / "tutorial" / "first-project.md"
MAKE = """
```console
$ everstate init parcels
…
$ cd parcels
```
"""
KEEP = """
```console
$ everstate run &
$ everstate import parcel parcels.csv
3 rows of parcels.csv: 3 changes, 0 unchanged
$ everstate views show on_the_way
…Wien…
```
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["redis", "opensearch"])
def test_two_lines_put_the_parcels_of_the_tutorial_into_another_store(
    name: str, request: pytest.FixtureRequest, reader: Reader, tmp_path: Path
) -> None:
    served: ServedStore = request.getfixturevalue(name)
    (declared,) = re.findall(r"`(app\.view\(\"on_the_way\".*)`", PAGE.read_text("utf-8"))
    page = tmp_path / "page.md"
    page.write_text(MAKE, "utf-8")
    reader.follow(page)
    for file, more in (
        ("everstate.toml", served.section),
        ("parcels.py", declared.replace("redis", name)),
    ):
        with open(reader.folder / file, "a", encoding="utf-8") as output:
            output.write(f"\n{more}\n")
    page.write_text(KEEP, "utf-8")
    config = load(reader.folder)
    try:
        reader.follow(page)
        found = served.read(config, "on_the_way") or []
        assert sorted((row["_key"], row["city"], int(row["weight_g"])) for row in found) == [
            ("p1", "Wien", 500),
            ("p2", "Graz", 200),
            ("p3", "Wien", 700),
        ]
    finally:
        reader.stop()
        served.clean(config)
