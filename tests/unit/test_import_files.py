"""What a file has that an entity type has not is told before anything is written."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, computed_field
from typer.testing import CliRunner

from everstate.changes import EntityType, Provenance
from everstate.cli import cli
from everstate.errors import ImportFailed
from everstate.sources.stores.postgres import (
    Checked,
    EntityStore,
    Imported,
    check_file,
    import_file,
    importing,
    progress,
)
from everstate.sources.stores.postgres.files import guesses, read_file, read_rows
from everstate.sources.stores.postgres.settling import Settling, repeated_keys
from everstate.sources.stores.postgres.statements import ADVANCE, FINISH, PROGRESS
from everstate.sources.stores.rows import PreparedRow, Settle, prepare
from everstate.sources.stores.store import WrittenMany


class Guest(BaseModel):
    guest_id: str
    name: str
    city: str | None = None
    nights: int = 0


class Lenient(Guest):
    model_config = ConfigDict(extra="ignore")


class Computing(Guest):
    @computed_field  # type: ignore[prop-decorator]
    @property
    def label(self) -> str:
        return f"{self.name} ({self.guest_id})"


GUEST = EntityType("guest", Guest, "guest_id")
CLERK = Provenance(api_version="v1", service_name="test", identifier="clerk")


def check(path: Path, model: type[BaseModel] = Guest, **more: Any) -> Checked:
    entity_type = EntityType("guest", model, "guest_id")
    return check_file(entity_type, path, message_bytes_max=1_000, **more)


def file(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_columns_that_no_field_has_are_refused_and_named(tmp_path: Path) -> None:
    path = file(tmp_path, "g.csv", "guest_id,name,nigths,room\ng1,Eva,3,7\n")
    with pytest.raises(ImportFailed) as raised:
        check(path)
    assert raised.value.row is None
    assert "guest has no field nigths, room" in raised.value.reason
    assert "its columns are guest_id, name, nigths, room" in raised.value.reason
    assert "Its fields are guest_id, name, city, nights." in (raised.value.advice or "")
    assert "--ignore nigths --ignore room" in (raised.value.advice or "")


def test_a_header_that_lacks_a_field_is_told_with_the_columns_that_are_there(
    tmp_path: Path,
) -> None:
    path = file(tmp_path, "g.csv", "id;name\ng1;Eva\n")
    with pytest.raises(ImportFailed) as raised:
        check(path)
    assert "guest has no field id; guest needs guest_id" in raised.value.reason
    assert "its columns are id, name" in raised.value.reason


def test_ignored_columns_are_left_out_of_every_form(tmp_path: Path) -> None:
    rows = [{"guest_id": "g1", "name": "Eva", "room": 7}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "g.parquet")
    for path in (
        file(tmp_path, "g.csv", "guest_id,name,room\ng1,Eva,7\n"),
        file(tmp_path, "g.jsonl", '{"guest_id": "g1", "name": "Eva", "room": 7}'),
        tmp_path / "g.parquet",
    ):
        assert check(path, ignored=["room"]) == Checked(1, 0, (), 1.0, 1, ("city", "nights"))
    with pytest.raises(ImportFailed, match="it has no column rom to ignore"):
        check(tmp_path / "g.csv", ignored=["rom"])


def test_a_field_of_a_json_line_that_the_type_does_not_have_makes_it_a_bad_row(
    tmp_path: Path,
) -> None:
    path = file(tmp_path, "g.jsonl", '{"guest_id": "g1", "name": "Eva", "nigths": 3}')
    assert check(path).bad == ((1, "nigths: there is no field of this name; did you mean nights?"),)


def test_a_model_may_take_fields_that_it_does_not_have(tmp_path: Path) -> None:
    path = file(tmp_path, "g.csv", "guest_id,name,room\ng1,Eva,7\n")
    assert check(path, Lenient).bad_rows == 0


def test_what_was_read_may_be_imported_with_what_the_model_computes(tmp_path: Path) -> None:
    path = file(tmp_path, "g.csv", "guest_id,name,label\ng1,Eva,Eva (g1)\n")
    assert check(path, Computing).bad_rows == 0


def test_a_check_lists_all_rows_that_are_wrong(tmp_path: Path) -> None:
    path = file(
        tmp_path,
        "g.csv",
        b"guest_id,name,nights\n"
        b"g1,Eva,3\n"
        b"g2,Tom,many\n"
        b"g3,J\xfcrgen,1\n"
        b"g4,Ada\n"
        b",Max,1\n"
        b"g6," + b"x" * 1_000 + b",1\n"
        b"g7,Ida,2\n",
    )
    found = check(path)
    assert (found.rows, found.bad_rows) == (7, 5)
    said = dict(found.bad)
    assert sorted(said) == [2, 3, 4, 5, 6]
    assert said[2].startswith("nights: Input should be a valid integer")
    assert said[3] == "it is not UTF-8"
    assert said[4] == "2 cells, but 3 columns"
    assert said[5] == "guest_id: the key is missing or empty"
    assert said[6].startswith("size: the change is over 1,")


def test_a_line_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    path = file(tmp_path, "g.jsonl", b'{"guest_id": "g1", "name": "J\xfcrgen"}')
    assert check(path).bad == ((1, "it is not UTF-8"),)


def test_a_header_that_is_not_utf_8_is_told(tmp_path: Path) -> None:
    path = file(tmp_path, "g.csv", "guest_id,näme\ng1,Eva\n".encode("latin-1"))
    with pytest.raises(ImportFailed, match="its header: it is not UTF-8"):
        check(path)


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    path = file(tmp_path, "g.csv", "guest_id,name,name\ng1,Eva,Tom\n")
    with pytest.raises(ImportFailed, match="two of its columns are called name"):
        check(path)


@pytest.mark.parametrize("name", ["g.csv", "g.jsonl", "g.parquet"])
def test_a_file_of_no_bytes_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ImportFailed, match="it is empty"):
        check(file(tmp_path, name, ""))


def test_a_page_that_differs_from_its_sum_is_refused(tmp_path: Path) -> None:
    rows = pa.table({"guest_id": [f"g{n}" for n in range(99)], "name": ["Eva Lovelace"] * 99})
    path = tmp_path / "g.parquet"
    pq.write_table(
        rows, path, compression="none", use_dictionary=False, write_page_checksum=True
    )  # fmt: skip
    content = path.read_bytes()
    path.write_bytes(content.replace(b"g42", b"g24", 1))
    with pytest.raises(ImportFailed, match="CRC checksum verification failed"):
        check(path)


def test_a_file_without_rows_has_nothing_to_import(tmp_path: Path) -> None:
    assert check(file(tmp_path, "g.csv", "guest_id,name\n")) == Checked(done=1.0)
    assert check(file(tmp_path, "g.jsonl", "\n\n")) == Checked(done=1.0)


def test_an_empty_cell_is_null_where_the_field_takes_null_else_empty_text(tmp_path: Path) -> None:
    path = file(tmp_path, "g.csv", "guest_id,name,city\ng1,,\n")
    (read,) = read_rows(path, GUEST)
    assert read.entity == Guest(guest_id="g1", name="", city=None)


def test_the_verb_checks_without_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hotel_of_check.py").write_text(
        "from pydantic import BaseModel\nfrom everstate.app import App\napp = App('hotel')\n"
        "@app.entity('guest', key='guest_id')\nclass Guest(BaseModel):\n"
        "    guest_id: str\n    nights: int\n"
    )
    (tmp_path / "everstate.toml").write_text("[project]\napp = 'hotel_of_check:app'\n")
    monkeypatch.syspath_prepend(tmp_path)
    path = file(tmp_path, "g.csv", "guest_id,nights\ng1,3\ng2,many\n")
    told = CliRunner().invoke(cli, ["-C", str(tmp_path), "import", "guest", str(path), "--check"])
    assert told.exit_code == 2
    assert "nights: Input should be a valid integer" in told.stdout
    assert "2 rows of g.csv: 1 cannot be imported; nothing was written" in told.stdout
    path.write_text("guest_id,nights\ng1,3\n")
    told = CliRunner().invoke(cli, ["-C", str(tmp_path), "import", "guest", str(path), "--check"])
    assert told.exit_code == 0


@pytest.mark.parametrize(
    ("content", "row", "reason"),
    [
        ('g1,Eva\ng2,"Tom\ng3,Ida\ng4,Max\n', 2, "a quote is never closed"),
        ('g1,"Eva"x\ng2,Tom\n', 1, "has text after its closing quote"),
        ('g1,"Eva\ng2,"Tom"\n', 1, "has text after its closing quote"),
    ],
)
def test_a_quote_that_is_not_closed_is_named_with_its_row(
    tmp_path: Path, content: str, row: int, reason: str
) -> None:
    checked = check(file(tmp_path, "g.csv", f"guest_id,name\n{content}"))
    assert checked.bad_rows == 1
    assert checked.bad[0][0] == row
    assert reason in checked.bad[0][1]


def test_a_cell_of_any_length_that_a_change_takes_is_read(tmp_path: Path) -> None:
    long = "x" * 150_000
    path = file(tmp_path, "g.csv", f'guest_id,name\ng1,"{long}"\n')
    (row,) = read_rows(path, GUEST)
    assert isinstance(row.entity, Guest)
    assert row.entity.name == long


@pytest.mark.parametrize(
    ("header", "row", "said"),
    [
        ("guest_id,name,nights", "g1,Eva,3", ()),
        ("guest_id;name;nights", "g1;Eva;3", ("separated by semicolons",)),
        ("guest_id\tname\tnights", "g1\tEva\t3", ("separated by tabs",)),
        ("Guest_ID, NAME ,nights", "g1,Eva,3", ("'Guest_ID'", "is the field name")),
        ('"guest_id";"Name";"nights"', '"g1";"Eva";"3"', ("semicolons", "'Name'")),
    ],
)
def test_separators_and_the_case_of_columns_are_guessed_and_said(
    tmp_path: Path, header: str, row: str, said: tuple[str, ...]
) -> None:
    path = file(tmp_path, "g.csv", f"{header}\n{row}\n")
    assert [found.entity for found in read_rows(path, GUEST)] == [
        Guest(guest_id="g1", name="Eva", nights=3)
    ]
    found = guesses(path, GUEST)
    assert len(found) == len(said)
    assert all(part in sentence for part, sentence in zip(said, found, strict=True))


def test_a_check_counts_the_rows_that_have_some_of_the_fields(tmp_path: Path) -> None:
    rows = '{"guest_id": "g1", "name": "Eva"}\n{"guest_id": "g2", "name": "Ida", "city": null}\n'
    whole = '{"guest_id": "g3", "name": "Max", "city": "Rome", "nights": 1}\n'
    path = file(tmp_path, "g.jsonl", f"{rows}{whole}{{}}\n")
    found = check(path)
    assert (found.rows, found.bad_rows, found.partial_rows) == (4, 1, 2)
    assert found.absent == ("city", "nights")


@pytest.mark.parametrize(
    ("lines", "stored", "is_imported"),
    [
        (["g1,Eva,1", "g1,Eva,2"], {"name": "Eva", "city": "Rome", "nights": 2}, True),
        (["g1,Eva,1", "g1,Eva,2"], {"name": "Eva", "city": "Rome", "nights": 1}, False),
        (["g1,Eva,2", "g1,Ida,2"], {"name": "Eva", "city": "Rome", "nights": 2}, False),
    ],
)
def test_rows_of_one_key_that_keep_what_they_lack_are_imported_once(
    tmp_path: Path, lines: list[str], stored: dict[str, Any], is_imported: bool
) -> None:
    path = file(tmp_path, "g.csv", "\n".join(["guest_id,name,nights", *lines]))
    last = repeated_keys(path, GUEST, 1, (), "keep")
    settling = Settling(GUEST, "keep", last)
    (chunk,) = read_file(path, GUEST, 10)
    old = json.dumps({"guest_id": "g1", **stored}, separators=(",", ":"))
    rows = list(prepare(GUEST, chunk.entities, provenance=CLERK, occurred_at=datetime.now(UTC)))
    settled = settling.of_chunk(chunk)({"g1": old}, rows)
    states = [json.loads(settled.get(n) or row.state or "") for n, row in enumerate(rows)]
    assert all(state["city"] == "Rome" for state in states)
    assert all(state == json.loads(old) for state in states) is is_imported


def test_the_last_given_value_of_each_field_is_the_last_state_of_rows_that_keep(
    tmp_path: Path,
) -> None:
    first = '{"guest_id": "g1", "name": "Eva", "city": "Rome"}\n'
    path = file(tmp_path, "g.jsonl", first + '{"guest_id": "g1", "name": "Ida"}\n')
    last = repeated_keys(path, GUEST, 1, (), "keep")
    assert json.loads(last["g1"]) == {"guest_id": "g1", "name": "Ida", "city": "Rome"}


class Measured(BaseModel):
    id: int
    value: float | None = None
    at: datetime | None = None
    nick: str | None = Field(
        None, alias="nickName", validation_alias=AliasChoices("nickName", "nick_name")
    )
    notes: list[str] = []


MEASURED = EntityType("measured", Measured, "id")


def reasons(path: Path, ignored: tuple[str, ...] = ()) -> list[str | None]:
    return [read.reason for read in read_rows(path, MEASURED, 1, ignored)]


def test_infinity_is_refused_in_every_form_and_never_null(tmp_path: Path) -> None:
    path = file(tmp_path, "a.jsonl", '{"id": 1, "value": Infinity, "z": 1}')
    assert reasons(path, ("z",)) == ["value: infinity is no number in JSON"]
    path = file(tmp_path, "b.jsonl", '{"id": 1, "nickName": "NaN", "value": -Infinity}')
    assert reasons(path) == ["value: infinity is no number in JSON"]
    table = {"id": [1, 2, 3], "value": [float("inf"), 1.0, float("nan")], "z": [float("inf")] * 3}
    pq.write_table(pa.table(table), tmp_path / "c.parquet")
    found = ["value: infinity is no number in JSON", None, None]
    assert reasons(tmp_path / "c.parquet", ("z",)) == found


def test_a_time_with_parts_of_a_microsecond_is_refused(tmp_path: Path) -> None:
    times = pa.array(
        [1_700_000_000_123_456_789, 1_700_000_000_123_456_000], pa.timestamp("ns", "UTC")
    )
    pq.write_table(pa.table({"id": [1, 2], "at": times}), tmp_path / "a.parquet")
    first, second = read_rows(tmp_path / "a.parquet", MEASURED)
    assert "at: 2023-11-14 22:13:20.123456789+00:00 has parts of a microsecond" in str(first.reason)
    assert isinstance(second.entity, Measured)
    assert second.entity.at == datetime(2023, 11, 14, 22, 13, 20, 123_456, UTC)


@pytest.mark.parametrize("deep", [150, 600, 3_000])
def test_what_is_nested_too_deeply_is_a_bad_row(tmp_path: Path, deep: int) -> None:
    nested = "[" * deep + "]" * deep
    path = file(tmp_path, "a.jsonl", '{"id": 1, "nickName": "NaN", "notes": ' + nested + "}\n")
    assert reasons(path) != [None]
    path = file(tmp_path, "a.csv", f"id,notes\n1,{nested}\n2,[]\n")
    first, second = reasons(path)
    assert (first is not None, second) == (True, None)


@pytest.mark.parametrize("alias", ["nickName", "nick_name"])
def test_an_empty_cell_is_null_in_a_field_with_an_alias(tmp_path: Path, alias: str) -> None:
    (read,) = read_rows(file(tmp_path, "a.csv", f"id,{alias}\n1,\n"), MEASURED)
    assert isinstance(read.entity, Measured)
    assert read.entity.nick is None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "id,value\n7,1\n007,2\n8,1\n"),
        ("a.csv", "id,value\n7,1\n 7.0,2\n8,1\n"),
        ("a.jsonl", '{"id": 7}\n{"id": "07"}\n{"id": 8}\n'),
        ("a.jsonl", '{"id": 7}\n{"id": 7.0}\n{"id": 1}\n'),
        ("a.jsonl", '{"id": 9007199254740993}\n{"id": 9007199254740993.0}\n{"id": 1}\n'),
        ("a.jsonl", '{"id": 9.0071992547409931e17}\n{"id": 900719925474099310}\n'),
    ],
)
def test_integer_keys_that_are_equal_repeat_however_they_are_written(
    tmp_path: Path, name: str, content: str
) -> None:
    path = file(tmp_path, name, content)
    keys = [MEASURED.key_of(read.entity) for read in read_rows(path, MEASURED) if read.entity]
    twice = {key for key in keys if keys.count(key) > 1}
    assert repeated_keys(path, MEASURED, 1, (), "refuse").keys() == twice
    assert len(twice) == 1


class Killed(BaseException):
    """The process of an import ended."""


class Transactions:
    """A store of guests in memory, with the transactions of an import; it may be killed."""

    entity_type = GUEST

    def __init__(self) -> None:
        self.history: list[str] = []
        self.stored: dict[str, str] = {}
        self.progress: dict[str, tuple[int, int]] = {}
        self.chunks_until_killed = 10_000

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        yield self

    def execute(self, statement: object, given: Any) -> Any:
        if statement is PROGRESS:
            return SimpleNamespace(fetchone=lambda: self.progress.get(given[0]))
        if statement is FINISH:
            kept = {id_: at for id_, at in self.progress.items() if not id_.startswith(given[0])}
            self.progress = kept
            return None
        assert statement is ADVANCE
        if self.progress.get(given["id"], (given["from_row"], 0))[0] != given["from_row"]:
            return SimpleNamespace(rowcount=0)
        self.progress[given["id"]] = (given["next_row"], given["rows"])
        return SimpleNamespace(rowcount=1)

    def write_rows(
        self,
        rows: Sequence[PreparedRow],
        recorded_at: datetime,
        *,
        settle: Settle,
        also: Callable[[Any], None],
    ) -> WrittenMany:
        if not rows:
            return WrittenMany(changes=0, keys=0, unchanged=0)
        if self.chunks_until_killed == 0:
            raise Killed
        self.chunks_until_killed -= 1
        settled: Mapping[int, str] = settle(self.stored, rows)
        written: list[str] = []
        stored = dict(self.stored)
        for n, row in enumerate(rows):
            state = settled.get(n, row.state or "")
            if stored.get(row.key) != state:
                written.append(json.loads(state)["name"])
            stored[row.key] = state
        also(self)
        self.stored = stored
        self.history += written
        return WrittenMany(changes=len(written), keys=1, unchanged=len(rows) - len(written))


@pytest.fixture
def transactions(monkeypatch: pytest.MonkeyPatch) -> Transactions:
    monkeypatch.setattr(importing, "CHUNK_ROWS", 1)
    monkeypatch.setattr(progress, "install", lambda *_, **__: None)
    return Transactions()


def imported(store: Transactions, path: Path, **more: Any) -> Imported:
    return import_file(cast(EntityStore, store), path, provenance=CLERK, **more)


@pytest.mark.parametrize("names", ["123", "ABA", "ABAB"])
@pytest.mark.parametrize("committed", [0, 1, 2])
def test_an_import_that_was_killed_goes_on_with_no_version_twice_and_none_lost(
    tmp_path: Path, transactions: Transactions, names: str, committed: int
) -> None:
    path = file(tmp_path, "g.csv", "guest_id,name\n" + "".join(f"g1,{name}\n" for name in names))
    transactions.chunks_until_killed = committed
    with pytest.raises(Killed):
        imported(transactions, path)
    assert transactions.history == list(names[:committed])
    transactions.chunks_until_killed = 10_000
    said: list[tuple[int, int]] = []
    found = imported(transactions, path, on_resume=lambda *at: said.append(at))
    assert transactions.history == list(names)
    assert found.rows == found.changes == len(names) - committed
    assert said == ([(committed + 1, committed)] if committed else [])
    assert imported(transactions, path).changes == 0
    assert transactions.history == list(names)
    assert transactions.progress == {}


def test_a_first_row_that_is_given_begins_anew_and_its_end_is_that_of_the_file(
    tmp_path: Path, transactions: Transactions
) -> None:
    path = file(tmp_path, "g.csv", "guest_id,name\ng1,A\ng2,B\ng3,C\n")
    transactions.chunks_until_killed = 2
    with pytest.raises(Killed):
        imported(transactions, path)
    transactions.chunks_until_killed = 10_000
    assert imported(transactions, path, first_row=1).rows == 3
    assert transactions.history == ["A", "B", "C"]
    assert imported(transactions, path).rows == 3


def test_another_file_or_other_options_do_not_go_on(
    tmp_path: Path, transactions: Transactions
) -> None:
    path = file(tmp_path, "g.csv", "guest_id,name\ng1,A\ng2,B\n")
    transactions.chunks_until_killed = 1
    with pytest.raises(Killed):
        imported(transactions, path)
    transactions.chunks_until_killed = 10_000
    mended = file(tmp_path, "h.csv", "guest_id,name\ng1,A\ng2,C\n")
    assert imported(transactions, mended).rows == 2
    assert imported(transactions, path, missing="reset").rows == 2


def test_an_import_beside_another_of_the_same_file_is_refused(
    tmp_path: Path, transactions: Transactions
) -> None:
    path = file(tmp_path, "g.csv", "guest_id,name\ng1,A\ng1,B\ng1,C\n")
    with pytest.raises(ImportFailed, match="another import of it is running"):
        imported(transactions, path, on_progress=lambda _: moved(transactions))
    assert transactions.history == ["A"]


def moved(store: Transactions) -> None:
    """Another import advances."""
    store.progress = {id_: (row + 1, rows + 1) for id_, (row, rows) in store.progress.items()}


def test_a_byte_order_mark_of_json_lines_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = b'{"id": 1}\n\xef\xbb\xbf{"id": 2}\n{"id": 3}\n'
    path.write_bytes(codecs.BOM_UTF8 + lines)
    first, second, third = read_rows(path, MEASURED)
    assert isinstance(first.entity, Measured)
    assert (first.row, first.entity.id, third.done) == (1, 1, 1.0)
    assert second.reason is not None, "a mark is at the beginning of a file only"
    assert [read.row for read in read_rows(path, MEASURED, 2)] == [2, 3]
    path.write_bytes(codecs.BOM_UTF8 + b"\n" + lines)
    assert [read.row for read in read_rows(path, MEASURED)] == [2, 3, 4]
