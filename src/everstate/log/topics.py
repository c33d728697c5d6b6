"""Names of topics, their creation and settings, and their identity (C8)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)

from everstate.closing import Closing
from everstate.config import Config, LogConfig
from everstate.errors import LogError, LogIdentityChanged, TopicResized, Unavailable
from everstate.log.client import (
    ADMIN_TIMEOUT_S,
    admin_settings,
    changelog_bytes_max,
    dead_bytes_max,
    logger,
)
from everstate.log.outcome import translated
from everstate.log.positions import Offsets, partition_count
from everstate.retrying import within

_HOUR_MS = 3_600_000
_SIZE = "max.message.bytes"


@dataclass(frozen=True, slots=True)
class TopicNames:
    """Names of the topics of one prefix (envelope.md)."""

    prefix: str

    def changes(self, entity: str, generation: int = 1) -> str:
        """Every change of the entity type; kept for a time."""
        return f"{self.prefix}.{entity}.changes.g{generation}"

    def state(self, entity: str, generation: int = 1) -> str:
        """Key → newest change of each entity; compacted."""
        return f"{self.prefix}.{entity}.state.g{generation}"

    def commands(self, entity: str, generation: int = 1) -> str:
        """Commands to entities of this type; kept for a time."""
        return f"{self.prefix}.{entity}.commands.g{generation}"

    def replies(self, entity: str, generation: int = 1) -> str:
        """Answers to commands, in the partitions of their commands; kept for a time."""
        return f"{self.prefix}.{entity}.replies.g{generation}"

    def parked(self, entity: str, generation: int = 1) -> str:
        """Command id → a command that could not be decided; compacted."""
        return f"{self.prefix}.{entity}.parked.g{generation}"

    def timers(self, process: str) -> str:
        """Command id → a command of a process manager that is not due yet; compacted."""
        return f"{self.prefix}.process.{process}.timers"

    def seen(self, process: str) -> str:
        """Entity → versions of it that a process manager has reacted to; compacted."""
        return f"{self.prefix}.process.{process}.seen"

    def partials(self, entity: str) -> str:
        """Partial changes: only the changed fields, as a capture's source gave them."""
        return f"{self.prefix}.{entity}.partials"

    def debezium(self, entity: str, generation: int = 1) -> str:
        """Every change of the entity type, in Debezium's form."""
        return f"{self.prefix}.{entity}.debezium.g{generation}"

    def derived(self, name: str, version: int) -> str:
        """One version of a derived topic."""
        return f"{self.derived_prefix(name)}{version}"

    def derived_prefix(self, name: str) -> str:
        """Common prefix of the names of all versions of a derived topic, before the number."""
        return f"{self.prefix}.derived.{name}.v"

    def dead(self, entity: str) -> str:
        """Dead letters of this entity type: records that could not be read or applied."""
        return f"{self.prefix}.{entity}.dead"

    def entity_of_dead(self, topic: str) -> str | None:
        """Entity type of a topic of dead letters; ``None``: the topic is another one."""
        entity = topic.removeprefix(f"{self.prefix}.").removesuffix(".dead")
        return entity if topic == self.dead(entity) and "." not in entity else None

    def entity_of(self, topic: str) -> str:
        """Entity type of a topic; for a topic of no entity type, the name of none."""
        return topic.removeprefix(f"{self.prefix}.").partition(".")[0]

    def raw(self, source: str, table: str) -> str:
        """Records that a capture wrote from one table, before cleaning."""
        return f"{self.raw_prefix(source)}.{table}"

    def raw_prefix(self, source: str) -> str:
        """Common prefix of the names of all raw topics of a capture."""
        return f"{self.prefix}.raw.{source}"

    def capture(self, source: str, what: str) -> str:
        """Internal topic of a capture's connector (notifications, schemas)."""
        return f"{self.prefix}.capture.{source}.{what}"

    @property
    def dead_unknown(self) -> str:
        """Dead letters whose entity type is unknown."""
        return f"{self.prefix}.dead"

    @property
    def progress(self) -> str:
        """Progress of each publisher; one partition, compacted."""
        return f"{self.prefix}.progress"


@dataclass(frozen=True, slots=True)
class TopicIdentity:
    """Identity of a topic: a topic deleted and created again with its old name has another id.

    The number of partitions is part of the identity: when it grows, a key's next change may be in
    another partition than its earlier ones, and stored positions do not cover the new partitions.
    """

    cluster_id: str
    topic_id: str
    partitions: int

    def __str__(self) -> str:
        return f"{self.topic_id} of cluster {self.cluster_id}"


@dataclass(frozen=True, slots=True)
class TopicDifference:
    """A topic that exists with another setting than configured; nothing was changed."""

    topic: str
    setting: str
    wanted: str
    found: str
    is_raised: bool = False
    """The next start changes it: it lets the topic keep more, for an entity type of its own."""

    def __str__(self) -> str:
        return f"{self.topic}: {self.setting} is {self.found}, but {self.wanted} is configured"

    @property
    def then(self) -> str:
        """What happens to it."""
        if self.setting == "partitions":
            return "refused: changes of a key must stay in one partition (`everstate log begin`)"
        return "the next start raises it" if self.is_raised else "stays; see `everstate doctor`"


@dataclass(frozen=True, slots=True)
class _Wanted:
    name: str
    partitions: int
    replication: int
    config: Mapping[str, str]
    has_own: bool = False
    """Its retention is that of `[log.entities.NAME]`."""


def _deleted(name: str, log: LogConfig, hours: float, bytes_max: int) -> _Wanted:
    """A topic whose records are deleted after so many hours."""
    retention = {"cleanup.policy": "delete", "retention.ms": str(int(hours * _HOUR_MS))}
    return _Wanted(name, log.partitions, log.replication, {**retention, _SIZE: str(bytes_max)})


def _changelog(name: str, log: LogConfig, bytes_max: int, *, has_own: bool = False) -> _Wanted:
    """A topic that keeps changes as long, and as many, as the configuration says."""
    found = _deleted(name, log, log.changes_retention_hours, bytes_max)
    limit = str(log.changes_retention_bytes // log.partitions)  # -1 stays -1: no limit
    return replace(found, config={**found.config, "retention.bytes": limit}, has_own=has_own)


def _compacted(name: str, log: LogConfig, bytes_max: int, more: Mapping[str, str]) -> _Wanted:
    """A topic that keeps the newest record of each key; ``more``: other settings."""
    config = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.1", **more}
    return _Wanted(name, log.partitions, log.replication, {**config, _SIZE: str(bytes_max)})


def _keeps_more(setting: str, wanted: str, found: str) -> bool:
    """Whether a topic keeps more with a setting of retention; -1 is no limit."""
    is_limit = setting.startswith("retention.") and found not in ("", "-1")
    return is_limit and (wanted == "-1" or int(wanted) > int(found))


class Topics(Closing):
    """Creates and describes topics; has one admin connection, close it."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._admin = AdminClient(admin_settings(config))
        self.names = TopicNames(config.log.prefix)

    def close(self) -> None:
        """Drop the connection (librdkafka closes it with its last reference)."""
        del self._admin

    def ensure(
        self, entity_names: Iterable[str], *, generation: int = 1
    ) -> tuple[TopicDifference, ...]:
        """Create the missing topics of these entity types; idempotent.

        The settings of existing topics are checked. Only ``max.message.bytes`` is raised when the
        configuration asks for more (an accepted change must fit); every other difference is
        returned and logged, never changed. Raises LogError or Unavailable.
        """
        return self._ensure(self._wanted(entity_names, generation))

    def ensure_commands(
        self, entity_names: Iterable[str], processes: Iterable[str] = ()
    ) -> tuple[TopicDifference, ...]:
        """Create the topics for commands to these entity types, and changelogs; idempotent.

        ``processes`` are names of process managers: each has a topic for timers and one for the
        versions it has reacted to. See :meth:`ensure`.
        """
        names, log = tuple(entity_names), self._config.log
        wanted = [*self._wanted(names, 1), *self._wanted_commands(names)]
        # Each partition of an entity type that a process manager reads has one there.
        most = max([log.partitions, *(log.of(each).partitions for each in log.entities)])
        log = log.model_copy(update={"partitions": most})
        for each in processes:
            kept = (self.names.timers(each), self.names.seen(each))
            wanted += [self._kept(name, log) for name in kept]
        return self._ensure(wanted)

    def _ensure(self, topics: Iterable[_Wanted]) -> tuple[TopicDifference, ...]:
        wanted = {topic.name: topic for topic in topics}
        existing = self.existing()
        self._make([topic for name, topic in wanted.items() if name not in existing])
        present = [wanted[name] for name in wanted if name in existing]
        for topic in present:
            self.raise_sizes([topic.name], int(topic.config[_SIZE]))
        differences = self._differences(present)
        for each in differences:
            if each.is_raised:
                self.set_config(each.topic, {each.setting: each.wanted})
            logger.warning("%s%s", each, ": it is raised" if each.is_raised else "")
        return tuple(each for each in differences if not each.is_raised)

    def differences(
        self, entity_names: Iterable[str], commands: Iterable[str] = ()
    ) -> tuple[TopicDifference, ...]:
        """How existing topics of these entity types differ from the configuration; changes nothing.

        ``commands``: the entity types that take commands. Raises LogError or Unavailable.
        """
        existing = self.existing()
        wanted = [*self._wanted(entity_names, 1), *self._wanted_commands(commands)]
        return self._differences([topic for topic in wanted if topic.name in existing])

    def create(self, name: str, partitions: int, config: Mapping[str, str]) -> None:
        """Create one topic with these settings; raises LogError when the name is taken."""
        if name in self.existing():
            raise LogError(f"topic {name} exists already.", advice="Choose another name.")
        self._make([_Wanted(name, partitions, self._config.log.replication, config)])

    def ensure_raw(
        self, names: Iterable[str], *, partitions: int, settings: Mapping[str, str]
    ) -> list[str]:
        """Create the missing topics of a capture; returns their names. Idempotent."""
        existing, replication = self.existing(), self._config.log.replication
        missing = [
            _Wanted(name, partitions, replication, {"cleanup.policy": "delete", **settings})
            for name in names
            if name not in existing
        ]
        self._make(missing)
        return [topic.name for topic in missing]

    def ensure_beside(self, changelog: str, name: str) -> None:
        """Create a topic with the partitions of a changelog and its settings, if it is missing."""
        log = self._config.log.of(self.names.entity_of(changelog))
        log = log.model_copy(update={"partitions": self.partitions(changelog)})
        if name not in self.existing():
            self._make([_changelog(name, log, changelog_bytes_max(self._config))])

    def raise_sizes(self, names: Iterable[str], bytes_max: int) -> None:
        """Raise the record size limit of existing topics to ``bytes_max``, where it is lower."""
        listed = list(names)
        for topic, settings in (self.configs(listed) if listed else {}).items():
            if int(settings[_SIZE]) < bytes_max:
                self.set_config(topic, {_SIZE: str(bytes_max)})

    def reach(self, timeout_s: float) -> None:
        """Send a request to any broker; raises Unavailable when none answers in time."""
        with translated("sending a request to Kafka"):
            self._admin.list_topics(topic=self.names.progress, timeout=timeout_s)

    def existing(self) -> set[str]:
        """Names of all topics of the cluster."""
        with translated("listing topics"):
            return set(self._admin.list_topics(timeout=ADMIN_TIMEOUT_S).topics)

    def delete(self, names: Iterable[str]) -> None:
        """Delete topics with all their records; those that do not exist are no error.

        Returns when they are gone; raises LogError, or Unavailable after 10 s.
        """
        listed = list(names)
        if not listed:
            return
        for name, future in self._admin.delete_topics(listed).items():
            try:
                with translated(f"deleting topic {name}"):
                    future.result(ADMIN_TIMEOUT_S)
            except LogError as error:
                if not _is(error, KafkaError.UNKNOWN_TOPIC_OR_PART):
                    raise
        deadline = time.monotonic() + ADMIN_TIMEOUT_S
        while left := self.existing() & set(listed):
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"Kafka has not deleted these topics yet: {', '.join(sorted(left))}."
                )
            time.sleep(0.02)

    def identity(self, topic: str) -> TopicIdentity:
        """Cluster id and topic id; raises LogError when there is no such topic."""
        return self.identities([topic])[topic]

    def identities(self, topics: Sequence[str]) -> dict[str, TopicIdentity]:
        """Identities of several topics in two round trips (about 3 ms), not cached."""
        cluster = self._admin.describe_cluster(request_timeout=ADMIN_TIMEOUT_S)
        described = self._admin.describe_topics(
            TopicCollection(list(topics)), request_timeout=ADMIN_TIMEOUT_S
        )
        with translated("describing the cluster"):
            cluster_id = str(cluster.result(ADMIN_TIMEOUT_S).cluster_id)
        found = {}
        for topic, future in described.items():
            with translated(f"describing topic {topic}"):
                answer = future.result(ADMIN_TIMEOUT_S)
            found[topic] = TopicIdentity(cluster_id, str(answer.topic_id), len(answer.partitions))
        return found

    def check_identity(self, expected: Mapping[str, TopicIdentity]) -> None:
        """Raise when a topic is not the one that its positions belong to (C8).

        LogIdentityChanged: it is another topic. TopicResized: its number of partitions changed.
        """
        found = self.identities(list(expected)) if expected else {}
        for topic, identity in expected.items():
            check_same_topic(topic, identity, found[topic])

    def partitions(self, topic: str) -> int:
        """Number of partitions; raises LogError when there is no such topic."""
        return partition_count(self._admin, topic)

    def set_config(self, topic: str, settings: Mapping[str, str]) -> None:
        """Change some settings of one topic (such as ``retention.ms``); the others stay.

        Returns when the broker uses them; raises LogError, or Unavailable after 10 s.
        """
        entries = [
            ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
            for name, value in settings.items()
        ]
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
        for future in self._admin.incremental_alter_configs([resource]).values():
            with translated(f"changing settings of topic {topic}"):
                future.result(ADMIN_TIMEOUT_S)
        # The controller has the settings at once, the broker a few milliseconds later.
        deadline = time.monotonic() + ADMIN_TIMEOUT_S
        while not settings.items() <= self.config(topic).items():
            if time.monotonic() > deadline:
                raise Unavailable(f"Kafka has not applied the new settings of topic {topic}.")
            time.sleep(0.02)

    def config(self, topic: str) -> dict[str, str]:
        """All settings of one topic as the broker has them."""
        return self.configs([topic])[topic]

    def _wanted(self, entity_names: Iterable[str], generation: int) -> Iterable[_Wanted]:
        base, names = self._config.log, self.names
        size, dead_size = changelog_bytes_max(self._config), dead_bytes_max(self._config)
        of_state = {
            # A reader that starts now sees each key's change for at least a minute.
            "min.compaction.lag.ms": "60000",
            # Tombstones stay readable as long as the delete changes before them (C7).
            "delete.retention.ms": str(7 * 24 * _HOUR_MS),
            "min.cleanable.dirty.ratio": "0.3",
        }
        for entity in entity_names:
            changes, state = names.changes(entity, generation), names.state(entity, generation)
            log, has_own = base.of(entity), entity in base.entities
            yield _changelog(changes, log, size, has_own=has_own)
            yield _compacted(state, log, size, of_state)
            yield _deleted(names.dead(entity), log, log.dead_retention_hours, dead_size)
        one = base.model_copy(update={"partitions": 1})
        yield _deleted(names.dead_unknown, one, base.dead_retention_hours, dead_size)
        yield _compacted(names.progress, one, size, {"segment.bytes": str(16 * 1_048_576)})

    def _wanted_commands(self, entity_names: Iterable[str]) -> Iterable[_Wanted]:
        hours, size = self._config.commands.retention_hours, changelog_bytes_max(self._config)
        for entity in entity_names:
            log = self._config.log.of(entity)
            for name in (self.names.commands(entity), self.names.replies(entity)):
                yield _deleted(name, log, hours, size)
            yield self._kept(self.names.parked(entity), log)

    def _kept(self, name: str, log: LogConfig) -> _Wanted:
        """A compacted topic of waiting entries, each of which is removed by its tombstone."""
        return _compacted(name, log, dead_bytes_max(self._config), {})

    def _make(self, topics: Sequence[_Wanted]) -> None:
        if not topics:
            return
        requests = []
        for topic in topics:
            in_sync = {"min.insync.replicas": str(max(1, topic.replication - 1))}
            config = {"message.timestamp.type": "CreateTime", **in_sync, **topic.config}
            requests.append(
                NewTopic(topic.name, topic.partitions, topic.replication, config=config)
            )
        futures = self._admin.create_topics(requests, request_timeout=ADMIN_TIMEOUT_S)
        for name, future in futures.items():
            try:
                with translated(f"making topic {name}"):
                    future.result(ADMIN_TIMEOUT_S)
            except LogError as error:
                # Another process may have created the same topic meanwhile.
                if not _is(error, KafkaError.TOPIC_ALREADY_EXISTS):
                    raise
        self._wait_until_served([topic.name for topic in topics])

    def _wait_until_served(self, names: Sequence[str]) -> None:
        """Return when every partition answers; brokers serve a topic after its creation returns."""
        with Offsets(self._config) as offsets:
            try:
                within(ADMIN_TIMEOUT_S, LogError, pause_s=0.02)(offsets.beginnings, names)
            except LogError as error:
                raise Unavailable(
                    f"the new topics are not available yet: {error.message}"
                ) from error

    def configs(self, names: Sequence[str]) -> dict[str, dict[str, str]]:
        """All settings of several topics as the brokers have them, in one round trip."""
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in names]
        found = {}
        for resource, future in self._admin.describe_configs(resources).items():
            with translated(f"reading settings of topic {resource.name}"):
                entries = future.result(ADMIN_TIMEOUT_S)
            found[resource.name] = {name: entry.value for name, entry in entries.items()}
        return found

    def _differences(self, topics: Sequence[_Wanted]) -> tuple[TopicDifference, ...]:
        found = self.configs([topic.name for topic in topics]) if topics else {}
        differences = []
        for topic in topics:
            partitions = self.partitions(topic.name)
            if partitions != topic.partitions:
                differences.append(
                    TopicDifference(
                        topic.name, "partitions", str(topic.partitions), str(partitions)
                    )
                )
            for setting, wanted in topic.config.items():
                value = found[topic.name].get(setting, "")
                is_larger = setting == _SIZE and int(value) >= int(wanted)
                if value != wanted and not is_larger:
                    raised = topic.has_own and _keeps_more(setting, wanted, value)
                    differences.append(TopicDifference(topic.name, setting, wanted, value, raised))
        return tuple(differences)


def check_same_topic(topic: str, stored: TopicIdentity, found: TopicIdentity) -> None:
    """Raise LogIdentityChanged or TopicResized when ``found`` is not the topic of the positions."""
    if (stored.cluster_id, stored.topic_id) != (found.cluster_id, found.topic_id):
        raise LogIdentityChanged(
            f"topic {topic} is {found}; the stored positions belong to {stored}. Nothing was read "
            "or written."
        )
    if stored.partitions != found.partitions:
        raise TopicResized(topic, stored.partitions, found.partitions)


def _is(error: LogError, code: int) -> bool:
    cause = error.__cause__
    return isinstance(cause, KafkaException) and bool(cause.args[0].code() == code)
