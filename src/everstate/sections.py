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


LOCAL_S3_KEY: Final = "everstate"
"""Key and secret of the local object store; it listens on loopback only, as the other servers."""


class S3Config(Section):
    """`[archive.s3]`: the object store of the lake, if `archive.path` begins with `s3://`.

    Keys are no settings. They come from ``AWS_ACCESS_KEY_ID`` and ``AWS_SECRET_ACCESS_KEY``, from
    the profile that ``AWS_PROFILE`` names, or from the role of the machine.
    """

    endpoint: Annotated[str | None, Field(pattern="^https?://[^@/?#]+/?$")] = None
    """Address of a store other than Amazon's, such as ``https://s3.example.org``."""
    region: str = "us-east-1"
    """Region of the bucket. Stores that have no regions ignore it."""
    path_style: bool = False
    """Whether a request names the bucket in its path instead of the host, as most stores other
    than Amazon's require."""
    local: bool = False
    """Whether `everstate up` starts a store on this machine, which it builds with Go once."""


class ArchiveConfig(Section):
    """`[archive]`: the lake."""

    path: Annotated[str | None, MAY_HOLD_SECRET] = None
    """Folder of the lake, relative to everstate.toml, or ``s3://bucket/prefix``. Default:
    ``<data_dir>/archive``."""
    trigger_s: float = Field(default=60, gt=0)
    """How often new changes are archived, and so how far the archive may lag behind the log."""
    batch_changes_max: int = Field(default=1_000_000, ge=1)
    """Largest number of changes in one commit, over all partitions."""
    compact_every_s: float = Field(default=3600, gt=0)
    """How often small files are compacted into larger ones."""
    file_mib: int = Field(default=128, ge=1)
    """Target size of compacted files, in MiB."""
    s3: S3Config = S3Config()
    """The object store of the lake: see `[archive.s3]`."""

    @model_validator(mode="before")
    @classmethod
    def _of_environment(cls, given: Any) -> Any:
        """Values that the environment names ``s3_<setting>``, in the section of the store."""
        if not isinstance(given, Mapping) or not isinstance(given.get("s3", {}), Mapping):
            return given
        flat = {name: value for name, value in given.items() if name.startswith("s3_")}
        others = {name: value for name, value in given.items() if name not in flat}
        nested = {name.removeprefix("s3_"): value for name, value in flat.items()}
        return {**others, "s3": {**given.get("s3", {}), **nested}}


class PipelineConfig(Section):
    """`[pipeline]`: Spark and how views are kept."""

    master: str = "local[*]"
    """Spark's master: `local[N]` for N cores of this machine, or `spark://…` for a cluster."""
    driver_memory: str = "3g"
    """Heap of Spark's driver. With `local[N]`, all work is done in this JVM."""
    options: Annotated[dict[str, str], MAY_HOLD_SECRET] = Field(default_factory=dict)
    """More Spark settings (`spark.…`). Those that a guarantee of everstate needs are refused."""
    batch_changes_max: int = Field(default=1_000_000, ge=1)
    """Largest number of changes in a keeper batch. Batches longer than ten seconds are avoided."""
    poll_ms: int = Field(default=50, ge=1)
    """How long the keeper waits for new changes before it looks again."""
    held_max: int = Field(default=10_000, ge=0)
    """Largest number of held changes per entity type, and of held rows per capture."""
    retry_s_max: float = Field(default=10, gt=0)
    """Longest pause between retries while a server is unavailable or the disk is full."""


class MetricsConfig(Section):
    """`[metrics]`: the metrics of each role, for Prometheus."""

    enabled: bool = True
    """Whether metrics are served at `/metrics`. No token is needed to read them."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=0, ge=0, le=65_000)
    """Port of the relay; other roles use the ports after it. With 0, each role uses a free port."""


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
