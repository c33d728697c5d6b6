"""Checks of a project's servers for `everstate doctor`: versions, rights, topics, clocks, disk."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from everstate.app import App
from everstate.config import Config
from everstate.errors import EverstateError, Unavailable
from everstate.findings import Finding
from everstate.local import disk_check
from everstate.log.inspecting import Brokers, TopicFacts, brokers, clock_ahead_s, topic_facts
from everstate.log.lag import is_reachable
from everstate.log.topics import TopicDifference, TopicNames, Topics
from everstate.postgres import Connection, connect_views, identifier, settings_of

POSTGRES_MIN: Final = 16
"""Oldest version with `UNIQUE NULLS NOT DISTINCT`, which the tables of views need."""
KAFKA_MIN: Final = (2, 8)
"""Oldest version whose topics have ids, by which a topic that was made again is recognised."""
SKEW_S_MAX: Final = 2.0
_CONNECTIONS_MIN: Final = 20
STORE_SCHEMA: Final = "everstate_store"
_NAMES_MAX: Final = 3

Clock = Callable[[], float]


def server_checks(
    config: Config, app: App | None, *, probe: bool, clock: Clock = time.time
) -> Iterator[Finding]:
    """Check the servers whose addresses are known; each costs some requests.

    ``probe``: also create a topic, write a record to it, and delete it.
    """
    if config.log.bootstrap_servers is not None:
        yield from _guarded("kafka", lambda: _kafka(config, app))
        if probe:
            yield from _guarded(
                "kafka clock", lambda: [clock_check("kafka clock", clock_ahead_s(config, clock))]
            )
    if config.store.dsn is not None:
        store = app is None or bool(app.entities_from("store"))
        dsns = {config.store.dsn: [STORE_SCHEMA] if store else []}
        dsns.setdefault(config.views_dsn, []).append(config.views.schema_name)
        for dsn, schemas in dsns.items():
            yield from _guarded("postgres", partial(_postgres, dsn, schemas, clock))
    if "://" not in config.archive_path:
        yield disk_check("archive", Path(config.archive_path))


def _guarded(name: str, checks: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """The checks of one server; what it refuses, or that it does not answer, is one too."""
    try:
        yield from checks()
    except EverstateError as error:
        yield Finding(name, "fail", error.message, advice=error.advice)


def _kafka(config: Config, app: App | None) -> Iterator[Finding]:
    if not is_reachable(config):
        advice = "Check log.bootstrap_servers, and whether the brokers run."
        raise Unavailable("no broker accepts a connection.", advice=advice)
    found = brokers(config)
    yield kafka_version(found)
    yield from broker_settings(config, found)
    names = TopicNames(config.log.prefix)
    with Topics(config) as topics:
        existing = {name for name in topics.existing() if name.startswith(f"{names.prefix}.")}
        entities = [] if app is None else list(app.entities)
        commands = [] if app is None else list(app.command_groups)
        differences = topics.differences(entities, commands)
    if not existing and found.may_create is False:
        yield Finding(
            "kafka rights", "fail", "topics cannot be created", advice=_acl(config, ["Create"])
        )
    facts = topic_facts(config, existing)
    yield from topic_rights(config, facts)
    yield from replication(config, facts, found.nodes)
    yield from topic_settings(config, differences)
    if not differences:
        yield Finding("topics", "ok", f"{len(existing)} topics have the settings of everstate.toml")


def kafka_version(found: Brokers) -> Finding:
    """Whether the brokers are new enough. Brokers report their protocol and not their version."""
    protocol = found.settings.get("inter.broker.protocol.version")
    if protocol is None:
        return Finding("kafka", "ok", f"4.0 or newer, {found.nodes} brokers")
    match = re.match(r"(\d+)\.(\d+)", protocol)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if version < KAFKA_MIN:
        wanted = ".".join(str(each) for each in KAFKA_MIN)
        step = f"upgrade to {wanted} or newer, and raise inter.broker.protocol.version"
        return Finding("kafka", "fail", f"protocol {protocol}", advice=step)
    return Finding("kafka", "ok", f"protocol {protocol}, {found.nodes} brokers")


def broker_settings(config: Config, found: Brokers) -> Iterator[Finding]:
    """Settings of a broker that would lose records or end our transactions."""
    if found.settings.get("unclean.leader.election.enable") == "true":
        said = "unclean.leader.election.enable is true: acknowledged records may be lost"
        step = _configs(config, "brokers", None, "unclean.leader.election.enable=false")
        yield Finding("kafka", "fail", said, advice=step)
    longest_ms = int(found.settings.get("transaction.max.timeout.ms", "900000"))
    wanted_ms = int(config.commands.transaction_timeout_s * 1000)
    if longest_ms < wanted_ms:
        said = f"transaction.max.timeout.ms is {longest_ms}, commands need {wanted_ms}"
        step = f"set commands.transaction_timeout_s to {longest_ms / 1000:g} or less"
        yield Finding("kafka", "fail", said, advice=step)


def topic_rights(config: Config, facts: Iterable[TopicFacts]) -> Iterator[Finding]:
    """Topics on which a right is missing."""
    lacking = [topic for topic in facts if topic.missing_rights]
    if lacking:
        missing = sorted({right for topic in lacking for right in topic.missing_rights})
        said = f"no right to {', '.join(missing)} on {_some(topic.name for topic in lacking)}"
        rights = ["".join(word.title() for word in right.split("_")) for right in missing]
        yield Finding("kafka rights", "fail", said, advice=_acl(config, rights))


def replication(config: Config, facts: Iterable[TopicFacts], nodes: int) -> Iterator[Finding]:
    """Topics with fewer replicas than configured, or that accept a write on too few of them."""
    names, listed = TopicNames(config.log.prefix), list(facts)
    wanted = max(config.log.of(each).replication for each in ("", *config.log.entities))
    if nodes < wanted:
        said = f"log.replication is {wanted}, and the cluster has {nodes} brokers"
        yield Finding(
            "replication", "fail", said, advice=f"set log.replication to {nodes}, or add brokers"
        )
    needs = {each.name: config.log.of(names.entity_of(each.name)).replication for each in listed}
    few = [topic for topic in listed if topic.replicas < needs[topic.name]]
    if few:
        said = f"fewer replicas than configured: {_some(topic.name for topic in few)}"
        step = "move them with kafka-reassign-partitions.sh --execute"
        yield Finding("replication", "warn", said, advice=step)
    late = [topic for topic in listed if topic.in_sync < topic.min_insync]
    if late:
        said = f"too few replicas in sync to be written: {_some(topic.name for topic in late)}"
        yield Finding("replication", "fail", said, advice="start the brokers that are down")
    for topic in listed:
        needed = max(1, needs[topic.name] - 1)
        if topic.min_insync < needed:
            said = f"{topic.name}: min.insync.replicas is {topic.min_insync}, expected {needed}"
            step = _configs(config, "topics", topic.name, f"min.insync.replicas={needed}")
            yield Finding("replication", "warn", said, advice=step)


def topic_settings(config: Config, differences: Iterable[TopicDifference]) -> Iterator[Finding]:
    """Topics whose settings differ from everstate.toml, each with the command that changes it."""
    for each in differences:
        if each.is_raised:
            yield Finding("topics", "warn", str(each), advice=f"everstate run: {each.then}")
        elif each.setting == "partitions":
            entity = TopicNames(config.log.prefix).entity_of(each.topic)
            own = f"entities.{entity}." if entity in config.log.entities else ""
            step = (
                f"set log.{own}partitions to {each.found}; other numbers need a new log: "
                "everstate log begin --help"
            )
            yield Finding("topics", "warn", str(each), advice=step)
        else:
            outcome: Literal["warn", "fail"] = (
                "fail" if each.setting == "cleanup.policy" else "warn"
            )
            value = f"{each.setting}={each.wanted}"
            yield Finding(
                "topics", outcome, str(each), advice=_configs(config, "topics", each.topic, value)
            )


def _postgres(dsn: str, schemas: list[str], clock: Clock) -> Iterator[Finding]:
    with connect_views(dsn) as connection:
        number = connection.info.server_version
        version = f"{number // 10_000}.{number % 10_000}"
        if number // 10_000 < POSTGRES_MIN:
            step = f"upgrade to PostgreSQL {POSTGRES_MIN} or newer"
            yield Finding("postgres", "fail", f"version {version}", advice=step)
        else:
            yield Finding("postgres", "ok", f"version {version}")
        before_s = clock()
        row = _row(connection, "SELECT extract(epoch FROM clock_timestamp())::float8")
        yield clock_check("postgres clock", row[0] - (before_s + clock()) / 2)
        for schema in schemas:
            yield from _schema_rights(connection, dsn, schema)
        yield from _server_settings(connection, dsn)


def _schema_rights(connection: Connection, dsn: str, schema: str) -> Iterator[Finding]:
    """Whether our role may create a schema, or use and change the one that exists."""
    user, database, exists, may_create_schema = _row(
        connection,
        """SELECT current_user, current_database(), to_regnamespace(%s) IS NOT NULL,
        has_database_privilege(current_database(), 'CREATE')""",
        [schema],
    )
    role, name = identifier(user), identifier(schema)
    if not exists:
        if may_create_schema:
            yield Finding("rights", "ok", f"{user} may create schema {schema}")
        else:
            step = f"GRANT CREATE ON DATABASE {identifier(database)} TO {role}"
            yield Finding(
                "rights", "fail", f"{user} may not create {schema}", advice=_psql(dsn, step)
            )
        return
    usable, owners = _row(
        connection,
        """SELECT has_schema_privilege(%(s)s, 'USAGE') AND has_schema_privilege(%(s)s, 'CREATE'),
        ARRAY(SELECT DISTINCT tableowner::text FROM pg_tables
              WHERE schemaname = %(s)s AND NOT pg_has_role(tableowner, 'USAGE') ORDER BY 1)""",
        {"s": schema},
    )
    if not usable:
        step = f"GRANT USAGE, CREATE ON SCHEMA {name} TO {role}"
        yield Finding(
            "rights", "fail", f"{user} may not change schema {schema}", advice=_psql(dsn, step)
        )
    for owner in owners:
        said = f"tables of {schema} belong to {owner}, and {user} is no member of it"
        step = f"GRANT {identifier(owner)} TO {role}"
        yield Finding("rights", "fail", said, advice=_psql(dsn, step))
    if usable and not owners:
        yield Finding("rights", "ok", f"{user} may change schema {schema}")


def _server_settings(connection: Connection, dsn: str) -> Iterator[Finding]:
    fsync, most, used = _row(
        connection,
        """SELECT current_setting('fsync'), current_setting('max_connections')::int,
        (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend')""",
    )
    if fsync == "off":
        said = "fsync is off: a crash of its machine destroys the database"
        step = _psql(dsn, "ALTER SYSTEM SET fsync = on", "SELECT pg_reload_conf()")
        yield Finding("postgres", "warn", said, advice=step)
    if most - used < _CONNECTIONS_MIN:
        said = f"{used} of {most} connections are used; everstate uses up to {_CONNECTIONS_MIN}"
        step = _psql(dsn, f"ALTER SYSTEM SET max_connections = {2 * most}")
        yield Finding("postgres", "warn", said, advice=f"{step}, then restart PostgreSQL")


def clock_check(name: str, ahead_s: float) -> Finding:
    """Whether a server's clock and ours agree: times of changes and lags are computed from both."""
    if abs(ahead_s) <= SKEW_S_MAX:
        return Finding(name, "ok", f"within {SKEW_S_MAX:g} s of this machine's")
    where = "ahead of" if ahead_s > 0 else "behind"
    said = f"{abs(ahead_s):.1f} s {where} this machine's clock"
    step = "sudo timedatectl set-ntp true, on the machine whose clock is wrong"
    return Finding(name, "warn", said, advice=step)


def _row(connection: Connection, query: str, given: Any = None) -> tuple[Any, ...]:
    row = connection.execute(query.encode(), given).fetchone()
    assert row is not None
    return tuple(row)


def _psql(dsn: str, *statements: str) -> str:
    """The command for somebody with the rights; the address without user and password."""
    given = settings_of(dsn)
    place = [f"{name}={given[name]}" for name in ("host", "port", "dbname") if given.get(name)]
    words = ["psql", " ".join(place), *(word for each in statements for word in ("-c", each))]
    return shlex.join(words)


def _configs(config: Config, kind: str, name: str | None, setting: str) -> str:
    entity = ["--entity-default"] if name is None else ["--entity-name", name]
    words = ["kafka-configs.sh", "--bootstrap-server", config.bootstrap_servers, "--alter"]
    return shlex.join([*words, "--entity-type", kind, *entity, "--add-config", setting])


def _acl(config: Config, rights: Iterable[str]) -> str:
    principal = f"User:{config.log.options.get('sasl.username', 'NAME')}"
    words = ["kafka-acls.sh", "--bootstrap-server", config.bootstrap_servers, "--add"]
    words += ["--allow-principal", principal, "--resource-pattern-type", "prefixed"]
    words += ["--topic", f"{config.log.prefix}."]
    return shlex.join([*words, *(word for each in rights for word in ("--operation", each))])


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _NAMES_MAX} more" if len(listed) > _NAMES_MAX else ""
    return ", ".join(listed[:_NAMES_MAX]) + more
