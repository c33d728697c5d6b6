"""Which log a store publishes to: two logs must not each get a part of its changes (C8)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from everstate.config import Config
from everstate.errors import LogIdentityChanged
from everstate.log.topics import TopicIdentity, TopicNames, Topics, check_same_topic


@dataclass(frozen=True, slots=True)
class BoundTopic:
    """The changelog that the changes of an entity type go to."""

    topic: str
    identity: TopicIdentity


Bound = Mapping[str, BoundTopic]
"""By entity type."""


def changelogs(config: Config, entities: Iterable[str]) -> Bound:
    """The changelogs of the configured log; raises LogError when one is missing."""
    names = TopicNames(config.log.prefix)
    topics = {entity: names.changes(entity) for entity in entities}
    with Topics(config) as admin:
        found = admin.identities(list(topics.values())) if topics else {}
    return {entity: BoundTopic(topic, found[topic]) for entity, topic in topics.items()}


def check_bound(
    config: Config,
    entities: Iterable[str],
    *,
    store: str,
    read: Callable[[], Bound],
    note: Callable[[Bound], None],
) -> None:
    """Raise when the changes of a store go to another log than the configured one.

    ``read`` gives what the store has noted, ``note`` notes what it has not: of two that note at
    once, the first holds. Raises LogIdentityChanged, TopicResized; nothing was published then.
    """
    wanted = changelogs(config, entities)
    stored = read()
    if missing := {entity: bound for entity, bound in wanted.items() if entity not in stored}:
        note(missing)
        stored = read()
    for entity, bound in wanted.items():
        noted = stored[entity]
        if noted.topic != bound.topic:
            raise LogIdentityChanged(
                f"the changes of {entity} in {store} go to topic {noted.topic}; configured is "
                f"{bound.topic}. Nothing was published: each log would have a part of them."
            )
        check_same_topic(bound.topic, noted.identity, bound.identity)
