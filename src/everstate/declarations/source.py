"""The source of truth of an entity type."""

from __future__ import annotations

from typing import Literal, TypeAlias

Source: TypeAlias = Literal["store", "cassandra", "log", "commands", "capture"]
"""Where an entity type's versions are assigned: PostgreSQL with its outbox, Cassandra, the log
itself (events: immutable facts), a command handler, or the capture of a foreign database."""
