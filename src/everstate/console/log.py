"""The log on a page: topics with their ends, and how long they hold what readers have not read."""

from __future__ import annotations

from dataclasses import dataclass

from everstate.errors import EverstateError, Unavailable
from everstate.log.lag import is_reachable
from everstate.serving import Reader
from everstate.serving.log_state import LogReader, TopicState, log_readers, topic_states


@dataclass(frozen=True, slots=True)
class LogPage:
    """Topics and readers of the log."""

    topics: tuple[TopicState, ...]
    readers: tuple[LogReader, ...]
    unread: EverstateError | None
    """Why the readers are not known; ``None``: they are."""


def log_page(reader: Reader) -> LogPage:
    """Topics, and the archive and views that read them; raises Unavailable without a broker."""
    config = reader.config
    if not is_reachable(config):
        raise Unavailable("no broker answers.", public="the log (Kafka) does not answer.")
    topics = topic_states(config)
    try:
        control = reader.connection.standings(reader.schema)
        readers = log_readers(config, control, topics, reader.project.entities)
    except EverstateError as error:
        return LogPage(tuple(topics), (), error)
    return LogPage(tuple(topics), tuple(readers), None)
