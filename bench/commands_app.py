"""Accounts that take deposits: what the bench of commands sends to; also its child processes."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import confluent_kafka
from confluent_kafka import TopicPartition
from pydantic import BaseModel

from everstate.app import App
from everstate.changes import Provenance
from everstate.config import Config, load
from everstate.log.topics import TopicNames
from everstate.sources.commands import CommandHandler

ENTITY = "account"
TELLER = Provenance(api_version="v1", service_name="bench", identifier="teller")

app = App("bench")


@app.entity(ENTITY, key="account_id", source="commands")
class Account(BaseModel):
    """An account with a few fields."""

    account_id: str
    owner: str
    country: str
    balance: int
    deposits: int


class Deposit(BaseModel):
    """Opens the account when there is none."""

    account_id: str
    amount: int


class Deposited(BaseModel):
    """Money came."""

    account_id: str
    amount: int


def decide(_account: Account | None, command: Deposit) -> Deposited:
    """Everything is welcome."""
    return Deposited(account_id=command.account_id, amount=command.amount)


def evolve(account: Account | None, fact: Deposited) -> Account:
    """The account after a deposit."""
    if account is None:
        return Account(
            account_id=fact.account_id,
            owner=f"owner of {fact.account_id}",
            country="DE",
            balance=fact.amount,
            deposits=1,
        )
    return Account(
        account_id=account.account_id,
        owner=account.owner,
        country=account.country,
        balance=account.balance + fact.amount,
        deposits=account.deposits + 1,
    )


app.commands(ENTITY, decide=decide, evolve=evolve, commands=[Deposit])


def bare_loop(config: Config, sample: dict[str, Any]) -> None:
    """The floor: read, write three records of the right sizes, commit; nothing is looked at."""
    names = TopicNames(config.log.prefix)
    servers = {"bootstrap.servers": config.bootstrap_servers}
    consumer: Any = confluent_kafka.Consumer(
        {
            **servers,
            "group.id": f"{config.log.prefix}-floor",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 100,
        }
    )
    producer: Any = confluent_kafka.Producer(
        {
            **servers,
            "transactional.id": f"{config.log.prefix}-floor",
            "retry.backoff.ms": 5,
            "compression.type": "lz4",
            "queue.buffering.max.messages": 200_000,
            "delivery.report.only.error": True,
        }
    )
    producer.init_transactions()
    consumer.subscribe([names.commands(ENTITY)])
    change, headers = sample["change"].encode(), [(n, v.encode()) for n, v in sample["headers"]]
    changes, state, replies = names.changes(ENTITY), names.state(ENTITY), names.replies(ENTITY)
    reply, wait_s = sample["reply"].encode(), config.commands.batch_wait_ms / 1000
    while True:
        first = consumer.poll(1)
        if first is None:
            continue
        batch = [first, *consumer.consume(config.commands.batch_commands_max - 1, wait_s)]
        producer.begin_transaction()
        ends: dict[int, int] = {}
        for message in batch:
            key, partition = message.key(), message.partition()
            producer.produce(changes, change, key, partition=partition, headers=headers)
            producer.produce(state, change, key, partition=partition, headers=headers)
            producer.produce(
                replies, reply, key, partition=partition, headers=message.headers() or []
            )
            ends[partition] = message.offset() + 1
        offsets = [TopicPartition(names.commands(ENTITY), each, at) for each, at in ends.items()]
        producer.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata())
        producer.commit_transaction()


def main() -> None:
    """Run a handler, or the bare loop when a sample of records is given, until killed."""
    folder, servers, prefix, *sample = sys.argv[1:]
    config = load(folder, log={"bootstrap_servers": servers, "prefix": prefix})
    if sample:
        bare_loop(config, json.loads(Path(sample[0]).read_text("utf-8")))
        return
    with CommandHandler(config, app) as handler:
        handler.run(threading.Event())


if __name__ == "__main__":
    main()
