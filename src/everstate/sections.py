"""Base class of the sections of `everstate.toml`, and the sections about operating a project."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

MAY_HOLD_SECRET: Final = "may hold a secret"
"""Marks a setting whose value is never shown in messages."""


class Section(BaseModel):
    """A frozen section; an unknown field is an error, so that a typing slip is not silent."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True
    )

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        """Fields for ``repr``, without those that may hold a secret."""
        fields = type(self).model_fields
        for name, value in super().__repr_args__():
            hidden = value is not None and MAY_HOLD_SECRET in fields[str(name)].metadata
            yield name, "…" if hidden else value


class AlertsConfig(Section):
    """`[alerts]`: which conditions need attention, and where alerts are sent."""

    webhook_url: Annotated[str | None, Field(pattern="^https?://"), MAY_HOLD_SECRET] = None
    """URL to which each alert is sent as a POST of JSON. Without it, alerts are only logged."""
    webhook_timeout_s: float = Field(default=10, gt=0)
    """How long the receiver may take to answer. A failed delivery is retried until it succeeds."""
    every_s: float = Field(default=15, gt=0)
    """How often the role `alerts` checks the conditions."""
    hold_s: float = Field(default=60, ge=0)
    """How long a condition must hold before its alert fires."""
    view_behind_s: float = Field(default=60, gt=0)
    """Lag of a view from which on it needs attention."""
    archive_behind_s: float = Field(default=3600, gt=0)
    """Lag of the archive from which on it needs attention."""
    publish_behind_s: float = Field(default=60, gt=0)
    """Age of a change in the outbox from which on it needs attention."""
    retention_share: float = Field(default=0.5, gt=0, le=1)
    """Share of a topic's retention: a reader that lags by more may lose records that it needs."""
    wal_mib: int = Field(default=1024, ge=1)
    """WAL that a capture's replication slot may hold, in MiB, before it needs attention."""
    dead_letters_hours: float = Field(default=24, gt=0)
    """How long a new dead letter needs attention."""


class LoggingConfig(Section):
    """`[logging]`: the log of `everstate run` and `everstate serve`, on stderr."""

    format: Literal["text", "json"] = "text"
    """Whether a record is a line of text, or one JSON object a line for a log collector."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Records of a lower level are not written."""
