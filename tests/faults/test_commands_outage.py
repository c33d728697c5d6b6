"""A broker that goes away under load: handlers and clients wait, and nothing is lost or doubled."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from test_commands_kill import Load, progress

import command_cases as bank
from everstate.config import Config
from everstate.sources.commands import CommandHandler
from everstate.testing.command_checker import check_commands, read_command_log
from kit.settings import commanding
from running_stack import RunningStack
from tiers import counted

pytestmark = commanding(bank.ENTITY)

AWAY_S = counted(3.0, full=20.0)


@pytest.mark.full
@pytest.mark.slow
def test_commands_outlive_a_broker_that_is_killed_and_comes_back(
    stack: RunningStack, config: Config
) -> None:
    stop, clients = threading.Event(), Load(config)
    with CommandHandler(config, bank.app) as handler, ThreadPoolExecutor(3) as pool:
        handling = pool.submit(handler.run, stop)
        sending = [pool.submit(clients.client, number) for number in range(2)]
        try:
            progress(clients, 50, handling)
            stack.servers.kill("kafka")
            time.sleep(AWAY_S)
            stack.servers.restart("kafka")
            progress(clients, 50, handling)
            clients.stop.set()
            for each in sending:
                each.result(120)
        finally:
            clients.stop.set()
            stop.set()
        handling.result(60)
    log = read_command_log(config, bank.ENTITY)
    assert check_commands(bank.GROUP, log, clients.history).problems == []
