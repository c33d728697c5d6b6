"""Kafka keeps the contract of stores of rows with a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar, Final

import pyarrow as pa
import pytest

from everstate.config import Config
from everstate.errors import InvalidConfig, ViewFailed
from everstate.local import kafka as local_kafka
from everstate.local.processes import free_port
from everstate.views.stores.kafka import _WRITERS, KafkaRows
from everstate.views.tables import KeptTable
from kit.row_store_contract import columns_of, told
from kit.served_kafka import ServedKafka
from kit.served_store import ServedStore
from kit.served_store_contract import ServedStoreContract, kept_in
from kit.settings import altered
from kit.tls_door import TRUSTED
from kit.view_oracle import accepted
from kit.view_orders import Log, history, logged, state_of
from tiers import counted

SECURED: Final = """\
listeners=PLAINTEXT://127.0.0.1:{{client}},SECURED://127.0.0.1:{port},\\
CONTROLLER://127.0.0.1:{{controller}}
advertised.listeners=PLAINTEXT://127.0.0.1:{{client}},SECURED://127.0.0.1:{port}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SECURED:SASL_SSL
listener.name.secured.ssl.keystore.type=PEM
listener.name.secured.ssl.keystore.location={keystore}
listener.name.secured.sasl.enabled.mechanisms=PLAIN
listener.name.secured.plain.sasl.jaas.config=\\
org.apache.kafka.common.security.plain.PlainLoginModule required user_ann="right";
"""
"""Settings of a broker with one more port, which has TLS and asks for a login."""


def forget(rows: pa.Table) -> None:
    """Let the writers of this process know nothing of the keys of rows."""
    for writer in _WRITERS.values():
        for known in writer.known.values():
            for key in rows["_key"].to_pylist():
                known.values.pop(key.encode(), None)


class ForgetsDeletions(KafkaRows):
    """A key that was deleted has no version any more, as after `delete.retention.ms`."""

    def write(self, table: KeptTable, rows: pa.Table, gone: pa.Table) -> None:
        super().write(table, rows, gone)
        forget(gone)


class OlderWins(KafkaRows):
    """The last write wins, and not the highest version."""

    def write(self, table: KeptTable, rows: pa.Table, gone: pa.Table) -> None:
        forget(rows)
        forget(gone)
        super().write(table, rows, gone)


class TestKafkaRows(ServedStoreContract):
    histories = counted(2, full=30)
    forgets_deletions = ForgetsDeletions
    older_wins = OlderWins
    refused: ClassVar[dict[str, pa.DataType]] = {
        "bytes": pa.binary(),
        "a list of bytes": pa.list_(pa.binary()),
        "nanoseconds": pa.timestamp("ns"),
    }

    @pytest.fixture
    def served(self, kafka_views: ServedKafka) -> ServedKafka:
        return kafka_views

    def test_a_server_with_tls_is_used_and_its_certificate_is_checked(
        self, served: ServedStore, own: Config
    ) -> None:
        """Its settings are those of the log (`log.options`); others are refused."""
        secured = served.settings(own, user="somebody")
        with pytest.raises(ConnectionError, match=r"in \[log.options\]"):
            KafkaRows(secured).drop("a")

    def test_without_an_address_the_reason_says_what_is_missing(self, served: ServedStore) -> None:
        with pytest.raises(InvalidConfig, match=served.unset):
            KafkaRows(Config()).drop("a")


# What only Kafka has


@pytest.fixture
def own(kafka_views: ServedKafka) -> Iterator[Config]:
    with kafka_views.own() as config:
        yield config


def shown(served: ServedKafka, config: Config) -> list[tuple[str, Any, dict[str, bytes]]]:
    """Key, region and headers of all records in the topic of the view, in their order."""
    topic = f"{config.log.prefix}.{config.views.schema_name}.opened"
    found = served.records(topic)
    return [(key, row and json.loads(row)["region"], dict(headers)) for key, row, headers in found]


def of_orders(**regions: str | None) -> Log:
    """A log of orders, each in a region, or open no longer."""
    states = {
        key: [state_of(key, region="north"), state_of(key, status="paid")]
        if region is None
        else [state_of(key, region=region)]
        for key, region in regions.items()
    }
    return logged(*(each for key, of in states.items() for each in history(key, of)))


def test_a_version_that_is_published_writes_what_differs_and_tombstones(
    kafka_views: ServedKafka, own: Config
) -> None:
    """Consumers stay in their topic, and get no row again that they have."""
    kept = kept_in(kafka_views, own.replaced("log", partitions=1))
    kept.keep(of_orders(a="north", b="north", c="north", never=None))
    kept.store.show("opened", 1)
    first = shown(kafka_views, own)
    assert first == [("a", "north", {}), ("b", "north", {}), ("c", "north", {})]
    kept.store.show("opened", 1)
    assert shown(kafka_views, own) == first
    kept.install(2, {0: 5, 1: 0})
    kept.load(accepted([of_orders(a="north", b="south")], {0: 2}), 2)
    kept.store.show("opened", 2)
    assert shown(kafka_views, own)[3:] == [("b", "south", {}), ("c", None, {})]
    gone = columns_of(("a", 2, None, None), present=False)
    kept.store.write(kept.table(1), gone)
    assert len(shown(kafka_views, own)) == 5
    kept.store.write(kept.table(2), columns_of(("never", 2, None, None), present=False))
    for _ in range(2):
        kept.store.write(kept.table(2), gone)
    assert shown(kafka_views, own)[5:] == [("a", None, {"_version": b"2"})]


@pytest.mark.parametrize("knows_lock", [True, False])
def test_a_writer_that_was_overtaken_writes_over_nothing_newer(
    kafka_views: ServedKafka, own: Config, knows_lock: bool
) -> None:
    """Another process has written since; one of another machine does not see the file either."""
    kept = kept_in(kafka_views, own)
    kept.store.write(kept.table(), columns_of(("a", 1, "north", Decimal(1))))
    before = dict(_WRITERS)
    _WRITERS.clear()
    kept.store.write(kept.table(), columns_of(("a", 3, "south", Decimal(3))))
    _WRITERS.update(before)
    if not knows_lock:
        (lock,) = (own.project.data_dir / "views").glob(f"*{own.views.schema_name}*")
        lock.write_text(str(before.popitem()[1].token), "utf-8")
        with pytest.raises(ViewFailed, match="another process took over"):
            kept.store.write(kept.table(), columns_of(("a", 2, "late", Decimal(2))))
    kept.store.write(kept.table(), columns_of(("a", 2, "late", Decimal(2))))
    assert kept.rows() == [("a", 3, "south", Decimal(3))]


def test_a_transaction_of_a_killed_writer_is_ended_by_the_next_one(
    kafka_views: ServedKafka, own: Config
) -> None:
    """Consumers would wait for it until its time-out otherwise."""
    kept = kept_in(kafka_views, own)
    kept.keep(told("a", "north"))
    kept.store.show("opened", 1)
    (writer,) = [each for (_, view), each in _WRITERS.items() if own.views.schema_name in view]
    writer._producer.begin()
    writer._producer.send_raw(writer._view, b"a", b"null")
    writer._producer.flush()
    _WRITERS.clear()
    kept.store.show("opened", 1)
    assert shown(kafka_views, own) == [("a", "north", {})]
    kept.check(told("a", "north"))


def test_tls_and_logins_are_those_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, keystore = free_port(set()), tmp_path / "keystore.pem"
    keystore.write_text(TRUSTED.with_name("key.pem").read_text() + TRUSTED.read_text())
    more = SECURED.format(port=port, keystore=keystore)
    monkeypatch.setattr(local_kafka, "_PROPERTIES", local_kafka._PROPERTIES + more)

    def secured(password: str, **options: str) -> Config:
        login = {"sasl.username": "ann", "sasl.password": password}
        secure = {"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN", **login, **options}
        log = {"bootstrap_servers": f"127.0.0.1:{port}", "options": secure}
        return altered(Config(), log=log, project={"data_dir": tmp_path / "data"})

    trusted = {"ssl.ca.location": str(TRUSTED)}
    with ServedKafka.alone(tmp_path) as served:
        kept, log = kept_in(served, secured("right", **trusted)), told("a", "north")
        kept.keep(log)
        kept.store.show("opened", 1)
        kept.check(log)
        for config in (secured("hunter2", **trusted), secured("right")):
            with pytest.raises(ViewFailed, match="the store tested failed: Unavailable") as refused:
                kept_in(served, config)
            assert "hunter2" not in str(refused.value)
