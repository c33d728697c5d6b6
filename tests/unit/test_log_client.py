from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka import KafkaError

from everstate.config import Config, load
from everstate.errors import Fenced, InvalidConfig, LogError, Unavailable
from everstate.log.client import (
    READ_COMMITTED,
    changelog_bytes_max,
    client_settings,
    consumer_settings,
    dead_bytes_max,
    logger,
    producer_settings,
    raw_bytes_max,
    record_bytes_max,
    spark_options,
)
from everstate.log.outcome import translate
from everstate.log.positions import OpenTransactions
from everstate.log.topics import TopicNames


def config_with(folder: Path, **options: str) -> Config:
    dotted = {name.replace("__", "."): value for name, value in options.items()}
    return load(folder, log={"bootstrap_servers": "127.0.0.1:1", "options": dotted})


def test_topic_names_are_those_of_the_envelope() -> None:
    names = TopicNames("shop")
    assert names.changes("order") == "shop.order.changes.g1"
    assert names.changes("order", 2) == "shop.order.changes.g2"
    assert names.state("order") == "shop.order.state.g1"
    assert names.dead("order") == "shop.order.dead"
    assert names.dead_unknown == "shop.dead"
    assert names.progress == "shop.progress"


def test_each_stage_takes_what_the_stage_before_it_let_through(tmp_path: Path) -> None:
    config = config_with(tmp_path)
    publisher = producer_settings(config, "x", transactional_id="x")["message.max.bytes"]
    sizes = [
        config.log.message_bytes_max,
        record_bytes_max(config),
        changelog_bytes_max(config),
        dead_bytes_max(config),
        raw_bytes_max(config),
    ]
    assert sizes == sorted(set(sizes))
    assert changelog_bytes_max(config) < publisher < dead_bytes_max(config)


@pytest.mark.parametrize(
    "option",
    ["isolation.level", "check.crcs", "acks", "enable.idempotence", "partitioner", "group.id"],
)
def test_an_option_that_would_weaken_the_log_is_refused(tmp_path: Path, option: str) -> None:
    config = config_with(tmp_path, **{option.replace(".", "__"): "x"})
    for settings in (lambda: client_settings(config, "x"), lambda: spark_options(config)):
        with pytest.raises(InvalidConfig, match=option):
            settings()


def test_c5_every_reader_is_read_committed(tmp_path: Path) -> None:
    config = config_with(tmp_path)
    assert consumer_settings(config, "x")["isolation.level"] == READ_COMMITTED
    assert spark_options(config)["kafka.isolation.level"] == READ_COMMITTED


def test_c8_spark_fails_on_data_loss_and_makes_no_topics(tmp_path: Path) -> None:
    options = spark_options(config_with(tmp_path))
    assert options["failOnDataLoss"] == "true"
    assert options["kafka.allow.auto.create.topics"] == "false"
    assert int(options["kafka.max.partition.fetch.bytes"]) > 1_048_576


def test_c4_a_plain_producer_has_no_delivery_time_out(tmp_path: Path) -> None:
    settings = producer_settings(config_with(tmp_path), "x")
    assert settings["message.timeout.ms"] == 0
    assert settings["enable.gapless.guarantee"] is True


TLS = Path(__file__).parents[1] / "tls"


def security(folder: Path, own: dict[str, str] | None = None, **options: str) -> dict[str, str]:
    """What Spark's readers get of security options (``ssl__ca__location``), without the rest."""
    config = config_with(folder, **options)
    log = config.log.model_copy(update={"java_options": own or {}})
    found = spark_options(config.model_copy(update={"log": log}))
    names = ("kafka.ssl.", "kafka.sasl.", "kafka.security.")
    return {name[6:]: value for name, value in found.items() if name.startswith(names)}


def test_a_login_reaches_spark_in_javas_words(tmp_path: Path) -> None:
    options = security(
        tmp_path,
        security__protocol="SASL_SSL",
        sasl__mechanisms="SCRAM-SHA-256",
        sasl__username="ann",
        sasl__password='a"b\\c',
    )
    assert options["security.protocol"] == "SASL_SSL"
    assert options["sasl.mechanism"] == "SCRAM-SHA-256"
    jaas = options["sasl.jaas.config"]
    assert jaas.startswith("org.apache.kafka.common.security.scram.ScramLoginModule required")
    assert jaas.endswith('username="ann" password="a\\"b\\\\c";')


def test_certificates_reach_spark_as_text(tmp_path: Path) -> None:
    chain, key = (TLS / "certificate.pem").read_text().strip(), (TLS / "key.pem").read_text()
    both = tmp_path / "both.pem"
    both.write_text(f"{key}# a comment\n{chain}\n{chain}\n")
    files = security(
        tmp_path,
        security__protocol="SSL",
        ssl__ca__location=str(TLS / "certificate.pem"),
        ssl__certificate__location=str(both),
        ssl__key__location=str(both),
        ssl__endpoint__identification__algorithm="none",
    )
    assert files == {
        "security.protocol": "SSL",
        "ssl.truststore.type": "PEM",
        "ssl.truststore.certificates": chain,
        "ssl.keystore.type": "PEM",
        "ssl.keystore.certificate.chain": f"{chain}\n{chain}",
        "ssl.keystore.key": key.strip(),
        "ssl.endpoint.identification.algorithm": "",
    }
    texts = security(tmp_path, ssl__ca__pem=chain, ssl__certificate__pem=chain, ssl__key__pem=key)
    assert texts["ssl.truststore.certificates"] == texts["ssl.keystore.certificate.chain"] == chain
    keystore = security(tmp_path, ssl__keystore__location="k.p12", ssl__keystore__password="x")
    assert keystore["ssl.keystore.type"] == "PKCS12"


@pytest.mark.parametrize(
    "options",
    [
        {"ssl.crl.location": "secret-list.pem"},
        {"ssl.cipher.suites": "ECDHE-ECDSA-AES256-GCM-SHA384"},
        {"enable.ssl.certificate.verification": "false"},
        {"ssl.ca.location": "nowhere.pem"},
        {"ssl.ca.location": str(TLS)},
        {"ssl.ca.location": str(TLS / "key.pem")},
        {"ssl.key.location": str(TLS / "locked_key.pem")},
        {"ssl.key.location": str(TLS / "key.pem")},
        {"ssl.certificate.location": str(TLS / "certificate.pem")},
        {"sasl.mechanism": "OAUTHBEARER"},
        {"sasl.mechanism": "GSSAPI"},
        {"security.protocol": "SASL_SSL"},
        {"sasl.oauthbearer.client.secret": "hunter2"},
    ],
)
def test_a_security_option_that_spark_would_lose_is_refused(
    tmp_path: Path, options: dict[str, str]
) -> None:
    named = {name.replace(".", "__"): value for name, value in options.items()}
    with pytest.raises(InvalidConfig, match=r"log\.options") as refusal:
        security(tmp_path, None, **named)
    assert "hunter2" not in str(refusal.value)


def test_what_cannot_be_translated_may_be_said_in_javas_words(tmp_path: Path) -> None:
    own = {"sasl.jaas.config": "x required;", "sasl.login.callback.handler.class": "y"}
    options = security(
        tmp_path, own, sasl__mechanism="OAUTHBEARER", sasl__oauthbearer__client__secret="hunter2"
    )
    assert options == own | {"sasl.mechanism": "OAUTHBEARER"}
    for name in ("isolation.level", "key.deserializer"):
        with pytest.raises(InvalidConfig, match=name):
            security(tmp_path, {name: "x"})


def test_errors_of_the_driver_become_ours() -> None:
    assert isinstance(translate(KafkaError(KafkaError._TRANSPORT), "reading"), Unavailable)
    assert isinstance(translate(KafkaError(KafkaError._ALL_BROKERS_DOWN), "reading"), Unavailable)
    # What a broker answers that is away, or just back: both were once taken for lasting errors.
    assert isinstance(translate(KafkaError(KafkaError._NOENT), "asking"), Unavailable)
    assert isinstance(translate(KafkaError(KafkaError.UNKNOWN_LEADER_EPOCH), "asking"), Unavailable)
    assert isinstance(translate(KafkaError(KafkaError._FENCED), "committing"), Fenced)
    unknown = translate(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART), "reading topic x")
    assert type(unknown) is LogError
    assert unknown.message.startswith("reading topic x: ")


def test_a_broker_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    from everstate.log import topics

    config = config_with(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topics, "ADMIN_TIMEOUT_S", 0.3)
        with topics.Topics(config) as admin, pytest.raises(Unavailable, match="does not answer"):
            admin.ensure(["order"])


def test_c5_a_transaction_that_hangs_is_timed_until_the_stable_end_moves() -> None:
    watch = OpenTransactions()
    a, b = ("t", 0), ("t", 1)
    assert watch.observe({a: 5, b: 2}, {a: 9, b: 2}, 100.0) == {a: 0.0}
    assert watch.observe({a: 5, b: 2}, {a: 20, b: 2}, 160.0) == {a: 60.0}
    assert watch.observe({a: 12, b: 2}, {a: 20, b: 3}, 170.0) == {a: 0.0, b: 0.0}
    assert watch.observe({a: 20, b: 3}, {a: 20, b: 3}, 180.0) == {}


READING = """
import sys
from everstate.config import Config, LogConfig
from everstate.errors import Unavailable
from everstate.log.consumer import Consumer
from everstate.telemetry import configure_logging

config = Config(log=LogConfig(bootstrap_servers="127.0.0.1:1"))
if sys.argv[1] == "serve":
    configure_logging(config.logging, "serve")
with Consumer(config, timeout_s=0.5) as log:
    try:
        list(log.read("t", 0, 0, 1))
    except Unavailable:
        print("no answer")
"""


@pytest.mark.parametrize("process", ["a command", "serve"])
def test_lines_of_librdkafka_are_in_the_log_of_a_role_and_not_on_a_terminal(process: str) -> None:
    argv = [sys.executable, "-c", READING, process]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout == "no answer\n"
    lines = done.stderr.splitlines()
    assert bool(lines) is (process == "serve")
    assert all(" ERROR everstate.log.client FAIL [everstate-reader" in line for line in lines)


def test_what_librdkafka_repeats_is_said_once_in_ten_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr("everstate.log.client.time.monotonic", lambda: now[0])
    monkeypatch.setattr("everstate.log.client._last_logged_s", {})

    def said(message: str) -> bool:
        return bool(logger.filter(logging.LogRecord("x", 30, "", 1, message, None, None)))

    away = "FAIL [everstate-producer] connect failed: Connection refused"
    assert not said("CONFWARN [everstate-producer] gapless is experimental")
    assert [said(away), said(away), said("SESSTMOUT [x]")] == [True, False, True]
    now[0] = 110.5
    assert said(away)
