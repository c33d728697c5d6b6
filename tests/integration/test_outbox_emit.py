"""`emit` in a service's own transaction: dense versions, the chain, rights, what is refused."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.rows import dict_row
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from everstate.changes import ChangeCodec, DomainEvent, EntityType, Kind, Provenance
from everstate.config import Config
from everstate.errors import (
    ChainBroken,
    ChangeTooLarge,
    InvalidChange,
    InvalidConfig,
    MissingProvenance,
    NotAllowed,
    NotRegistered,
)
from everstate.sources.outbox import (
    Installation,
    emit,
    emit_async,
    emit_event,
    emit_sqlalchemy,
    install_outbox,
    read_emitters,
    read_registered,
)
from everstate.sources.outbox.compose import Composer, read_rows
from everstate.sources.outbox.pending import Pending, Transaction
from everstate.sources.stores.postgres import EntityStore
from kit.settings import altered
from outbox_service import CLICK, PURCHASE, SHOP, Click, Purchase

PLAIN = """
SELECT everstate_store.emit('purchase', {key}, {before}, {after},
    '{{"apiVersion": "v1", "serviceName": "shop", "identifier": "psql"}}')
"""

DEEP = "[" * 101 + "]" * 101


def outbox(connection: psycopg.Connection[Any]) -> list[tuple[Any, ...]]:
    query = "SELECT key, version, kind, before, after FROM everstate_store.outbox ORDER BY id"
    return connection.execute(query).fetchall()


def purchase(total: int, key: str = "a") -> Purchase:
    return Purchase(id=key, total=total)


def test_versions_are_dense_and_the_chain_holds(service: psycopg.Connection[Any]) -> None:
    one, two = purchase(1), purchase(2)
    for before, after in ((None, one), (one, two), (two, None), (None, one)):
        emit(service, PURCHASE, before=before, after=after, provenance=SHOP)
    rows = outbox(service)
    assert [row[1] for row in rows] == [1, 2, 3, 4]
    assert [row[2] for row in rows] == ["created", "updated", "deleted", "created"]
    assert [row[3] for row in rows[1:]] == [row[4] for row in rows[:-1]]


def test_it_says_what_was_written(service: psycopg.Connection[Any]) -> None:
    written = emit(
        service,
        PURCHASE,
        "a",
        before=None,
        after={"id": "a", "total": 1},
        provenance=SHOP,
        event=DomainEvent(type="Bought", data={"by": "web"}),
        occurred_at=datetime.fromisoformat("2026-11-21T08:00:00+01:00"),
    )
    assert (written.key, written.version, written.kind) == ("a", 1, Kind.CREATED)
    row = service.execute(
        "SELECT change_id, event, occurred_at, provenance, schema_version,"
        " xid = pg_current_xact_id_if_assigned() FROM everstate_store.outbox"
    ).fetchone()
    assert row is not None
    assert row[0] == written.change_id
    assert row[0].version == 7
    assert json.loads(row[1]) == {"type": "Bought", "data": {"by": "web"}}
    assert row[2] == "2026-11-21T08:00:00+01:00"
    assert json.loads(row[3])["service_name"] == "shop"


def test_a_change_of_a_rolled_back_transaction_or_savepoint_is_not_there(
    service: psycopg.Connection[Any],
) -> None:
    with service.transaction():
        emit(service, PURCHASE, before=None, after=purchase(1), provenance=SHOP)
        with service.transaction():
            emit(service, PURCHASE, before=purchase(1), after=purchase(2), provenance=SHOP)
            raise psycopg.Rollback
    with service.transaction():
        emit(service, PURCHASE, before=purchase(1), after=purchase(3), provenance=SHOP)
        raise psycopg.Rollback
    emit(service, PURCHASE, before=purchase(1), after=purchase(4), provenance=SHOP)
    assert [(row[1], json.loads(row[4])["total"]) for row in outbox(service)] == [(1, 1), (2, 4)]


def test_equal_states_are_no_change_unless_an_event_says_so(
    service: psycopg.Connection[Any],
) -> None:
    emit(service, PURCHASE, before=None, after=purchase(1), provenance=SHOP)
    same = emit(service, PURCHASE, before=purchase(1), after=purchase(1), provenance=SHOP)
    assert (same.version, same.changed) == (1, False)
    looked = DomainEvent(type="Looked")
    said = emit(
        service, PURCHASE, before=purchase(1), after=purchase(1), provenance=SHOP, event=looked
    )
    assert (said.version, said.kind) == (2, Kind.UPDATED)


def test_law_3_a_before_that_was_never_emitted_is_refused(
    service: psycopg.Connection[Any],
) -> None:
    emit(service, PURCHASE, before=None, after=purchase(1), provenance=SHOP)
    for before in (None, purchase(7)):
        with pytest.raises(ChainBroken, match="not the state that was emitted last"):
            emit(service, PURCHASE, before=before, after=purchase(2), provenance=SHOP)
    with pytest.raises(ChainBroken, match="version 0"):
        emit(service, PURCHASE, before=purchase(1, "b"), after=None, provenance=SHOP)
    assert len(outbox(service)) == 1


def test_law_3_mend_adds_the_change_that_nobody_emitted(service: psycopg.Connection[Any]) -> None:
    emit(service, PURCHASE, before=None, after=purchase(1), provenance=SHOP)
    emit(service, PURCHASE, before=purchase(7), after=purchase(8), provenance=SHOP, chain="mend")
    emit(service, PURCHASE, before=purchase(5, "old"), after=None, provenance=SHOP, chain="mend")
    steps = [
        (row[0], row[1], row[2], *(s and json.loads(s)["total"] for s in row[3:]))
        for row in outbox(service)
    ]
    assert steps == [
        ("a", 1, "created", None, 1),
        ("a", 2, "updated", 1, 7),
        ("a", 3, "updated", 7, 8),
        ("old", 1, "created", None, 5),
        ("old", 2, "deleted", 5, None),
    ]
    reasons = service.execute(
        "SELECT provenance::json ->> 'reason' FROM everstate_store.outbox ORDER BY id"
    ).fetchall()
    mended = "written without emit"
    assert [reason for (reason,) in reasons] == [None, mended, None, mended, None]


def test_C1_writers_of_one_key_get_versions_in_the_order_of_their_commits(
    service: psycopg.Connection[Any], database: str
) -> None:
    service.execute("INSERT INTO purchase (id, total) VALUES ('a', 0)")
    emit(service, PURCHASE, before=None, after=purchase(0), provenance=SHOP)

    def add(_: int) -> None:
        with psycopg.connect(database) as own:
            row = own.execute("SELECT total FROM purchase WHERE id = 'a' FOR UPDATE").fetchone()
            assert row is not None
            own.execute("UPDATE purchase SET total = total + 1")
            before, after = purchase(row[0]), purchase(row[0] + 1)
            emit(own, PURCHASE, before=before, after=after, provenance=SHOP)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(add, range(60)))
    assert [(r[1], json.loads(r[4])["total"]) for r in outbox(service)] == [
        (n + 1, n) for n in range(61)
    ]


def test_two_that_create_one_key_at_once_are_one_creation_and_one_refusal(
    service: psycopg.Connection[Any], database: str
) -> None:
    other = psycopg.connect(database)
    emit(other, PURCHASE, before=None, after=purchase(1), provenance=SHOP)
    refused: list[BaseException] = []

    def create() -> None:
        try:
            emit(service, PURCHASE, before=None, after=purchase(2), provenance=SHOP)
        except ChainBroken as error:
            refused.append(error)

    waiting = threading.Thread(target=create)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    other.commit()
    other.close()
    waiting.join(10)
    assert len(refused) == 1
    assert len(outbox(service)) == 1


def test_a_store_and_emit_count_one_version(
    service: psycopg.Connection[Any], stack_config: Config, database: str
) -> None:
    """Moving the writes into the store later goes on at the last version + 1."""
    emit(service, PURCHASE, before=None, after=purchase(1), provenance=SHOP)
    with EntityStore(altered(stack_config, store={"dsn": database}), PURCHASE) as store:
        assert store.get("a") == (purchase(1), 1)
        assert store.put(purchase(2), provenance=SHOP, expected_version=1).version == 2
    assert emit(service, PURCHASE, before=purchase(2), after=None, provenance=SHOP).version == 3


def test_what_is_no_change_is_refused_before_the_transaction_is_touched(
    service: psycopg.Connection[Any],
) -> None:
    nobody = Provenance(api_version="v1", service_name="", identifier="x")
    with service.transaction():
        with pytest.raises(InvalidChange, match="total"):
            emit(service, PURCHASE, before=None, after={"id": "a"}, provenance=SHOP)
        with pytest.raises(InvalidChange, match="both None"):
            emit(service, PURCHASE, before=None, after=None, provenance=SHOP)
        with pytest.raises(InvalidChange, match="different"):
            emit(service, PURCHASE, "b", before=None, after=purchase(1), provenance=SHOP)
        with pytest.raises(MissingProvenance):
            emit(service, PURCHASE, before=None, after=purchase(1), provenance=nobody)
        with pytest.raises(InvalidChange, match="UTC offset"):
            emit(
                service, PURCHASE, before=None, after=purchase(1), provenance=SHOP,
                occurred_at=datetime(2026, 1, 1),  # noqa: DTZ001
            )  # fmt: skip
        nul = Purchase(id="a", total=1, note="\0")
        with pytest.raises(InvalidChange, match="NUL"):
            emit(service, PURCHASE, before=None, after=nul, provenance=SHOP)
        emit(service, PURCHASE, before=None, after=purchase(1), provenance=SHOP)
    assert len(outbox(service)) == 1


def test_what_the_database_refuses_is_named(service: psycopg.Connection[Any]) -> None:
    large = Purchase(id="a", total=1, note="x" * 1_100_000)
    with pytest.raises(ChangeTooLarge, match=r"1,048,576") as caught:
        emit(service, PURCHASE, before=None, after=large, provenance=SHOP)
    assert caught.value.size > 1_100_000
    ghost = EntityType("ghost", Purchase, "id")
    with pytest.raises(NotRegistered, match="ghost"):
        emit(service, ghost, before=None, after=purchase(1), provenance=SHOP)
    with pytest.raises(InvalidChange, match="emit_event"):
        emit(service, CLICK, before=None, after=Click(id="c", page="p"), provenance=SHOP)
    with pytest.raises(InvalidChange, match=r"everstate_store\.emit"):
        emit_event(service, PURCHASE, purchase(1), provenance=SHOP)
    service.execute("DROP SCHEMA everstate_store CASCADE")
    with pytest.raises(NotRegistered, match="not installed"):
        emit(service, PURCHASE, before=None, after=purchase(1), provenance=SHOP)


def test_plain_sql_is_the_same_way_in(service: psycopg.Connection[Any]) -> None:
    def plain(before: str | None, after: str | None, key: str | None = "a") -> str:
        values = {"key": key, "before": before, "after": after}
        literals = {name: sql.Literal(value) for name, value in values.items()}
        row = service.execute(sql.SQL(PLAIN).format(**literals)).fetchone()
        assert row is not None
        return ",".join(row[0][:2])

    one, two = '{"id": "a", "total": 1, "note": ""}', '{"id": "a", "total": 2, "note": ""}'

    assert plain(None, one) == "1,created"
    # Numbers and the order of names do not matter: it is compared as JSON.
    assert plain('{"total": 1.0, "note": "", "id": "a"}', two) == "2,updated"
    assert plain(two, "null") == "3,deleted"
    for before, after, key, code, field in (
        (None, '{"id": "a", "note": ""}', "a", "EV001", "after.total"),
        (None, "[1]", "a", "EV001", "after"),
        (None, None, "a", "EV001", "after"),
        (None, one, None, "EV001", "key"),
        (None, one, "", "EV001", "key"),
        (None, one, "..", "EV001", "key"),
        (None, one, "k" * 2049, "EV001", "key"),
        (one, None, "a", "EV003", "before"),
    ):
        with pytest.raises(psycopg.Error) as caught:
            plain(before, after, key)
        assert (caught.value.diag.sqlstate, caught.value.diag.column_name) == (code, field)
    for broken in ('{"id": "a", "total": 1, "note": "\\u0000"}', "{"):
        with pytest.raises(psycopg.DataError):
            plain(None, broken)
    assert len(outbox(service)) == 3


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ('provenance => \'{"apiVersion": "v1"}\'', "provenance.serviceName"),
        (
            'provenance => \'{"apiVersion":"1","serviceName":"s","identifier":"i","who":"x"}\'',
            "provenance.who",
        ),
        ("event => '{\"data\": 1}'", "event"),
        ("event => '{\"type\": 5}'", "event"),
        ('event => \'{"type": 5, "type": "Paid"}\'', "event"),
        ('event => \'{"type": "Paid", "data": -1e400}\'', "event"),
        (f'event => \'{{"type": "Paid", "data": {DEEP}}}\'', "event"),
        (f'event => \'{{"type": "{"x" * 16_384}"}}\'', "headers"),
        (f'after => \'{{"id": {DEEP}, "id": "a", "total": 1, "note": ""}}\'', "after"),
        ('after => \'{"id": "a", "total": 1, "note": "", "more": 1e309}\'', "after.more"),
        ('after => \'{"id": "a", "total": 1e309, "note": ""}\'', "after.total"),
        ("occurred_at => '2026-01-01 00:00'", "occurredAt"),
        ("occurred_at => '2026-01-01T00:00:00'", "occurredAt"),
        ("occurred_at => '2026-01-01T23:59:60Z'", "occurredAt"),
        ("occurred_at => '2026-01-01T24:00:00Z'", "occurredAt"),
        ("occurred_at => '2026-01-01T10:00:00+05:99'", "occurredAt"),
        ("occurred_at => '0001-01-01T00:00:00+12:00'", "occurredAt"),
        ("occurred_at => '9999-12-31T23:59:59-00:01'", "occurredAt"),
        ("chain => 'loose'", "chain"),
    ],
)
def test_plain_sql_names_the_field_that_is_wrong(
    service: psycopg.Connection[Any], change: str, field: str
) -> None:
    given = "" if change.startswith("provenance") else (
        'provenance => \'{"apiVersion":"1","serviceName":"s","identifier":"i"}\', '
    )  # fmt: skip
    after = "" if change.startswith("after") else (
        'after => \'{"id": "a", "total": 1, "note": ""}\', '
    )  # fmt: skip
    query = (
        "SELECT everstate_store.emit(entity => 'purchase', key => 'a', before => NULL,"
        f" {after}{given}{change})"
    )
    with pytest.raises(psycopg.Error) as caught:
        service.execute(query.encode())
    assert (caught.value.diag.sqlstate, caught.value.diag.column_name) == ("EV001", field)


def test_what_plain_sql_may_emit_the_log_takes(
    service: psycopg.Connection[Any], stack_config: Config
) -> None:
    """The other side of the cases above: what the function accepts becomes a message."""
    nested = "[" * 99 + "]" * 99
    moments = ("2026-01-01T23:59:59.999999Z", "0001-01-01T00:00:00Z", "2026-01-01T00:00:00-15:59")
    events = (
        "null",
        '{"type": "Paid"}',
        f'{{"type": "Paid", "data": {nested}}}',
        f'{{"type": "{"x" * 16_000}", "data": [1e308, -1e-400, {"9" * 308}]}}',
        f'{{"type": "Paid", "data": [{",".join(["[{}]"] * 300)}, "{"[" * 300}\\\\"]}}',
    )
    for number, (moment, event) in enumerate(product(moments, events)):
        service.execute(
            "SELECT everstate_store.emit('purchase', %s, NULL, %s::json, %s::json, %s::json, %s)",
            [
                str(number),
                f'{{"id": "{number}", "total": 1, "note": ""}}',
                '{"apiVersion": "v1", "serviceName": "shop", "identifier": "psql"}',
                *(event, moment),
            ],
        )
    listed = [
        Pending._make(row)
        for row in service.execute(
            "SELECT id, xid::text, entity, key, bytes FROM everstate_store.outbox_pending"
        ).fetchall()
    ]
    rows = read_rows(service, [(row.id, row.id) for row in listed])
    transactions = [Transaction(row.xid, [row]) for row in listed]
    records = Composer(stack_config, [PURCHASE]).compose(transactions, rows)
    read = [ChangeCodec(PURCHASE).decode(record.value or b"") for record in records]
    assert len({change.key for change in read}) == len(moments) * len(events)
    assert max(row.bytes for row in listed) > 16_000, "the relay counts the bytes of events too"


def test_a_cursor_of_any_row_shape_will_do(service: psycopg.Connection[Any]) -> None:
    with service.cursor(row_factory=dict_row) as cursor:
        made = emit(cursor, PURCHASE, before=None, after=purchase(1), provenance=SHOP)
    service.row_factory = dict_row
    moved = emit(service, PURCHASE, before=purchase(1), after=purchase(2), provenance=SHOP)
    assert (made.version, moved.version) == (1, 2)


def test_an_asynchronous_connection_emits(service: psycopg.Connection[Any], database: str) -> None:
    async def work() -> int:
        async with await psycopg.AsyncConnection.connect(database) as connection:
            written = await emit_async(
                connection, PURCHASE, before=None, after=purchase(1), provenance=SHOP
            )
            with pytest.raises(ChainBroken):
                await emit_async(
                    connection, PURCHASE, before=None, after=purchase(1), provenance=SHOP
                )
            return written.version

    assert asyncio.run(work()) == 1
    assert outbox(service) == []


def test_a_sqlalchemy_session_commits_its_own_rows_and_the_change_together(
    service: psycopg.Connection[Any], database: str
) -> None:
    engine = create_engine(database.replace("postgresql://", "postgresql+psycopg://"))
    with Session(engine) as session:
        written = emit_sqlalchemy.emit(
            session, PURCHASE, before=None, after=purchase(1), provenance=SHOP
        )
        assert written.version == 1
        assert outbox(service) == []
        session.commit()
    with Session(engine) as session:
        emit_sqlalchemy.emit(session, PURCHASE, before=purchase(1), after=None, provenance=SHOP)
        session.rollback()
        with pytest.raises(ChainBroken):
            emit_sqlalchemy.emit(session, PURCHASE, before=None, after=None or purchase(2),
                                 provenance=SHOP)  # fmt: skip
    engine.dispose()
    assert len(outbox(service)) == 1


def test_installing_is_idempotent_and_does_not_wait_for_a_writer(
    service: psycopg.Connection[Any], database: str
) -> None:
    wanted = Installation(entity_types=[PURCHASE], message_bytes_max=9_999)
    with psycopg.connect(database) as writer:
        emit(writer, PURCHASE, before=None, after=purchase(1), provenance=SHOP)
        install_outbox(service, wanted)
        install_outbox(service, wanted)
    assert [each.entity for each in read_registered(service)] == ["click", "purchase"]
    limit = service.execute(
        "SELECT message_bytes_max FROM everstate_store.registered WHERE entity = 'purchase'"
    ).fetchone()
    assert limit == (9_999,)


def test_the_printed_sql_makes_the_same_outbox(database: str) -> None:
    wanted = Installation(entity_types=[PURCHASE, CLICK], events=["click"])
    with psycopg.connect(database, autocommit=True) as connection:
        for _ in range(2):
            connection.execute(wanted.script().encode())
        emit(connection, PURCHASE, before=None, after=purchase(1), provenance=SHOP)
        assert [each.is_event for each in read_registered(connection)] == [True, False]


@pytest.fixture
def roles(service: psycopg.Connection[Any], database: str) -> Iterator[tuple[str, str]]:
    """Two login roles, and the rights that installing gives them."""
    name = database.rpartition("/")[2]
    names = (f"{name}_shop", f"{name}_relay")
    for role in names:
        service.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'x'").format(sql.Identifier(role)))
    wanted = Installation(
        entity_types=[PURCHASE], roles={names[0]: ["shop"]}, relay_roles=[names[1]]
    )
    install_outbox(service, wanted)
    yield names
    for role in names:
        service.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(role)))
        service.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))


def as_role(database: str, role: str) -> str:
    address = database.partition("@")[2]
    return f"postgresql://{role}:x@{address}"


def test_a_services_role_may_emit_and_nothing_else(
    service: psycopg.Connection[Any], database: str, roles: tuple[str, str]
) -> None:
    with psycopg.connect(as_role(database, roles[0]), autocommit=True) as shop:
        emit(shop, PURCHASE, before=None, after=purchase(1), provenance=SHOP)
        for query in (
            "SELECT * FROM everstate_store.outbox",
            "DELETE FROM everstate_store.outbox_pending",
            "INSERT INTO everstate_store.purchase VALUES ('x', 1, NULL, gen_random_uuid(), now())",
            "UPDATE everstate_store.registered SET required = '{}'",
            "SELECT everstate_store.append(NULL, 'a', 9, NULL, '{}', '{}', NULL, '', NULL)",
            "CREATE TABLE everstate_store.mine (a int)",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                shop.execute(query)
        with pytest.raises(NotAllowed, match="permission denied"):
            install_outbox(shop, Installation(entity_types=[PURCHASE]))
    assert len(outbox(service)) == 1


def test_a_services_role_names_its_own_services_only(
    service: psycopg.Connection[Any], database: str, roles: tuple[str, str]
) -> None:
    """Any role of a service could write in the name of any other one."""
    shop_role = roles[0]
    as_till = Provenance(api_version="v1", service_name="till", identifier="t-1")
    visit = Click(id="c-1", page="/")
    with psycopg.connect(as_role(database, shop_role), autocommit=True) as shop:
        with pytest.raises(NotAllowed, match=r'may not emit as service "till"') as refused:
            emit(shop, PURCHASE, before=None, after=purchase(1), provenance=as_till)
        assert f"--role {shop_role}=till" in str(refused.value.advice)
        with pytest.raises(NotAllowed, match="till"):
            emit_event(shop, CLICK, visit, provenance=as_till)
        # Another role's name does not help: who logged in counts.
        shop.execute("SET ROLE everstate_emitter")
        with pytest.raises(NotAllowed):
            emit(shop, PURCHASE, before=None, after=purchase(1), provenance=as_till)
        shop.execute("RESET ROLE")
        install_outbox(service, Installation(entity_types=[], roles={shop_role: ["till"]}))
        emit(shop, PURCHASE, before=None, after=purchase(1), provenance=as_till)
        with pytest.raises(NotAllowed, match="shop"):
            emit(shop, PURCHASE, before=purchase(1), after=purchase(2), provenance=SHOP)
    assert read_emitters(service) == {shop_role: ["till"]}
    # Who installed it may name any.
    emit(service, PURCHASE, before=purchase(1), after=purchase(2), provenance=SHOP)
    assert len(outbox(service)) == 2


def test_a_role_that_is_not_there_is_named_and_nothing_is_made(
    service: psycopg.Connection[Any], database: str
) -> None:
    other = EntityType("other", Purchase, "id")
    with pytest.raises(InvalidConfig, match="nobody_here"):
        install_outbox(service, Installation(entity_types=[other], roles={"nobody_here": ["shop"]}))
    assert {each.entity for each in read_registered(service)} == {"click", "purchase"}


def test_times_are_the_databases_own_when_none_is_given(service: psycopg.Connection[Any]) -> None:
    began = datetime.now(UTC)
    emit(service, PURCHASE, before=None, after=purchase(1), provenance=SHOP)
    row = service.execute("SELECT occurred_at, recorded_at FROM everstate_store.outbox").fetchone()
    assert row is not None
    occurred = datetime.fromisoformat(row[0])
    assert abs((occurred - began).total_seconds()) < 30
    assert abs((row[1] - began).total_seconds()) < 30


def test_the_time_of_recording_never_runs_back_behind_a_writer_whose_clock_is_ahead(
    service: psycopg.Connection[Any],
) -> None:
    emit(service, PURCHASE, before=None, after=purchase(1), provenance=SHOP)
    ahead = "UPDATE everstate_store.{} SET recorded_at = recorded_at + interval '30 s'"
    for table in ("purchase", "outbox"):
        service.execute(ahead.format(table).encode())
    emit(service, PURCHASE, before=purchase(1), after=None, provenance=SHOP)
    emit(service, PURCHASE, before=None, after=purchase(3), provenance=SHOP)
    query = "SELECT recorded_at FROM everstate_store.outbox ORDER BY id"
    recorded_at = [moment for (moment,) in service.execute(query)]
    assert len(recorded_at) == 3
    assert recorded_at == sorted(recorded_at)


def test_a_time_that_is_far_ahead_is_refused_and_the_installation_says_how_far(
    service: psycopg.Connection[Any],
) -> None:
    """One change of 2099 would hide an entity from every question about a time before."""
    later = datetime.now(UTC) + timedelta(hours=30)
    with pytest.raises(InvalidChange, match=r"occurredAt.*more than 24 hours ahead"):
        emit(service, PURCHASE, before=None, after=purchase(1), provenance=SHOP, occurred_at=later)
    service.rollback()
    install_outbox(service, Installation(entity_types=[PURCHASE], ahead_hours=48))
    service.commit()
    emit(service, PURCHASE, before=None, after=purchase(1), provenance=SHOP, occurred_at=later)
