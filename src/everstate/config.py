"""Settings: `everstate.toml`, overridden by ``EVERSTATE_<SECTION>_<FIELD>``, read once.

Each room has one frozen section. Nothing below this module reads the environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from everstate.errors import InvalidConfig

CONFIG_FILE = "everstate.toml"


class Section(BaseModel):
    """A frozen section; an unknown field is an error, so that a typing slip is not silent."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")


class ProjectConfig(Section):
    """`[project]`: which app this folder runs and where its data lives."""

    app: str | None = None
    """``module:attribute`` of the App; ``None``: the commands that need one ask for it."""
    data_dir: Path = Path(".everstate")
    """Servers' data, logs, archive; relative to the folder of everstate.toml."""


class LogConfig(Section):
    """`[log]`: the Kafka cluster and how its topics are made."""

    bootstrap_servers: str | None = None
    """``host:port,…``; ``None``: the local stack's broker."""
    options: dict[str, str] = Field(default_factory=dict)
    """More client options (security, …) for every producer, consumer and Spark reader, in
    librdkafka's names; Spark gets those that Kafka's Java client spells the same."""
    prefix: str = Field(default="everstate", pattern=r"^[a-zA-Z0-9_-]+$")
    """First part of every topic's name; projects on one cluster need different ones."""
    partitions: int = Field(default=4, ge=1, le=1000)
    """Partitions of a new topic: how many tasks can keep views at once. A topic that exists stays
    as it is."""
    replication: int = Field(default=1, ge=1)
    """Copies of each partition; 3 on a cluster that may lose a broker."""
    changes_retention_hours: float = Field(default=72, gt=0)
    """How long `.changes` keeps a change; the archive has it for good."""
    dead_retention_hours: float = Field(default=720, gt=0)
    """How long `.dead` keeps a letter."""
    message_bytes_max: int = Field(default=1_048_576, ge=1024)
    """Largest value of one record, in bytes; checked before a write commits."""
    linger_ms: float = Field(default=5, ge=0)
    """How long a producer waits for more records to send together; 0 sends each at once."""
    queue_messages_max: int = Field(default=200_000, ge=1)
    """A full producer queue makes ``send`` wait: back-pressure, never loss."""


class StoreConfig(Section):
    """`[store]`: the source of truth in PostgreSQL, with its outbox."""

    dsn: str | None = None
    """libpq connection string; ``None``: the local stack's PostgreSQL."""
    outbox_keep_hours: float = Field(default=24, ge=0)
    """How long published rows stay, so that a log that lost its tail can be refilled."""
    relay_batch_rows: int = Field(default=10_000, ge=1)
    """Most changes that the relay sends in one Kafka transaction."""
    relay_poll_ms: int = Field(default=20, ge=1)
    """How long the relay waits when the outbox is empty, before it looks again."""


class ViewsConfig(Section):
    """`[views]`: where the views live."""

    dsn: str | None = None
    """libpq connection string; ``None``: the same database as the store."""
    schema_name: str = Field(default="everstate_views", pattern=r"^[a-z_][a-z0-9_]*$")
    """PostgreSQL schema of the views and of their positions; another one begins anew."""


class ArchiveConfig(Section):
    """`[archive]`: the lake."""

    path: str | None = None
    """Folder or URL of the lake; ``None``: ``<data_dir>/archive``."""
    trigger_s: float = Field(default=60, gt=0)
    """How often the archive takes over what is new: how far it may trail the log."""
    batch_changes_max: int = Field(default=1_000_000, ge=1)
    """Most changes of one commit, over all partitions."""
    compact_every_s: float = Field(default=3600, gt=0)
    """How often small files are written together."""
    file_mib: int = Field(default=128, ge=1)
    """Size that compaction aims at."""


class PipelineConfig(Section):
    """`[pipeline]`: Spark and how views are kept."""

    master: str = "local[*]"
    """Spark's master: `local[N]` runs in this process on N cores; or a cluster's `spark://…`."""
    driver_memory: str = "3g"
    """Heap of Spark's JVM; with `local[N]` all the work is done in it."""
    options: dict[str, str] = Field(default_factory=dict)
    """More Spark settings, by their names `spark.…`; those that carry a guarantee are refused."""
    batch_changes_max: int = Field(default=200_000, ge=1)
    """Most changes of one keeper batch over all partitions."""
    poll_ms: int = Field(default=50, ge=1)
    """How long the keeper waits when there is nothing new, before it looks again."""
    held_max: int = Field(default=10_000, ge=0)
    """Most changes held behind version gaps, per view group; a partition that brings more waits,
    and the log says why, until a gap fills or the limit is raised. A view alone is put aside."""
    retry_s_max: float = Field(default=10, gt=0)
    """Longest pause between attempts while a server is away, or the disk is full."""


class LocalConfig(Section):
    """`[local]`: the local stack."""

    fsync: bool = True
    """Whether PostgreSQL waits for the disk at each commit; `false` only for tests."""
    jars_url: str | None = None
    """A Maven repository of your own; ``None``: the public one."""
    cache_dir: Path | None = None
    """Where jars are kept; ``None``: the user's cache folder."""
    kafka_heap_mb: int = Field(default=512, ge=128)
    """Heap of the broker, in MiB."""


class Config(BaseSettings):
    """All settings of one project; build it with :func:`load`."""

    model_config = SettingsConfigDict(
        env_prefix="EVERSTATE_",
        env_nested_delimiter="_",
        env_nested_max_split=1,
        frozen=True,
        extra="forbid",
    )

    project: ProjectConfig = ProjectConfig()
    log: LogConfig = LogConfig()
    store: StoreConfig = StoreConfig()
    views: ViewsConfig = ViewsConfig()
    archive: ArchiveConfig = ArchiveConfig()
    pipeline: PipelineConfig = PipelineConfig()
    local: LocalConfig = LocalConfig()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Environment first, then the values given by :func:`load` (the file's)."""
        return env_settings, init_settings

    @property
    def bootstrap_servers(self) -> str:
        """The brokers' addresses; raises InvalidConfig while neither set nor started."""
        return _required("log.bootstrap_servers", self.log.bootstrap_servers)

    @property
    def store_dsn(self) -> str:
        """The store's connection string; raises InvalidConfig while neither set nor started."""
        return _required("store.dsn", self.store.dsn)

    @property
    def views_dsn(self) -> str:
        """The views' connection string; the store's when not set."""
        return self.views.dsn or self.store_dsn

    @property
    def archive_path(self) -> str:
        """Folder or URL of the lake."""
        return self.archive.path or str(self.project.data_dir / "archive")

    def with_addresses(self, *, bootstrap_servers: str | None, store_dsn: str | None) -> Config:
        """Copy with the addresses that are not set filled in (from the local stack)."""
        log, store = self.log, self.store
        if log.bootstrap_servers is None:
            log = log.model_copy(update={"bootstrap_servers": bootstrap_servers})
        if store.dsn is None:
            store = store.model_copy(update={"dsn": store_dsn})
        return self.model_copy(update={"log": log, "store": store})


def _required(field: str, value: str | None) -> str:
    if value is None:
        raise InvalidConfig(field, None, "an address, or a running local stack (everstate up)")
    return value


def load(folder: Path | str = ".", **overrides: dict[str, Any]) -> Config:
    """Read `everstate.toml` in ``folder`` (if it is there) and the environment.

    ``overrides`` replace fields of the file, section by section; the environment wins over both.
    Relative paths are taken from ``folder``. Raises InvalidConfig naming the field.
    """
    folder = Path(folder).resolve()
    values: dict[str, Any] = {}
    if (folder / CONFIG_FILE).is_file():
        values = TomlConfigSettingsSource(Config, folder / CONFIG_FILE)()
    for section, fields in overrides.items():
        values[section] = {**values.get(section, {}), **fields}
    try:
        config = Config(**values)
    except ValidationError as cause:
        first = cause.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise InvalidConfig(field, first.get("input"), first["msg"]) from cause
    project = config.project
    if not project.data_dir.is_absolute():
        project = project.model_copy(update={"data_dir": folder / project.data_dir})
    return config.model_copy(update={"project": project})
