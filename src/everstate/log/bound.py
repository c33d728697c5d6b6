"""Binds a store to one log: two logs must not each get a part of its changes (C8)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from everstate.config import Config
from everstate.errors import LogIdentityChanged
from everstate.log.topics import TopicIdentity, TopicNames, Topics, check_same_topic


@dataclass(frozen=True, slots=True)
class BoundTopic:
    """The changelog to which the changes of an entity type are published."""

    topic: str
    identity: TopicIdentity


Bound = Mapping[str, BoundTopic]
"""By entity type."""

Moved = Mapping[str, tuple[str, str]]
"""Entity type → the names of its old and its new changelog."""


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

    ``read`` returns the changelogs that the store has recorded, ``note`` records missing ones; of
    two processes that record at once, the first wins. Raises LogIdentityChanged, TopicResized;
    nothing was published then.
    """
    wanted = changelogs(config, entities)
    stored = read()
    if missing := {entity: bound for entity, bound in wanted.items() if entity not in stored}:
        note(missing)
        stored = read()
    for entity, bound in wanted.items():
        recorded = stored[entity]
        if recorded.topic != bound.topic:
            raise LogIdentityChanged(
                f"the changes of {entity} in {store} go to topic {recorded.topic}; configured is "
                f"{bound.topic}. Nothing was published: each log would have only some of them."
            )
        check_same_topic(bound.topic, recorded.identity, bound.identity)


def moved(before: Bound, after: Bound) -> Moved:
    """The changelogs of ``after`` that are new or have replaced another."""
    return {
        name: (before[name].topic if name in before else "nowhere", each.topic)
        for name, each in after.items()
        if before.get(name) != each
    }
