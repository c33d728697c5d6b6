"""Fixtures for tests with real servers: one stack a run, topics and databases a test."""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from hypothesis import settings
from psycopg import sql

from dropped_database import drop_database
from everstate.config import Config, load
from everstate.errors import LocalStackError
from everstate.local import Stack
from java_settings import first_compiler_only, interpreted
from kit.settings import altered
from processes_seen import KEPT_FOLDERS
from running_stack import RunningStack
from tiers import TIER

pytest_plugins = ("second_look", "measuring")

if TYPE_CHECKING:
    from keep_cases import World
    from pyspark.sql import SparkSession

    from kit.view_postgres import PostgresKeptOrders

# Settings of the user's own servers would win over those of the tests.
_OURS = {"EVERSTATE_BENCH_DATA"}
for _name in [name for name in os.environ if name.startswith("EVERSTATE_")]:
    if _name not in _OURS:
        del os.environ[_name]

first_compiler_only()
# Machines that do much at once are slow, and that is no failure of a property.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

_UNIT = Path(__file__).parent / "unit"
_MARKS = {
    "stack": ("kafka", "postgres"),
    "database": ("postgres",),
    "spark": ("spark",),
    "cassandra": ("cassandra",),
    "connect": ("connect",),
    "mariadb": ("mariadb",),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--full`` and ``--kills``."""
    parser.addoption("--full", action="store_true", help="every test, with all counts in full")
    parser.addoption("--kills", type=int, default=None, help="how often each kind of kill happens")


def pytest_configure(config: pytest.Config) -> None:
    """Tell the test files, which are imported next, how much this run does."""
    TIER.is_full, TIER.kills = config.getoption("full"), config.getoption("kills")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the other tier; mark each test with the servers that its fixtures start."""
    if not TIER.is_full:
        left_out = [item for item in items if item.get_closest_marker("full")]
        items[:] = [item for item in items if not item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)
    for item in items:
        names: tuple[str, ...] = getattr(item, "fixturenames", ())
        for fixture, marks in _MARKS.items():
            if fixture in names:
                if item.path.is_relative_to(_UNIT):
                    raise pytest.UsageError(f"{item.nodeid}: a unit test has no JVM and no server")
                for mark in marks:
                    item.add_marker(mark)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """A test after which Spark's JVM is gone fails, and so do those after it, with its name."""
    result = yield
    # Imported by whoever started Spark: a test without it does not pay for the import.
    if "shared_spark" in sys.modules:
        sys.modules["shared_spark"].check(item.nodeid)
    return result


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A test that runs a verb in this process leaves the loggers to the next test as they were."""
    logger = logging.getLogger("everstate")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers, level, logger.propagate = before
    logger.setLevel(level)


@pytest.fixture(scope="session")
def stack_config(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Config:
    """A project of this run: two cores, small heaps, no fsync (fault tests start their own)."""
    folder = tmp_path_factory.mktemp("project")
    request.config.stash.setdefault(KEPT_FOLDERS, []).append(str(folder))
    return load(
        folder,
        local={"fsync": False},
        pipeline={"master": "local[2]", "driver_memory": "2g", "options": interpreted()},
    )


def _started(servers: Stack, name: str) -> Config:
    """Addresses of the servers; where they do not start, the test is skipped, but not in CI."""
    try:
        return servers.start()
    except LocalStackError as cause:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"{name} does not start here: {cause}")


@pytest.fixture(scope="session")
def stack(stack_config: Config) -> Iterator[RunningStack]:
    """Kafka and PostgreSQL for the whole run; in CI their absence is a failure."""
    servers = Stack(stack_config)
    config = _started(servers, "the local stack")
    try:
        yield RunningStack(config, servers, stack_config)
    finally:
        servers.stop()


@pytest.fixture(scope="session")
def cassandra(stack: RunningStack) -> Iterator[RunningStack]:
    """Cassandra beside the stack, started when the first test wants it.

    It needs Java 17, which a machine may not have; in CI its absence is a failure.
    """
    servers = Stack(altered(stack.config, cassandra={"local": True}))
    config = _started(servers, "cassandra")
    try:
        yield RunningStack(config, servers, stack.given)
    finally:
        servers.stop()


@pytest.fixture
def topic_prefix() -> str:
    """A prefix for topics that no other test has."""
    return f"t{uuid.uuid4().hex[:12]}"


@pytest.fixture
def database(stack: RunningStack) -> Iterator[str]:
    """A new database, dropped after the test; its connection string."""
    name = f"t{uuid.uuid4().hex[:12]}"
    with psycopg.connect(stack.dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    try:
        yield f"{stack.dsn.rpartition('/')[0]}/{name}"
    finally:
        drop_database(stack.dsn, name)


@pytest.fixture
def config(stack: RunningStack, database: str, topic_prefix: str) -> Config:
    """The running servers, with a database and topics of one test's own."""
    return altered(stack.config, store={"dsn": database}, log={"prefix": topic_prefix})


@pytest.fixture(scope="session")
def spark(stack_config: Config) -> Iterator[SparkSession]:
    """One Spark session for the whole run."""
    from everstate.pipeline.spark.session import spark_session
    from shared_spark import held

    session = spark_session(stack_config)
    with held():
        yield session
    session.stop()


@pytest.fixture
def world(
    stack_config: Config,
    stack: RunningStack,
    topic_prefix: str,
    database: str,
    spark: SparkSession,
    tmp_path: Path,
) -> World:
    """One test's log, database and archive, for the tests of the keeper."""
    from keep_cases import World

    config = load(
        tmp_path,
        log={"bootstrap_servers": stack.bootstrap_servers, "prefix": topic_prefix},
        store={"dsn": database},
        archive={"trigger_s": 1},
        pipeline=stack_config.pipeline.model_dump(),
    )
    return World(config, spark)


@pytest.fixture(scope="session")
def connect(stack: RunningStack) -> Iterator[RunningStack]:
    """The run's stack with Kafka Connect beside it."""
    yield from _with_server(stack, "connect")


@pytest.fixture(scope="session")
def mariadb(stack: RunningStack) -> Iterator[str]:
    """MariaDB for the whole run; the URL of its administrator."""
    for running in _with_server(stack, "mariadb"):
        yield running.servers.mariadb_url()


def _with_server(stack: RunningStack, name: str) -> Iterator[RunningStack]:
    """The run's stack and one more server, which is stopped at the end."""
    # The settings that the run began with: addresses that are filled in would be ours to keep.
    servers = Stack(stack.given, also=(name,))
    config = _started(servers, name)
    try:
        yield RunningStack(config, servers, stack.given)
    finally:
        servers.stop((name,))


@pytest.fixture
def kept(database: str) -> Iterator[PostgresKeptOrders]:
    """The view contract's views in a database of their own, at offset 0 of one partition."""
    from kit.view_postgres import PostgresKeptOrders

    with PostgresKeptOrders.installed(database) as views:
        views.reset(1)
        yield views
