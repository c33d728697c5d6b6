"""Fixtures for tests with real servers: one stack a run, topics and databases a test."""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
import pytest
from hypothesis import settings

from dropped_database import own_database
from everstate.config import Config, load
from everstate.errors import LocalStackError
from everstate.local import Stack
from everstate.log.topics import Topics
from java_settings import first_compiler_only, interpreted
from kit.local_mariadb import mariadb_url
from kit.served_s3 import KEYS, LakeOfTest, ServedS3
from kit.settings import altered
from processes_seen import KEPT_FOLDERS
from running_stack import RunningStack
from tiers import TIER

pytest_plugins = ("second_look", "measuring")

if TYPE_CHECKING:
    from keep_cases import World
    from pyspark.sql import SparkSession

    from archive_cases import Shop
    from everstate.sources.stores.postgres import EntityStore
    from everstate.views.control import Control
    from kit.opensearch import OpenSearchServer
    from kit.served_cassandra import ServedCassandra
    from kit.served_kafka import ServedKafka
    from kit.served_mysql import MySqlServer
    from kit.served_redis import ServedRedis
    from kit.served_store import ServedStore
    from kit.view_postgres import PostgresKeptOrders
    from reading_cases import Orders

# Settings of the user's own servers would win over those of the tests.
_OURS = {"EVERSTATE_BENCH_DATA"}
for _name in [name for name in os.environ if name.startswith("EVERSTATE_")]:
    if _name not in _OURS:
        del os.environ[_name]
os.environ.update(KEYS)

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
    "cassandra_views": ("cassandra",),
    "kafka_views": ("kafka",),
    "connect": ("connect",),
    "mariadb": ("mariadb",),
    "mysql_server": ("mysql",),
    "opensearch": ("opensearch",),
    "s3": ("s3",),
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


_Server = TypeVar("_Server", bound="ServedStore")


def _alone(made: type[_Server], request: pytest.FixtureRequest, folder: Path) -> Iterator[_Server]:
    """The server of a store for the whole run; in CI its absence is a failure."""
    request.config.stash.setdefault(KEPT_FOLDERS, []).append(str(folder))
    try:
        with made.alone(folder, fsync=False) as server:
            yield server
    except LocalStackError as cause:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"{made.name} does not start here: {cause}")


@pytest.fixture(scope="session")
def redis(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedRedis]:
    """A Redis for the whole run."""
    from kit.served_redis import ServedRedis

    yield from _alone(ServedRedis, request, tmp_path_factory.mktemp("redis"))


@pytest.fixture(scope="session")
def cassandra_views(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedCassandra]:
    """A Cassandra for the whole run, which may be killed."""
    from kit.served_cassandra import ServedCassandra

    yield from _alone(ServedCassandra, request, tmp_path_factory.mktemp("cassandra"))


@pytest.fixture(scope="session")
def kafka_views(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedKafka]:
    """A Kafka for the whole run, which is not that of the log, and may be killed."""
    from kit.served_kafka import ServedKafka

    yield from _alone(ServedKafka, request, tmp_path_factory.mktemp("kafka"))


@pytest.fixture(scope="session")
def opensearch(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OpenSearchServer]:
    """OpenSearch for the whole run; everstate does not start one for its users.

    It needs a JDK of 17 to 23, which a machine may not have.
    """
    from kit.opensearch import OpenSearchServer

    yield from _alone(OpenSearchServer, request, tmp_path_factory.mktemp("opensearch"))


@pytest.fixture(scope="session")
def s3(
    request: pytest.FixtureRequest, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedS3]:
    """An object store for the whole run, which the run's Spark reaches.

    It is built with Go once, which takes two minutes; in CI its absence is a failure.
    """
    from everstate.pipeline.spark.object_store import reach_object_store

    folder = tmp_path_factory.mktemp("s3")
    request.config.stash.setdefault(KEPT_FOLDERS, []).append(str(folder))
    try:
        with ServedS3.alone(folder) as server:
            reach_object_store(spark, altered(server.config, archive=server.section()))
            yield server
    except LocalStackError as cause:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the object store does not start here: {cause}")


@pytest.fixture
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> LakeOfTest:
    """The lake of a test: a folder, or with the parameter `s3` a prefix of the object store."""
    if getattr(request, "param", "disk") == "s3":
        made: LakeOfTest = request.getfixturevalue("s3").lake()
        return made
    return LakeOfTest({"path": str(tmp_path / "archive")}, tmp_path / "archive")


@pytest.fixture
def topic_prefix() -> str:
    """A prefix for topics that no other test has."""
    return f"t{uuid.uuid4().hex[:12]}"


@pytest.fixture
def database(stack: RunningStack) -> Iterator[str]:
    """A new database, dropped after the test; its connection string."""
    with own_database(stack.dsn) as made:
        yield made


@pytest.fixture
def config(
    request: pytest.FixtureRequest, stack: RunningStack, topic_prefix: str, tmp_path: Path
) -> Config:
    """The running servers, with a folder, a database and topics of one test's own.

    ``@pytest.mark.settings(log={"partitions": 2})`` gives sections other values. Its ``topics`` are
    entity types whose topics are made, its ``command_topics`` those that take commands; with
    ``database=False`` there is no database.
    """
    mark = request.node.get_closest_marker("settings")
    sections: dict[str, Any] = dict(mark.kwargs) if mark else {}
    entities, commanded = sections.pop("topics", ()), sections.pop("command_topics", ())
    config = altered(stack.config, project={"data_dir": tmp_path / ".everstate"})
    config._folder = tmp_path
    if "connect" in request.fixturenames:
        # Its secrets and its log are in the folder of the servers.
        config = request.getfixturevalue("connect").config
    config = altered(config, log={"prefix": topic_prefix})
    if sections.pop("database", True):
        config = altered(config, store={"dsn": request.getfixturevalue("database")})
    config = altered(config, **sections)
    if entities or commanded:
        with Topics(config) as topics:
            topics.ensure(entities)
            topics.ensure_commands(commanded)
    return config


@pytest.fixture
def topics_deleted(config: Config) -> Iterator[None]:
    """The topics of a test that has many are deleted after it."""
    yield
    with Topics(config) as topics:
        topics.delete([each for each in topics.existing() if each.startswith(config.log.prefix)])


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
def world(config: Config, spark: SparkSession) -> World:
    """One test's log, database and archive, for the tests of the keeper."""
    from keep_cases import World

    return World(altered(config, archive={"trigger_s": 1}), spark)


@pytest.fixture(scope="session")
def connect(stack: RunningStack) -> Iterator[RunningStack]:
    """The run's stack with Kafka Connect beside it."""
    yield from _with_server(stack, "connect")


@pytest.fixture(scope="session")
def mariadb(stack: RunningStack) -> Iterator[str]:
    """MariaDB for the whole run; the URL of its administrator."""
    for running in _with_server(stack, "mariadb"):
        yield mariadb_url(running.servers, running.config.project.data_dir)


@pytest.fixture(scope="session")
def mysql_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MySqlServer]:
    """MySQL for the whole run, beside the stack."""
    from kit.served_mysql import MySqlServer

    with MySqlServer.alone(tmp_path_factory.mktemp("mysql")) as server:
        yield server


@pytest.fixture(scope="session")
def mysql(mysql_server: MySqlServer) -> str:
    """The URL of the administrator of that server."""
    return mysql_server.url


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


@pytest.fixture
def orders(config: Config, database: str) -> Iterator[Orders]:
    """A log of orders, and their views, which the test itself keeps."""
    from everstate.serving.connection import close_pools
    from kit.view_postgres import PostgresKeptOrders
    from reading_cases import PARTITIONS, Orders

    views = {"dsn": database, "schema_name": PostgresKeptOrders.schema_name}
    with PostgresKeptOrders.installed(database) as kept:
        yield Orders(altered(config, log={"partitions": PARTITIONS}, views=views), kept)
    close_pools()


@pytest.fixture
def store(config: Config) -> Iterator[EntityStore]:
    """The installed store of the entity type of the stores' contract."""
    from everstate.sources.stores.postgres import EntityStore
    from everstate.testing.store_contract import ORDER

    with EntityStore(config, ORDER) as made:
        made.install()
        yield made


@pytest.fixture
def control(world: World) -> Iterator[Control]:
    """The registry of the world's views."""
    from everstate.views.control import Control

    with psycopg.connect(world.config.views_dsn, autocommit=True) as connection:
        yield Control(connection, world.config.views.schema_name)


@pytest.fixture
def service(config: Config) -> Iterator[psycopg.Connection[Any]]:
    """A connection of the service that emits facts; its tables and its outbox are made."""
    from outbox_service import make_service

    make_service(config.store_dsn)
    with psycopg.connect(config.store_dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture
def shop(
    stack: RunningStack, spark: SparkSession, topic_prefix: str, lake: LakeOfTest
) -> Iterator[Shop]:
    """A changelog of orders, and an archive of its own."""
    from archive_cases import open_shop

    with open_shop(stack.config, spark, topic_prefix, lake) as made:
        yield made
