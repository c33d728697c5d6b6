"""Files into a store: three forms, the row that is wrong, and importing again."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import BaseModel

from everstate.changes import EntityType
from everstate.config import Config
from everstate.errors import ImportFailed
from everstate.sources.stores.postgres import EntityStore, Imported, import_file, importing
from everstate.testing.store_contract import CLERK
from kit.verbs import verbs


class Part(BaseModel):
    name: str


class Thing(BaseModel):
    thing_id: str
    day: date
    size: float | None = None
    count: int | None = None
    note: str | None = None
    parts: list[Part] = []


THING = EntityType("thing", Thing, "thing_id")
DAY = date(2013, 1, 1)


@pytest.fixture
def store(config: Config) -> Iterator[EntityStore]:
    with EntityStore(config, THING) as store:
        store.install()
        yield store


def things(store: EntityStore, *keys: str) -> list[BaseModel]:
    found = [store.get(key) for key in keys]
    return [each.entity for each in found if each is not None]


def test_json_lines_are_imported_and_importing_again_changes_nothing(
    store: EntityStore, tmp_path: Path
) -> None:
    path = tmp_path / "things.jsonl"
    path.write_text(
        '{"thing_id": "a", "day": "2013-01-01", "size": NaN, "parts": [{"name": "x"}]}\n'
        "\n"
        '{"thing_id": "b", "day": "2013-01-01", "size": 1.5}\n'
        '{"thing_id": "a", "day": "2013-01-01", "size": 2, "parts": []}'
    )
    seen: list[Imported] = []
    imported = import_file(store, path, provenance=CLERK, on_progress=seen.append)
    assert (imported.rows, imported.changes, imported.unchanged) == (3, 3, 0)
    assert seen[-1].done == pytest.approx(1.0)
    assert things(store, "a", "b") == [
        Thing(thing_id="a", day=DAY, size=2),
        Thing(thing_id="b", day=DAY, size=1.5),
    ]
    assert store.put(Thing(thing_id="a", day=DAY, size=2), provenance=CLERK).version == 2
    imported = import_file(store, path, provenance=CLERK)
    assert (imported.rows, imported.changes, imported.unchanged) == (3, 0, 3)


def test_a_file_with_some_fields_is_refused_or_keeps_or_resets_the_others(
    store: EntityStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "CHUNK_ROWS", 1)
    whole, some = tmp_path / "whole.csv", tmp_path / "some.csv"
    whole.write_text("thing_id,day,size,note\na,2013-01-01,1.5,x\nb,2013-01-01,2.5,y\n")
    some.write_text("thing_id,day,size\nb,2013-01-01,2.5\na,2013-01-01,3\nc,2013-01-01,1\n")
    import_file(store, whole, provenance=CLERK)
    with pytest.raises(ImportFailed, match=r"row 1: note: .* 'b' is stored .*--missing keep"):
        import_file(store, some, provenance=CLERK)
    kept = import_file(store, some, provenance=CLERK, missing="keep")
    assert (kept.changes, kept.unchanged) == (2, 1)
    assert things(store, "a", "b") == [
        Thing(thing_id="a", day=DAY, size=3, note="x"),
        Thing(thing_id="b", day=DAY, size=2.5, note="y"),
    ]
    assert import_file(store, some, provenance=CLERK, missing="reset").changes == 2
    assert things(store, "a") == [Thing(thing_id="a", day=DAY, size=3)]
    assert import_file(store, some, provenance=CLERK).changes == 0


def test_a_key_that_comes_in_several_transactions_is_imported_once(
    store: EntityStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "CHUNK_ROWS", 2)
    path = tmp_path / "x.csv"
    rows = [f"{'abc'[n % 3]},2013-01-01,{n}" for n in range(9)]
    path.write_text("\n".join(["thing_id,day,size", *rows]))
    assert import_file(store, path, provenance=CLERK).changes == 9
    assert import_file(store, path, provenance=CLERK).changes == 0
    path.write_text("\n".join(["thing_id,day,size", *rows, "a,2013-01-01,99"]))
    assert import_file(store, path, provenance=CLERK).changes == 4, "a has a new last state"


def test_csv_cells_become_values_and_empty_ones_null(store: EntityStore, tmp_path: Path) -> None:
    path = tmp_path / "things.csv"
    path.write_text(
        "thing_id,day,size,count,note,parts\r\n"
        'a,2013-01-01,,3,"two\nlines","[{""name"": ""x""}]"\r\n'
        "b,2013-01-01,NaN,,,\r\n".replace(",\r\n", ",[]\r\n"),
        encoding="utf-8-sig",
        newline="",
    )
    assert import_file(store, path, provenance=CLERK).changes == 2
    assert things(store, "a", "b") == [
        Thing(thing_id="a", day=DAY, count=3, note="two\nlines", parts=[Part(name="x")]),
        Thing(thing_id="b", day=DAY, note=None),
    ]


def test_parquet_is_imported_with_nan_as_null(store: EntityStore, tmp_path: Path) -> None:
    path = tmp_path / "things.parquet"
    rows = [
        {"thing_id": "a", "day": DAY, "size": math.nan, "parts": [{"name": "x"}]},
        {"thing_id": "b", "day": DAY, "size": 0.5, "parts": []},
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    assert import_file(store, path, provenance=CLERK).changes == 2
    assert things(store, "a", "b") == [
        Thing(thing_id="a", day=DAY, parts=[Part(name="x")]),
        Thing(thing_id="b", day=DAY, size=0.5),
    ]


GOOD = '{"thing_id": "a", "day": "2013-01-01"}'


@pytest.mark.parametrize(
    ("name", "content", "row", "reason"),
    [
        ("x.jsonl", f"{GOOD}\n{{oops\n{GOOD}", 2, "Invalid JSON"),
        ("x.jsonl", f'{GOOD}\n\n{{"thing_id": "b", "day": "never"}}', 3, "day"),
        ("x.jsonl", f'{GOOD}\n{{"thing_id": "b", "day": "2013-01-01", "size": 1e999}}', 2, "size"),
        (
            "x.jsonl",
            f'{{"thing_id": "b", "note": "{"x" * 2_000_000}", "day": "2013-01-01"}}',
            1,
            "limit",
        ),
        ("x.csv", "thing_id,day\na,2013-01-01\nb\n", 2, "1 cells, but 2 columns"),
        ("x.csv", "thing_id,day,parts\na,2013-01-01,nonsense\n", 1, "no JSON"),
        ("x.csv", b"thing_id,day\na,2013-01-01\nb\xff,2013-01-01\n", 2, "not UTF-8"),
        ("x.parquet", b"PAR1 is not enough", None, "arquet"),
        ("x.txt", GOOD, None, "its ending is none of .jsonl"),
        ("missing.csv", None, None, "No such file"),
    ],
)
def test_the_row_that_cannot_be_imported_is_told_and_its_transaction_leaves_nothing(
    store: EntityStore,
    tmp_path: Path,
    name: str,
    content: str | bytes | None,
    row: int | None,
    reason: str,
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ImportFailed) as failure:
        import_file(store, path, provenance=CLERK)
    assert failure.value.row == row
    assert failure.value.committed == 0
    assert reason in failure.value.reason
    assert things(store, "a", "b") == []


def test_rows_of_earlier_transactions_stay_and_are_counted(
    store: EntityStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "CHUNK_ROWS", 10)
    path = tmp_path / "x.jsonl"
    lines = [json.dumps({"thing_id": f"t-{n}", "day": "2013-01-01"}) for n in range(30)]
    path.write_text("\n".join([*lines[:25], "oops", *lines[25:]]))
    with pytest.raises(ImportFailed, match=r"row 26: .*\(20 rows before it were committed"):
        import_file(store, path, provenance=CLERK)
    path.write_text("\n".join(lines))
    imported = import_file(store, path, provenance=CLERK)
    assert (imported.changes, imported.unchanged) == (10, 20)


def test_a_mended_file_goes_on_where_it_ended_with_no_state_twice(
    store: EntityStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstate.sources.stores.postgres.importing.CHUNK_ROWS", 10)
    path = tmp_path / "orders.jsonl"
    # Each key comes several times, with another state each time.
    lines = [
        json.dumps({"thing_id": f"o-{row % 4}", "day": "2013-01-01", "note": f"{row}"})
        for row in range(30)
    ]
    path.write_text("\n".join([*lines[:25], "{broken", *lines[26:]]))
    with pytest.raises(ImportFailed, match="--from-row 21") as raised:
        import_file(store, path, provenance=CLERK)
    assert (raised.value.row, raised.value.next_row, raised.value.committed) == (26, 21, 20)
    path.write_text("\n".join(lines))
    imported = import_file(store, path, provenance=CLERK, first_row=raised.value.next_row or 1)
    assert (imported.rows, imported.changes) == (10, 10)
    versions = [found.version for key in range(4) if (found := store.get(f"o-{key}")) is not None]
    assert sum(versions) == 30


def test_an_import_that_was_interrupted_goes_on_with_no_state_twice_and_none_lost(
    store: EntityStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "CHUNK_ROWS", 1)
    path = tmp_path / "x.csv"
    rows = [f"a,2013-01-01,{size}" for size in (1, 2, 1, 3)]
    path.write_text("\n".join(["thing_id,day,size", *rows]))

    def interrupt(_: Imported) -> None:
        raise KeyboardInterrupt

    said: list[tuple[int, int]] = []
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            import_file(store, path, provenance=CLERK, on_progress=interrupt)
    imported = import_file(store, path, provenance=CLERK, on_resume=lambda *at: said.append(at))
    assert (imported.rows, imported.changes, said) == (2, 2, [(3, 2)])
    assert store.get("a") == (Thing(thing_id="a", day=DAY, size=3), 4)
    assert import_file(store, path, provenance=CLERK).changes == 0, "the whole file, again"


def test_the_verb_imports_a_file_and_tells_the_row_of_a_bad_one(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "from pydantic import BaseModel\n"
        "from everstate.app import App\n"
        "app = App('shop')\n"
        "@app.entity('thing', key='thing_id')\n"
        "class Thing(BaseModel):\n"
        "    thing_id: str\n"
    )
    run = verbs(config, monkeypatch, "import", "thing", app="shop_of_import:app", code=code)
    good, bad = tmp_path / "good.csv", tmp_path / "bad.csv"
    good.write_text("thing_id\na\nb\n")
    bad.write_text("thing_id\na\n\n\x00,\n")
    done, told, errors = run(str(good), "--json")
    assert done == 0, errors
    assert json.loads(told) == {"rows": 2, "changes": 2, "unchanged": 0}
    done, _, errors = run(str(bad))
    assert done == 2
    assert "bad.csv, row 3: " in errors
