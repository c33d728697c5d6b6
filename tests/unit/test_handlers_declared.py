"""Handlers are refused when declared; what follows from a declaration without any server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from math import inf, nan
from typing import Any
from uuid import UUID

import pytest

from everstate.app import App
from everstate.attention.conditions import of_handlers
from everstate.changes.triggers import when
from everstate.config import Config
from everstate.declarations.handlers import handlers_of
from everstate.errors import (
    InvalidHandler,
    InvalidToken,
    InvalidTrigger,
    UnknownEntity,
)
from everstate.handling.tables import HandlerTables
from everstate.handling.worker import handler_parts
from everstate.roles import Role, processes_of
from everstate.sections import AlertsConfig
from kit.models import declare_bell

CONFIG = Config(store={"dsn": "postgresql://localhost/none"}, log={"prefix": "shop"})


def nothing(change: Any, context: Any) -> None:
    return


def yields(change: Any, context: Any) -> Iterator[None]:
    yield


async def yields_later(change: Any, context: Any) -> AsyncIterator[None]:
    yield


def app() -> App:
    found = App("bells")
    declare_bell(found)
    return found


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"group": "Billing"}, "group and name must match"),
        ({"name": "a-b"}, "group and name must match"),
        ({"concurrency": 0}, "concurrency must be between 1 and 16"),
        ({"retries": -1}, "retries and timeout_s must be positive"),
        ({"timeout_s": 0}, "retries and timeout_s must be positive"),
        ({"timeout_s": inf}, "retries and timeout_s must be positive and finite"),
        ({"timeout_s": nan}, "retries and timeout_s must be positive and finite"),
        ({"pause_max_s": 0.5}, "retries and timeout_s must be .* pause_max_s at least 1 s"),
        ({"pause_max_s": inf}, "retries and timeout_s must be positive and finite"),
        ({"on_parked": "drop"}, "on_parked must be wait or pass"),
    ],
)
def test_a_wrong_declaration_is_refused(given: dict[str, Any], reason: str) -> None:
    declared = app()
    with pytest.raises(InvalidHandler, match=reason):
        declared.handler("bell", **{"group": "billing", **given})(nothing)
    assert not declared.handlers


def test_unknown_types_fields_and_second_names_are_refused() -> None:
    declared = app()
    with pytest.raises(UnknownEntity):
        declared.handler("clock", group="billing")
    with pytest.raises(InvalidTrigger):
        declared.handler("bell", group="billing", when=when("color").changes())(nothing)
    for bad in ("nothing", yields, yields_later):
        with pytest.raises(InvalidHandler, match="it must decorate a function, and no generator"):
            declared.handler("bell", group="billing", name="text")(bad)  # type: ignore[type-var]
    with pytest.raises(InvalidToken, match="'nwo' is neither a token nor a time"):
        declared.handler("bell", group="billing", start="nwo")(nothing)
    assert declared.handler("bell", group="billing")(nothing) is nothing
    with pytest.raises(InvalidHandler, match="it is declared already"):
        declared.handler("bell", group="billing")(nothing)
    declared.handler("bell", group="billing", name="other")(nothing)
    declared.handler("bell", group="mail")(nothing)
    assert list(declared.handlers) == ["billing.nothing", "billing.other", "mail.nothing"]


def test_a_group_and_a_handler_are_found_by_name() -> None:
    declared = app()
    for group, name in (("billing", "one"), ("billing", "two"), ("mail", "one")):
        declared.handler("bell", group=group, name=name)(nothing)
    titles = {
        name: [each.title for each in handlers_of(declared.handlers, name)]
        for name in ("billing", "mail.one")
    }
    assert titles == {"billing": ["billing.one", "billing.two"], "mail.one": ["mail.one"]}
    with pytest.raises(InvalidHandler, match=r"sms: it is not declared .declared: billing.one, "):
        handlers_of(declared.handlers, "sms")
    assert list(handler_parts(CONFIG, declared, ["billing"])) == ["billing.one", "billing.two"]
    assert list(handler_parts(CONFIG, declared, ())) == list(declared.handlers)
    assert processes_of(CONFIG, declared)["handlers"] == [Role.HANDLERS]
    assert "handlers" not in processes_of(CONFIG, app())
    with pytest.raises(InvalidHandler, match="declared: none"):
        handler_parts(CONFIG, app(), ())


def test_the_id_of_a_call_is_the_same_for_a_change_and_differs_between_handlers() -> None:
    declared = app()
    for group in ("billing", "mail"):
        declared.handler("bell", group=group)(nothing)
    one, other = declared.handlers.values()
    change = UUID(int=7)
    assert one.id_of(change) == one.id_of(change)
    assert one.id_of(change) != other.id_of(change)


def test_pauses_double_up_to_five_minutes_and_end() -> None:
    def pauses(calls: Iterable[int], **given: Any) -> list[float | None]:
        declared = app()
        declared.handler("bell", group="billing", **given)(nothing)
        return [declared.handlers["billing.nothing"].pause_s(each) for each in calls]

    assert pauses(range(5), retries=3) == [0, 1, 2, 4, None]
    assert pauses([20], retries=50) == [300]
    assert pauses([1], retries=0) == [None]
    assert pauses([12, 13, 5_000], retries=9_999, pause_max_s=3600) == [2048, 3600, 3600]


def test_a_database_is_named_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = app()
    declared.handler("bell", group="billing", dsn="$BILLING_DSN")(nothing)
    monkeypatch.setenv("BILLING_DSN", "postgresql://billing/db")
    (handler,) = declared.handlers.values()
    tables = HandlerTables(CONFIG, handler)
    assert (tables.dsn, tables.id) == ("postgresql://billing/db", "shop.handlers.billing.nothing")
    assert "postgresql" not in repr(handler)


def test_what_needs_attention_names_the_handler_and_what_to_do() -> None:
    limits = AlertsConfig(view_behind_s=60)
    states = [
        ("billing.good", 3, 1.0, 0, 2, None),
        ("billing.late", 7, 61.0, 0, 0, None),
        ("mail.failed", 0, 0.0, 2, 5, None),
        ("mail.new", 0, None, 0, 0, None),
        ("webhooks.guest", 0, 127.0, 0, 3, None),
        ("mail.away", None, None, None, None, "the database does not answer."),
    ]
    told = [(each.key, each.text, each.advice or "") for each in of_handlers(states, limits)]
    assert [key for key, _, _ in told] == [
        "handler-late:billing.late",
        "handler-parked:mail.failed",
        "handler-late:webhooks.guest",
        "handler-unknown:mail.away",
    ]
    assert "7 changes are not handled yet" in told[0][1]
    assert "everstate handlers show mail.failed" in told[1][2]
    # All was read, and the receiver has not had it.
    assert "3 changes are not handled yet" in told[2][1]
    assert "everstate handlers show webhooks.guest" in told[2][2]
