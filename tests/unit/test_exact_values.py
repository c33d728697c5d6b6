"""A value that a model can hold arrives exactly; any other is refused with the reason."""

from __future__ import annotations

import math
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import httpx
import msgspec
import psycopg
import pytest
from psycopg.adapt import AdaptersMap
from psycopg.pq import Format
from psycopg.types.json import set_json_loads
from pydantic import AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, RootModel

from clean_cases import CONFIG
from everstate.changes import ChangeCodec, DomainEvent, EntityType, Provenance
from everstate.changes.accepting import NotAccepted, accept
from everstate.changes.json_numbers import JsonNumber, decode, encode
from everstate.changes.row_json import row_json
from everstate.cli.console import print_json
from everstate.client import Client
from everstate.client.requests import writing
from everstate.declarations.commands import CommandGroup
from everstate.errors import (
    EverstateError,
    InvalidBody,
    InvalidChange,
    InvalidCommand,
    InvalidEntityType,
)
from everstate.http.masks import Mask
from everstate.serving.differences import differences
from everstate.serving.words import difference_text, value_text
from everstate.sources.crud.bodies import read_entity, read_json
from everstate.sources.crud.patches import merge
from everstate.sources.outbox.compose import Composer, OutboxRow
from everstate.sources.outbox.emit import emit_arguments
from everstate.sources.outbox.pending import Pending, Transaction
from everstate.sources.stores.postgres.files import read_rows
from exact_cases import AMOUNT, SALE, WAYS_IN, Exact, Line, Sale, by_rest, by_store
from kit.changes import change_of

TILL = Provenance(api_version="v1", service_name="till", identifier="1")


class Keeping(BaseModel):
    model_config = ConfigDict(extra="allow")
    keeping_id: str


def _compact(value: Any) -> Any:
    return datetime.fromisoformat(value) if isinstance(value, str) else value


class Own(BaseModel):
    own_id: str
    at: Annotated[datetime, BeforeValidator(_compact)]


@pytest.mark.parametrize("way", [*WAYS_IN, by_store])
def test_a_decimal_that_is_a_json_number_keeps_all_its_digits(way: Any, tmp_path: Path) -> None:
    inside = f'"lines": [{{"price": {AMOUNT}}}], "rates": {{"a": -{AMOUNT}, "b": null}}'
    sale = way(SALE, f'"amount": {AMOUNT}, {inside}', tmp_path)
    assert sale.amount == Decimal(AMOUNT)
    assert sale.lines[0].price == Decimal(AMOUNT)
    assert sale.rates == {"a": Decimal(f"-{AMOUNT}"), "b": None}


def test_a_cell_of_csv_keeps_all_digits(tmp_path: Path) -> None:
    path = tmp_path / "sales.csv"
    path.write_text(f'sale_id,amount,lines\ns1,{AMOUNT},"[{{""price"": {AMOUNT}}}]"\n')
    (row,) = read_rows(path, SALE)
    assert isinstance(row.entity, Sale)
    assert (row.entity.amount, row.entity.lines[0].price) == (Decimal(AMOUNT), Decimal(AMOUNT))


def test_a_patch_of_another_field_leaves_a_number_as_it_is() -> None:
    stored = read_json(f'{{"sale_id": "s1", "amount": {AMOUNT}, "weight": 0.1}}'.encode())
    patched = encode(merge(stored, {"pieces": 9007199254740993}))
    assert AMOUNT.encode() in patched
    sale = read_entity(SALE, patched)
    assert isinstance(sale, Sale)
    assert (sale.amount, sale.pieces) == (Decimal(AMOUNT), 9007199254740993)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2.5", 2.5),
        ("1e400", JsonNumber("1e400")),
        ("0.30000000000000004", 0.30000000000000004),
        ("0.1000000000000000000000000000", 0.1),
        (AMOUNT, JsonNumber(AMOUNT)),
        ("123456789012345678901234567890", 123456789012345678901234567890),
        ("-1.5E-400", JsonNumber("-1.5E-400")),
    ],
)
def test_a_json_number_is_a_float_only_where_that_is_equal(text: str, value: Any) -> None:
    found = decode(text)
    assert (type(found), found) == (type(value), value)
    assert decode(encode(found)) == value


class Anything(BaseModel):
    """A command: its fields need no column."""

    value: Any = None
    values: dict[str, Any] = {}
    listed: list = []  # type: ignore[type-arg]
    named: dict | None = None  # type: ignore[type-arg]
    several: set = set()  # type: ignore[type-arg]


@pytest.mark.parametrize("field", ["value", "values", "listed", "named"])
def test_a_field_of_any_type_keeps_its_numbers_or_refuses_them(field: str) -> None:
    form = '[{"a": %s}]' if field == "listed" else '{"a": [%s]}'
    kept = accept(Anything, f'{{"{field}": {form % "2.5"}}}')
    assert getattr(kept, field) == decode(form % "2.5")
    with pytest.raises(NotAccepted, match="more digits than a field without a type can keep"):
        accept(Anything, f'{{"{field}": {form % AMOUNT}}}')
    with pytest.raises(NotAccepted, match="more digits than a field without a type can keep"):
        accept(Anything, f'{{"several": [{AMOUNT}]}}')


@pytest.mark.parametrize("way", WAYS_IN)
@pytest.mark.parametrize(
    ("field", "written"),
    [
        *(("at", f'"{text}"') for text in ("20260102", "2026", "45000", "-1", "20260102.5")),
        ("seen", '"20260102"'),
        ("at", "20260102"),
        ("day", "86400"),
        ("day", '"0"'),
        ("amount", '"1_000"'),
        ("amount", '"٣"'),
        ("pieces", '"1_000"'),
        ("weight", '"1_000"'),
        ("weight", "9007199254740993"),
        ("weight", "9007199254740993.0"),
        ("weight", '"12345678901234567890.12"'),
        ("weight", "1E-400"),
        ("at", '"2026-01-02T03:04:05.1234567"'),
        ("seen", '"2026-01-02T03:04:05.0000001Z"'),
        ("day", '"2026-01-02T00:00:00.0000001"'),
    ],
)
def test_what_a_reader_would_change_is_refused(
    way: Any, field: str, written: str, tmp_path: Path
) -> None:
    with pytest.raises(EverstateError) as refused:
        way(SALE, f'"{field}": {written}', tmp_path)
    reason = str(getattr(refused.value, "problems", refused.value))
    assert field in reason
    if way is not by_rest:  # a value of another JSON type is refused there before
        assert written.strip('"') in reason


@pytest.mark.parametrize("way", WAYS_IN)
@pytest.mark.parametrize("field", ["at", "seen"])
def test_a_local_time_that_comes_twice_is_refused_with_its_field(
    way: Any, field: str, tmp_path: Path
) -> None:
    """Only a question names a zone; in a field its offset says which of both times is meant."""
    with pytest.raises(EverstateError) as refused:
        way(SALE, f'"{field}": "2024-11-03 01:45 America/New_York"', tmp_path)
    reason = str(getattr(refused.value, "problems", refused.value))
    assert field in reason
    assert "datetime" in reason


def test_a_field_that_converts_what_is_given_is_not_checked() -> None:
    own = EntityType("own", Own, "own_id").accept({"own_id": "o", "at": "20260102"})
    assert isinstance(own, Own)
    assert own.at == datetime.fromisoformat("2026-01-02")


def test_a_number_that_an_unknown_field_cannot_keep_is_refused() -> None:
    keeping = EntityType("keeping", Keeping, "keeping_id")
    body = f'{{"keeping_id": "k", "more": [{{"a": {AMOUNT}}}]}}'.encode()
    with pytest.raises(InvalidBody) as refused:
        read_entity(keeping, body)
    assert refused.value.problems[0][0] == "more.0.a"
    assert read_entity(keeping, b'{"keeping_id": "k", "more": 2.5}').model_extra == {"more": 2.5}


def test_a_field_that_the_model_does_not_have_is_refused_by_a_put_as_by_a_request() -> None:
    with pytest.raises(InvalidChange, match=r"did you mean pieces"):
        SALE.accept({"sale_id": "s1", "peices": 1})


class Currency(Enum):
    euro = "EUR"


class Level(Enum):
    first = 1


@pytest.mark.parametrize(
    ("annotation", "value", "key"),
    [
        (Currency, Currency.euro, "EUR"),
        (Level, Level.first, "1"),
        (bool, True, "true"),
        (Exact, Decimal("2.50"), "2.5"),
        (Exact, Decimal("1E+3"), "1000"),
        (Exact, Decimal("-0.00"), "0"),
        (Exact, Decimal(AMOUNT), "12345678901234567890.123456789"),
        (datetime, datetime.fromisoformat("2026-01-02T03:04:05+01:00"), "2026-01-02T02:04:05Z"),
        (datetime, datetime.fromisoformat("2026-01-02"), "2026-01-02T00:00:00"),
        (date, date(2026, 1, 2), "2026-01-02"),
        (UUID, UUID(int=1), "00000000-0000-0000-0000-000000000001"),
    ],
)
def test_a_key_is_the_text_of_its_json_value(annotation: Any, value: Any, key: str) -> None:
    model = type("Keyed", (BaseModel,), {"__annotations__": {"key": annotation}})
    entity_type = EntityType("keyed", model, "key")
    assert entity_type.key_of(model(key=value)) == key


@pytest.mark.parametrize("annotation", [float, list[str], dict[str, str], Line])
def test_a_key_without_one_text_is_refused_when_it_is_declared(annotation: Any) -> None:
    model = type("Keyed", (BaseModel,), {"__annotations__": {"key": annotation}})
    with pytest.raises(InvalidEntityType, match="no one text"):
        EntityType("keyed", model, "key")


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ('"amount":"2.5"', '"amount":"2.50"', True),
        ('"amount":2.5', '"amount":"2.50"', True),
        ('"lines":[{"price":"1"}]', '"lines":[{"price":"1.0"}]', True),
        ('"at":"2026-01-02T03:00:00+01:00"', '"at":"2026-01-02T02:00:00Z"', True),
        ('"at":"2026-01-02T03:00:00"', '"at":"2026-01-02T03:00:00Z"', False),
        ('"amount":"2.5"', '"amount":"2.51"', False),
        (f'"amount":"{AMOUNT}1"', f'"amount":"{AMOUNT}2"', False),
        ('"pieces":1', '"pieces":2', False),
        ('"sale_id":"1.0"', '"sale_id":"1.00"', False),
        ('"day":null', '"pieces":null', False),
    ],
)
def test_states_are_equal_by_the_values_of_their_fields(one: str, other: str, equal: bool) -> None:
    assert SALE.is_equal(f"{{{one}}}", f"{{{other}}}") is equal


def test_a_state_is_not_equal_to_none() -> None:
    assert SALE.is_equal(None, None)
    assert not SALE.is_equal(None, "{}")


STATE = f'{{"amount":{AMOUNT},"note":"n","line":{{"price":-{AMOUNT},"name":"x"}}}}'.encode()


def test_what_is_read_is_shown_with_all_its_digits(capsys: pytest.CaptureFixture[str]) -> None:
    state = decode(STATE)
    assert row_json(state) == STATE
    (difference,) = differences({"amount": decode(f"{AMOUNT}1")}, {"amount": state["amount"]})
    assert difference_text(difference) == f"amount: {AMOUNT}1 → {AMOUNT}"
    assert value_text(state["line"]) == f'{{"price":-{AMOUNT},"name":"x"}}'
    print_json(state)
    assert f'"amount": {AMOUNT},' in capsys.readouterr().out


def test_what_a_mask_shows_keeps_all_its_digits() -> None:
    shown = Mask("sale", ("note", "line.name")).json(STATE)
    assert shown == STATE.replace(b'"n"', b'"***"').replace(b'"x"', b'"***"')


def test_what_a_client_receives_keeps_all_its_digits_and_may_be_sent_again() -> None:
    answer = httpx.Response(
        200,
        headers={"Content-Type": "text/event-stream"},
        text=f"event: change\ndata: {STATE.decode()}\n\n",
    )
    client = Client("http://shop.test")
    client._client.connections = httpx.Client(
        base_url="http://shop.test", transport=httpx.MockTransport(lambda _: answer)
    )
    event = next(client.subscribe("sale"))
    assert event.data["amount"] == Decimal(AMOUNT)
    content = writing("PUT", "/v1/sale/s", event.data).content
    assert f'"amount": "{AMOUNT}"'.encode() in (content or b"")
    with pytest.raises(ValueError, match="not JSON compliant"):
        writing("PUT", "/v1/sale/s", {"amount": math.nan})


class Pay(BaseModel):
    amount: Exact
    at: AwareDatetime | None = None


def test_a_command_keeps_all_digits_and_is_refused_as_an_entity_is() -> None:
    group = CommandGroup(SALE, lambda *_: None, lambda *_: None, [Pay])
    assert group.read("Pay", f'{{"amount": {AMOUNT}}}') == Pay(amount=Decimal(AMOUNT))
    for wrong in ('"at": "20260102"', '"att": null'):
        with pytest.raises(InvalidCommand, match="Pay: at"):
            group.read("Pay", f'{{"amount": 1, {wrong}}}')


def test_a_change_is_read_and_written_with_all_its_digits() -> None:
    state = f'{{"sale_id":"s1","amount":{AMOUNT}}}'.encode()
    sold = DomainEvent(type="Sold", data=decode(state))
    more = {"more": decode(state)}
    change = change_of("sale", "s1", 1, state, who=TILL, event=sold, extra=more)
    codec = ChangeCodec(SALE)
    _, value, _ = codec.encode(change)
    read = codec.decode(value)
    assert read.current is not None
    assert read.current["amount"] == Decimal(AMOUNT)


@pytest.mark.parametrize("amount", [AMOUNT, "0.1234567890123456789", str(10**29 + 1)])
def test_an_event_goes_from_the_outbox_to_the_log_with_all_digits(amount: str) -> None:
    row = OutboxRow(
        id=1,
        xid="1",
        entity="sale",
        key="s1",
        version=1,
        kind="created",
        change_id=UUID(int=1),
        schema_version=1,
        occurred_at="2026-01-01T00:00:00+00:00",
        recorded_at=datetime.fromisoformat("2026-01-01T00:00:00Z"),
        provenance='{"api_version":"v1","service_name":"till","identifier":"1"}',
        event=f'{{"type":"Sold","data":{{"amount":{amount}}}}}',
        before=None,
        after='{"sale_id":"s1"}',
    )
    transaction = Transaction("1", [Pending(1, "1", "sale", "s1", 9)])
    for record in Composer(CONFIG, [SALE]).compose([transaction], {1: row}):
        assert f'"data":{{"amount":{amount}}}'.encode() in (record.value or b"")


class Cash(BaseModel):
    kind: Literal["cash"]
    amount: Exact


class Card(BaseModel):
    kind: Literal["card"]
    amount: Exact
    at: date | AwareDatetime | None = None


class Parts(RootModel[list[Exact]]):
    """A list as a whole."""


class Settle(BaseModel):
    by: Annotated[Cash | Card, Field(discriminator="kind")]
    pair: tuple[int, Exact] | None = None
    parts: Parts | None = None
    next: Settle | None = None


def test_a_command_of_any_shape_keeps_all_digits() -> None:
    inner = f'{{"by": {{"kind": "cash", "amount": {AMOUNT}}}}}'
    rest = f'"pair": [1, {AMOUNT}], "parts": [{AMOUNT}], "next": {inner}'
    text = f'{{"by": {{"kind": "card", "amount": {AMOUNT}}}, {rest}}}'
    made, amount = accept(Settle, text), Decimal(AMOUNT)
    assert made == Settle(
        by=Card(kind="card", amount=amount),
        pair=(1, amount),
        parts=Parts([amount]),
        next=Settle(by=Cash(kind="cash", amount=amount)),
    )
    with pytest.raises(NotAccepted, match="5 is a number and no time"):
        accept(Settle, '{"by": {"kind": "card", "amount": 1, "at": 5}}')
    with pytest.raises(NotAccepted, match="JSON"):
        accept(Settle, '{"by": ')


def test_psycopg_makes_one_loader_for_all_connections(caplog: pytest.LogCaptureFixture) -> None:
    """Of a closure it makes a class at each connection, and warns in the terminal."""
    loaders = []
    for _ in range(2):
        connection = AdaptersMap(psycopg.adapters)
        set_json_loads(decode, connection)
        loaders.append(connection.get_loader(psycopg.adapters.types["jsonb"].oid, Format.TEXT))
    assert loaders[0] is loaders[1]
    assert caplog.text == ""


def test_a_mapping_in_a_change_is_written_exactly_or_refused() -> None:
    codec = ChangeCodec(SALE)
    state = {"sale_id": "s1"}
    change = change_of("sale", "s1", 2, state, state, who=TILL)
    codec.encode(change)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("current", {"weight": 9007199254740993}),
        ("original", {"at": 1700000000}),
        ("current", {"peices": 1}),
    ]
    for name, values in wrong:
        state = {"sale_id": "s1", **values}
        with pytest.raises(InvalidChange, match=min(values)):
            codec.encode(msgspec.structs.replace(change, **{name: state}))


def test_the_state_before_an_emitted_change_is_refused_where_the_model_would_change_it() -> None:
    def arguments(before: dict[str, Any]) -> dict[str, Any]:
        given = {"sale_id": "s1", **before}
        return emit_arguments(SALE, None, given, None, TILL, None, None, "strict")

    assert '"pieces":1,' in arguments({"pieces": 1, "of_an_older_model": 2})["before"]
    with pytest.raises(InvalidChange, match="at: 20260102 is a number"):
        arguments({"at": 20260102})
