"""Base class of the sections of `everstate.toml`, and the sections about operating a project."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

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
            known = fields.get(str(name))
            is_secret = known is not None and MAY_HOLD_SECRET in known.metadata
            yield name, "…" if is_secret and value is not None else value


class EntityLogConfig(Section):
    """`[log.entities.NAME]`: topics of one entity type; what is not given is as in `[log]`."""

    partitions: int | None = Field(default=None, ge=1, le=1000)
    replication: int | None = Field(default=None, ge=1)
    changes_retention_hours: float | None = Field(default=None, gt=0)
    changes_retention_bytes: int | None = Field(default=None, ge=-1)


class ViewServerConfig(Section):
    """`[stores.NAME]`: the server of the store of views with that name, such as `redis`."""

    url: Annotated[str | None, MAY_HOLD_SECRET] = None
    """Address of your own server; with TLS if it begins with `rediss://` or `https://`. Default:
    the server of the local stack, which `everstate up` starts if this section is there."""
    user: str | None = None
    """User name, for a server that requires one."""
    password: Annotated[SecretStr | None, MAY_HOLD_SECRET] = None
    """Password of the user. The environment variable is a safer place for it than the file."""
    ssl_cafile: Path | None = None
    """Certificates of the authorities that sign the server's certificate, in PEM, relative to
    everstate.toml. Default: those of the system."""


class StoresConfig(Section):
    """`[stores]`: the servers of stores of views, by the store's name."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, ViewServerConfig]

    @model_validator(mode="before")
    @classmethod
    def _of_environment(cls, given: Any) -> Any:
        """Values that the environment names ``<store>_<setting>``, in the store's section."""
        if not isinstance(given, Mapping):
            return given
        found = {name: dict(value) for name, value in given.items() if isinstance(value, Mapping)}
        for name, value in given.items():
            for setting in ViewServerConfig.model_fields:
                store, separator, rest = name.rpartition(f"_{setting}")
                if name not in found and separator and store and not rest:
                    found.setdefault(store, {})[setting] = value
                    break
            else:
                found.setdefault(name, value)
        return found

    @property
    def servers(self) -> Mapping[str, ViewServerConfig]:
        """The sections of the stores, by name."""
        return self.__pydantic_extra__

    def server(self, name: str) -> ViewServerConfig:
        """The section of a store; all defaults if there is none."""
        return self.servers.get(name, ViewServerConfig())

    def with_url(self, name: str, url: str) -> StoresConfig:
        """Copy with the address of the server of a store."""
        found = self.server(name).model_copy(update={"url": url})
        return StoresConfig(**{**self.servers, name: found})


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
