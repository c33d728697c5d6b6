"""The peer of the bench of commands: the `eventsourcing` library."""

from __future__ import annotations

import time
from typing import Any

from eventsourcing.application import Application
from eventsourcing.domain import Aggregate, event
from psycopg.conninfo import conninfo_to_dict

from everstate.config import Config

SAVES = 3_000


class Account(Aggregate):
    """An account as that library has it."""

    balance: int

    @event("Opened")
    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.balance = 0

    @event("Deposited")
    def deposit(self, amount: int) -> None:
        """Money came."""
        self.balance += amount


def saves(module: str, config: Config, folder: str) -> float:
    """Saves a second of one application object."""
    env = {"PERSISTENCE_MODULE": f"eventsourcing.{module}", "AGGREGATE_CACHE_MAXSIZE": "1000"}
    if module == "sqlite":
        env["SQLITE_DBNAME"] = f"{folder}/accounts.db"
    else:
        parts = conninfo_to_dict(config.store_dsn)
        for ours, theirs in (
            ("dbname", "DBNAME"),
            ("host", "HOST"),
            ("port", "PORT"),
            ("user", "USER"),
            ("password", "PASSWORD"),
        ):
            env[f"POSTGRES_{theirs}"] = str(parts.get(ours) or "")
    application: Any = Application(env=env)
    accounts = [Account(owner=f"o{n}") for n in range(100)]
    for account in accounts:
        application.save(account)
    began = time.perf_counter()
    for index in range(SAVES):
        loaded: Any = application.repository.get(accounts[index % len(accounts)].id)
        loaded.deposit(amount=1)
        application.save(loaded)
    speed = SAVES / (time.perf_counter() - began)
    application.close()
    return speed
