"""States with former names of fields are read as today's, by every reader without a server."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import pytest
from pydantic import BaseModel, create_model

from callers import caller_entry
from clean_cases import capture_of
from everstate import Formerly, when
from everstate.api.access import check_access
from everstate.api_config import ApiConfig
from everstate.app import App
from everstate.changes import ChangeCodec, EntityType
from everstate.changes.derived import joined, read_message
from everstate.changes.equality import canonical
from everstate.changes.evolution import FieldChange, field_changes, model_note
from everstate.changes.fields import tree_of
from everstate.errors import InvalidChange, InvalidConfig, InvalidEntityType
from everstate.pipeline.archiving.audit_states import state_digests
from everstate.pipeline.drift.tasks import state_fault
from everstate.pipeline.spark.parse import model_of
from everstate.pipeline.spark.states import state_schema
from everstate.serving.differences import differences
from everstate.serving.reader import version_of
from everstate.sources.cdc.completion import UNCHANGED, Completed, Known, Skipped, complete
from everstate.sources.cdc.mapping import CleanRow, TableMapping
from everstate.sources.cdc.rows import SourceRow
from everstate.sources.cdc.states import States, state_name, state_row
from everstate.sources.outbox.emit import emit_arguments
from everstate.views.definition import TimelineDefinition, ViewDefinition
from everstate.views.plan import compile_view
from everstate.views.policies import Rules
from formerly_cases import CASES, CLASHES, GUEST, WAS, WHO, New, Old, text
from kit.changes import change_of


def dumped(model: BaseModel) -> dict[str, Any]:
    return json.loads(GUEST.encode(model))  # type: ignore[no-any-return]


def message(current: bytes, original: bytes | None = None) -> bytes:
    return ChangeCodec(GUEST).encode(change_of("guest", "a", 1, current, original, who=WHO))[1]


def shown(was: bytes) -> dict[str, Any]:
    """What `get` and `history` show of a row of the store."""
    row = ("a", 1, "updated", json.loads(was), *[None] * 8, None, None)
    return dict(version_of(GUEST, row, None).state or {})


def captured(was: bytes) -> dict[str, Any]:
    """The state before that a capture's row is compared with."""
    known = Known(1, was, False)
    copy = {state_name("guest", "a"): state_row(known)}

    class Copy:
        def get_many(self, names: list[bytes]) -> list[bytes | None]:
            return [copy.get(name) for name in names]

    found = States(Copy(), {"guest": GUEST}).get("guest", "a")  # type: ignore[arg-type]
    assert found is not None
    return json.loads(found.image)  # type: ignore[no-any-return]


READERS: dict[str, Callable[[bytes], Any]] = {
    "stores, commands and tables": lambda was: dumped(GUEST.validate_json(was)),
    "states of the log": lambda was: dumped(GUEST.validate(json.loads(was))),
    "rows": lambda was: dumped(GUEST.validate_exactly(json.loads(was))),
    "writers": lambda was: dumped(GUEST.accept(json.loads(was))),
    "changes": lambda was: ChangeCodec(GUEST).decode(message(was)).current,
    "original of changes": lambda was: ChangeCodec(GUEST).decode(message(was, was)).original,
    "get and history": shown,
    "captures": captured,
    "emit": lambda was: json.loads(
        emit_arguments(GUEST, "a", json.loads(was), None, WHO, None, None, "strict")["before"]
    ),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("case", CASES)
def test_a_reader_gives_todays_names(reader: str, case: str) -> None:
    found, wanted = READERS[reader](text(CASES[case].was)), text(CASES[case].now)
    assert GUEST.former
    assert GUEST.today(found) == found
    both = (dumped(GUEST.validate(state)) for state in (found, json.loads(wanted)))
    assert next(both) == next(both)


@pytest.mark.parametrize("case", CASES)
def test_a_state_and_the_same_with_todays_names_are_equal(case: str) -> None:
    was, now = text(CASES[case].was), text(CASES[case].now)
    assert GUEST.is_equal(was.decode(), now.decode())
    assert GUEST.is_equal(was.decode(), GUEST.carry("a", was, now).decode())
    assert differences(GUEST.today(json.loads(was)), GUEST.today(json.loads(now))) == ()
    digests = pickle.loads(pickle.dumps(state_digests(GUEST, state_schema(GUEST))))
    assert digests.by_values(was) == digests.by_values(now)
    changed = read_message(message(now, was))
    for field in ("city", "paid", "address", "address.place"):
        assert not when(field).changes().fires(GUEST, *map(json.loads, (was, now)))
    assert changed.key == "a"


@pytest.mark.parametrize("case", CLASHES)
def test_names_with_different_values_are_refused_or_shown_never_chosen(case: str) -> None:
    state, field = CLASHES[case].was, CLASHES[case].field
    was = text(state)
    for read in (GUEST.validate_json, lambda each: GUEST.validate(json.loads(each))):
        with pytest.raises(InvalidChange, match="another value under a former name") as refused:
            read(was)
        assert refused.value.field == field
    assert json.loads(GUEST.today(was)) != json.loads(text({}))
    assert GUEST.restated(was) == was
    change = ChangeCodec(GUEST).decode(message(was))
    assert change.current == GUEST.today(json.loads(was))
    if case == "a field":
        assert change.current == json.loads(was)
        assert when("city").changes(to=None, from_="Wien").fires(GUEST, {"city": "Wien"}, state)
        assert not when("city").changes().fires(GUEST, None, state)


def test_a_state_without_former_names_is_not_touched() -> None:
    now = text({"city": "Wien"})
    assert GUEST.today(now) is now
    assert not EntityType("guest", Old, "guest_id").former


def test_what_is_carried_along_is_neither_lost_nor_doubled() -> None:
    was = b'{"guest_id":"a","city_name":"Wien","more":2.50,"homes":{"x":{"street":"s","far":1}}}'
    now = dumped(GUEST.validate_json(was))
    now["city"] = "Linz"
    kept = json.loads(GUEST.carry("a", was, json.dumps(now).encode()))
    assert kept == {**now, "more": 2.5, "homes": {"x": {**now["homes"]["x"], "far": 1}}}
    assert "city_name" not in kept
    lines = b'{"guest_id":"a","lines":[{"sum":"1.00","far":1}]}'
    now = dumped(GUEST.validate_json(lines))
    kept = json.loads(GUEST.carry("a", lines, json.dumps(now).encode()))
    assert kept["lines"] == [{"amount": "1.00", "far": 1}]


def model(**fields: Any) -> type[BaseModel]:
    return create_model("Made", **fields)


def made(**fields: Any) -> EntityType:
    return EntityType("made", model(key=(str, ...), **fields), "key")


Text = Annotated[str | None, Formerly("before")]


@pytest.mark.parametrize(
    "fields",
    [
        {"one": (Text, None), "before": (str, "")},
        {"one": (Text, None), "two": (Text, None)},
        {"before": (Text, None)},
        {"one": (Text, None), "Before": (str, "")},
        {"one": (Annotated[str, Formerly("was", "was")], "")},
        {"one": (Annotated[str, Formerly("key")], "")},
        {"inner": (model(one=(Text, None), before=(str, "")), ...)},
    ],
)
def test_a_former_name_that_has_another_meaning_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidEntityType, match="have one name in SQL"):
        made(**fields)


def test_a_former_name_that_no_column_could_have_is_refused() -> None:
    with pytest.raises(InvalidEntityType, match="'a b' has a blank"):
        made(one=(Annotated[str, Formerly("a b")], ""))


def told(before: EntityType, now: EntityType) -> list[tuple[str, str, str | None]]:
    return [(c.field, c.what, c.before) for c in field_changes(model_note(before), now)]


def test_a_plan_shows_a_rename_once_and_what_else_changed() -> None:
    was = made(before=(str, ...))
    now = made(one=(Annotated[str, Formerly("before")], ...))
    (change,) = field_changes(model_note(was), now)
    assert change == FieldChange("made", "one", "renamed", "before", "text")
    assert not change.is_refused
    assert change.meaning.startswith("before in states from before is read as one; views")
    assert field_changes(model_note(now, model_note(was)), now) == []
    assert "former" not in model_note(now, model_note(was))
    gone = made(one=(str, ...))
    assert told(now, gone) == [("before", "removed", "text")]
    assert model_note(gone, model_note(now))["former"].keys() == {"before"}
    number = made(one=(Annotated[int, Formerly("before")], ...))
    assert told(was, number) == [("one", "renamed", "before"), ("one", "retyped", "text")]
    must = made(one=(Annotated[str, Formerly("before")], ...))
    assert told(made(before=(str, "")), must)[1:] == [("one", "required", "text")]
    both = made(one=(str, ""), before=(str, ""))
    assert told(both, made(one=(Annotated[str, Formerly("before")], ""))) == [
        ("one", "renamed", "before")
    ]


def test_a_plan_takes_a_rename_in_an_object_and_of_the_key() -> None:
    assert told(WAS, GUEST) == [
        ("city", "renamed", "city_name"),
        ("address", "renamed", "home"),
        ("address", "widened", "struct"),
        ("homes", "widened", "map"),
        ("lines", "widened", "list"),
        ("paid", "renamed", "price"),
    ]
    key = model(number=(Annotated[str, Formerly("key")], ...))
    renamed = EntityType("made", key, "number")
    assert told(made(), renamed) == [("number", "renamed", "key")]
    assert renamed.key_of(renamed.validate_json(b'{"key":"k"}')) == "k"


def test_views_that_use_a_renamed_field_have_another_meaning() -> None:
    plain = EntityType("guest", model(guest_id=(str, ...), city=(str, ""), n=(int, 0)), "guest_id")
    was = (Annotated[str, Formerly("town")], "")
    named = EntityType("guest", model(guest_id=(str, ...), city=was, n=(int, 0)), "guest_id")
    assert model_of(plain) != model_of(named)
    for sql, is_other in {
        "SELECT city, count(*) AS n FROM guest GROUP BY city": True,
        "SELECT n, count(*) AS c FROM guest GROUP BY n": False,
        "SELECT * FROM guest": True,
    }.items():
        definition = ViewDefinition("v", sql)
        plans = [compile_view(definition, {"guest": kind}) for kind in (plain, named)]
        assert (plans[0].fingerprint != plans[1].fingerprint) is is_other
    fired = Rules(trigger=when("city").changes())
    rules = ViewDefinition("v", "SELECT n FROM guest", rules=fired)
    plans = [compile_view(rules, {"guest": kind}) for kind in (plain, named)]
    assert plans[0].fingerprint != plans[1].fingerprint
    timeline = TimelineDefinition("t", "guest", ("city",))
    plans = [compile_view(timeline, {"guest": kind}) for kind in (plain, named)]
    assert plans[0].fingerprint != plans[1].fingerprint


@pytest.mark.parametrize("column", ["name", "title"])
def test_a_captured_column_may_have_the_former_name_until_it_is_renamed_too(column: str) -> None:
    title = (Annotated[str, Formerly("name")], ...)
    item = EntityType("item", model(id=(int, ...), title=title, n=(int, 0)), "id")
    capture = capture_of("debezium")
    mapping = TableMapping(capture, "public.item", capture.tables["public.item"], item)
    image = {"id": 1, column: "a", "n": 2}
    row = SourceRow(table="public.item", op="u", key={"id": 1}, after=image, is_whole=True)
    clean = mapping.map(row)
    assert clean.state == b'{"id":1,"title":"a","n":2}'
    known = Known(1, item.restated(b'{"id":1,"name":"a","n":1}'), False)
    assert known.image == b'{"id":1,"title":"a","n":1}'

    def current(row: CleanRow) -> bytes | None:
        found = complete(row, known, mapping, lambda *_: None)
        assert isinstance(found, Completed)
        return found.steps[0].current

    assert current(clean) == clean.state
    part = msgspec.structs.replace(clean, state=None, known={"n": 2})
    assert current(part) == clean.state
    held = msgspec.structs.replace(part, known={"name": "b", "n": 2})
    assert current(held) == b'{"id":1,"title":"b","n":2}'
    same = Known(1, item.restated(b'{"id":1,"name":"a","n":2}'), False)
    assert complete(clean, same, mapping, lambda *_: None) == Skipped(UNCHANGED)


def test_a_mask_of_a_renamed_field_needs_its_former_name() -> None:
    app = App("hotel")
    app.entity("guest", key="guest_id")(New)
    tokens = {"web": caller_entry("a" * 40, permissions={"*": ("read",)})}
    given = ApiConfig(tokens=tokens, masks={"guest": ("address.place",)})
    with pytest.raises(InvalidConfig, match=r"address\.town, address\.village, home\.place"):
        check_access(given, app)
    names = ("address.town", "address.village", "home.place", "home.town", "home.village")
    check_access(given.model_copy(update={"former_masks": {"guest": names}}), app)


def test_a_joined_stream_finds_the_other_entity_by_the_former_name() -> None:
    other = EntityType("hotel", model(hotel_id=(str, ...)), "hotel_id")
    form = joined("guest", to="hotel", on="city")
    types = {"guest": GUEST, "hotel": other}
    for was, key in ({"city_name": "h"}, "h"), ({"city": "h", "city_name": "i"}, None):
        wanted = form.wanted(form.own_key(types), read_message(message(text(was))))
        assert (wanted and wanted[0]) == key


def test_drift_judges_a_stored_state_by_todays_names() -> None:
    must = made(one=(Annotated[str, Formerly("before")], ...))
    stored = '{"key":"k","before":"x"}'
    assert state_fault(must.arrow_schema, stored) == "missing:state.one"
    assert must.former
    assert state_fault(must.arrow_schema, must.today(stored)) is None
    assert canonical(tree_of(must.model), json.loads(must.today(stored)))
