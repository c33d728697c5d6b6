"""Settings: `everstate.toml`, overridden by ``EVERSTATE_<SECTION>_<FIELD>``, read once.

Each part of everstate has one frozen section. Only this module reads the environment.
"""

from __future__ import annotations

import os
import re
import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, PrivateAttr, SecretStr, ValidationError, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from everstate.api_config import ApiConfig
from everstate.errors import (
    HIDDEN,
    EverstateError,
    InvalidConfig,
    InvalidProject,
    UnknownSetting,
)
from everstate.sections import (
    MAY_HOLD_SECRET,
    AlertsConfig,
    ArchiveConfig,
    EntityLogConfig,
    LoggingConfig,
    MetricsConfig,
    PipelineConfig,
    S3Config,
    Section,
    StoresConfig,
    ViewServerConfig,
)

CONFIG_FILE = "everstate.toml"
_PATHS: Final[dict[str, tuple[str, ...]]] = {
    "project": ("data_dir",),
    "archive": ("path",),
    "commands": ("state_path",),
    "local": ("cache_dir",),
    "api": ("ssl_certfile", "ssl_keyfile", "audit_reads"),
    "cassandra": ("ssl_cafile",),
}
"""Settings that are paths, by section."""
_TEXT_PATHS: Final = ("archive.path", "commands.state_path")
"""Paths that are text: the lake's may be a URL."""
_MISTYPED_RATIO: Final = 0.75
_VARIABLE = re.compile(r"\$(?:\{(?P<braced>\w+)\}|(?P<plain>[A-Za-z_]\w*))")


class ProjectConfig(Section):
    """`[project]`: which app this folder runs and where its data lives."""

    app: str | None = None
    """The App as ``module:attribute``. Without it, commands that need an App need ``--app``."""
    data_dir: Path = Path(".everstate")
    """Folder of the servers' data, the logs and the archive, relative to that of everstate.toml."""


class LogConfig(Section):
    """`[log]`: the Kafka cluster and how its topics are made."""

    bootstrap_servers: str | None = None
    """The brokers as ``host:port,…``. Default: the broker of the local stack."""
    options: Annotated[dict[str, str], MAY_HOLD_SECRET] = Field(default_factory=dict)
    """More client options, such as security settings, for all producers, consumers and Spark
    readers, with librdkafka's names. For Spark, the security settings are translated to the Java
    client's names. A security setting that the Java client does not have is refused."""
    java_options: Annotated[dict[str, str], MAY_HOLD_SECRET] = Field(default_factory=dict)
    """Options of Kafka's Java client, with its own names, for Spark readers: `sasl.jaas.config`,
    and others that ``options`` cannot express. With any of them, nothing is refused."""
    prefix: str = Field(default="everstate", pattern=r"^[a-zA-Z0-9_-]+$")
    """First part of every topic's name. Projects on one cluster need different prefixes."""
    partitions: int = Field(default=4, ge=1, le=1000)
    """Number of partitions of a new topic, and so of tasks that can update views in parallel."""
    replication: int = Field(default=1, ge=1)
    """Number of replicas of each partition. Use 3 on a cluster that may lose a broker."""
    changes_retention_hours: float = Field(default=72, gt=0)
    """How long `.changes` topics keep a change. The archive keeps it for ever."""
    changes_retention_bytes: int = Field(default=-1, ge=-1)
    """Largest size of a `.changes` topic, of one replica, in bytes. With -1 there is no limit."""
    dead_retention_hours: float = Field(default=720, gt=0)
    """How long dead-letter topics (`.dead`) keep a record."""
    message_bytes_max: int = Field(default=1_048_576, ge=1024)
    """Largest size of a change, in bytes. It is checked before a write commits. Of the states
    before and after, only the larger one counts, so that every entity that was created can be
    updated. The Kafka message may be twice as large."""
    occurred_ahead_hours: float = Field(default=24, ge=0)
    """How far in the future the ``occurred_at`` of a change may be, whatever its way in. A captured
    row that is further ahead becomes a dead letter."""
    linger_ms: float = Field(default=5, ge=0)
    """How long a producer waits for more records to send together. With 0 it does not wait."""
    queue_messages_max: int = Field(default=200_000, ge=1)
    """Most records in a producer's queue. When it is full, ``send`` waits; no record is lost."""
    entities: dict[str, EntityLogConfig] = Field(default_factory=dict)
    """Other values of ``partitions``, ``replication``, ``changes_retention_hours`` and
    ``changes_retention_bytes`` for one entity type, in `[log.entities.NAME]`."""

    def of(self, entity: str) -> LogConfig:
        """The section with the values of an entity type."""
        own = self.entities.get(entity, EntityLogConfig())
        return self.model_copy(update=own.model_dump(exclude_none=True))


class StoreConfig(Section):
    """`[store]`: the source of truth in PostgreSQL, with its outbox."""

    dsn: Annotated[str | None, MAY_HOLD_SECRET] = None
    """libpq connection string. Default: the PostgreSQL of the local stack."""
    outbox_keep_hours: float = Field(default=24, ge=0)
    """How long published rows stay in the outbox, to refill a log that lost its end."""
    relay_batch_rows: int = Field(default=10_000, ge=1)
    """Largest number of changes that the relay sends in one Kafka transaction."""
    relay_transaction_rows: int = Field(default=100_000, ge=1)
    """A source transaction with more changes, or more than 128 MiB, is sent in several parts."""
    relay_poll_ms: int = Field(default=20, ge=1)
    """How long the relay waits when the outbox is empty, before it looks again."""


class CassandraConfig(Section):
    """`[cassandra]`: Cassandra, for entity types and views that name it."""

    local: bool = False
    """Start a server with the local stack (needs Java 17)."""
    contact_points: tuple[str, ...] = ()
    """Hosts of your own cluster. Default: the server of the local stack."""
    port: int = Field(default=9042, ge=1, le=65535)
    """Port on which the contact points accept CQL connections."""
    user: str | None = None
    """User name, for a cluster that requires authentication."""
    password: Annotated[SecretStr | None, MAY_HOLD_SECRET] = None
    """Password of the user. The environment variable is a safer place for it than the file."""
    ssl_cafile: Path | None = None
    """Certificates of the authorities that sign the servers' certificates, in PEM, relative to
    everstate.toml. With it, connections use TLS, and the servers' certificates are checked."""
    datacenter: str = "datacenter1"
    """The local datacenter: it gets the requests first, and a new keyspace is created in it."""
    replication: int = Field(default=1, ge=1)
    """Number of replicas of a new keyspace. An existing keyspace is not changed."""
    keyspace: str = Field(default="everstate", pattern=r"^[a-z][a-z0-9_]{0,47}$")
    """Keyspace of the tables. It is created if it does not exist."""
    write_patience_s: float = Field(default=10, gt=0)
    """How long a write is retried after a conflict, or until its outcome is known."""
    poll_ms: int = Field(default=50, ge=1)
    """How often the publisher looks for unpublished changes."""
    batch_changes: int = Field(default=2_000, ge=1)
    """Largest number of changes that the publisher sends in one Kafka transaction."""
    heap_mb: int = Field(default=512, ge=256)
    """Heap of the local server, in MiB."""


class DriftConfig(Section):
    """`[drift]`: comparing the sources of truth with the changelogs."""

    every_s: float = Field(default=3600, ge=0)
    """How often the pipeline compares them. With 0 it never does."""
    repair: bool = True
    """Whether the pipeline repairs drift, or only reports it."""
    rebuild_share: float = Field(default=0.1, gt=0, le=1)
    """Share of drifted entities from which on the whole entity type is published again."""
    ranges: int = Field(default=1024, ge=1, le=65_536)
    """Number of key ranges. Rows are compared only in ranges whose count or hash differs."""
    settle_s: float = Field(default=2, ge=0)
    """How long a committed change may take to reach the log before it counts as drift."""
    keys_max: int = Field(default=1000, ge=0)
    """Largest number of keys that a report lists. It counts all of them."""


class CommandsConfig(Section):
    """`[commands]`: the handler of commands, its transactions and its local state."""

    group: str = Field(default="commands", pattern=r"^[a-zA-Z0-9_-]+$")
    """Name of the handlers' consumer group. The prefix of the log is put before it."""
    batch_wait_ms: float = Field(default=20, ge=0)
    """How long the first command of a transaction waits for others."""
    batch_commands_max: int = Field(default=1_000, ge=1, le=100_000)
    """Largest number of commands in one transaction."""
    remember_hours: float = Field(default=24, gt=0)
    """How long answers are remembered. A command repeated within this time is not decided again."""
    retention_hours: float = Field(default=72, gt=0)
    """How long commands and answers stay in the log: at least ``remember_hours``."""
    state_path: str | None = None
    """Folder of the handlers' local state, relative to everstate.toml. Default:
    ``<data_dir>/commands``."""
    cache_entities_max: int = Field(default=100_000, ge=0)
    """Largest number of entities that a handler caches in memory, over all its partitions."""
    session_timeout_s: float = Field(default=10, ge=6)
    """A handler that sends no heartbeat for this time loses its partitions to other handlers."""
    transaction_timeout_s: float = Field(default=10, ge=1, le=900)
    """The broker aborts a transaction that is open for longer. Code of the project that takes more
    than a quarter of it for one command, twice, parks the command."""

    @model_validator(mode="after")
    def _answers_outlive_memory(self) -> CommandsConfig:
        if self.remember_hours > self.retention_hours:
            raise ValueError("remember_hours to be at most retention_hours")
        return self


class ViewsConfig(Section):
    """`[views]`: where the views live."""

    dsn: Annotated[str | None, MAY_HOLD_SECRET] = None
    """libpq connection string. Default: the database of the store."""
    schema_name: str = Field(default="everstate_views", pattern=r"^[a-z_][a-z0-9_]*$")
    """PostgreSQL schema of the views and their positions. A new schema starts empty."""
    on_change: Literal["rebuild", "ask"] = "rebuild"
    """Whether a view whose meaning changed is rebuilt, or waits for `everstate views rebuild`."""
    keep_old_hours: float = Field(default=24, ge=0)
    """How long a replaced version can be restored, and an undeclared view can catch up again."""
    recompute_every_s: float = Field(default=0, ge=0)
    """How often the pipeline compares all views with a batch computation. With 0 it never does."""
    recompute: Literal["report", "promote"] = "report"
    """Whether the pipeline reports views that differ from their batch, or rebuilds them."""


class LocalConfig(Section):
    """`[local]`: the local stack."""

    fsync: bool = True
    """Whether PostgreSQL flushes each commit to the disk. Use `false` only for tests."""
    jars_url: Annotated[str | None, MAY_HOLD_SECRET] = None
    """URL of your own Maven repository, with its login if it requires one
    (`https://user:password@host/path`). Default: Maven Central."""
    cache_dir: Path | None = None
    """Folder of downloaded jars. Default: the user's cache folder."""
    kafka_heap_mb: int = Field(default=512, ge=128)
    """Heap of the broker, in MiB."""


class CaptureConfig(Section):
    """`[capture]`: change data capture by Debezium on Kafka Connect."""

    connect_url: Annotated[str | None, MAY_HOLD_SECRET] = None
    """REST address of your own Connect cluster. Default: a worker of the local stack."""
    local: tuple[Literal["connect", "mariadb"], ...] = ()
    """Servers that `everstate up` also starts. `everstate cdc add` starts Connect when needed."""
    connect_heap_mb: int = Field(default=512, ge=128)
    """Heap of the local Connect worker, in MiB."""
    worker_options: Annotated[dict[str, str], MAY_HOLD_SECRET] = Field(default_factory=dict)
    """More settings of the local Connect worker, with Kafka's names. Security settings for the
    brokers apply to its producers and consumers too."""
    password_reference: Annotated[str | None, MAY_HOLD_SECRET] = None
    """How connectors on your own cluster find a password: a reference to a config provider, such
    as ``${file:/etc/secrets/{source}:password}``, where ``{source}`` is the source's name."""
    retention_hours: float = Field(default=168, gt=0)
    """How long raw topics keep the records of a capture."""
    retention_bytes: int = Field(default=-1, ge=-1)
    """Largest size of a raw topic, in bytes. With -1 there is no limit."""
    heartbeat_s: float = Field(default=5, gt=0)
    """How often a capture writes a heartbeat into the captured database. It lets an idle database
    delete old log files, and shows how far the capture lags."""
    deletes_max_percent: int = Field(default=50, ge=0, le=100)
    """Largest share of a table's entities that a snapshot deletes because their rows are gone. If
    more are gone, none is deleted, and ``cdc status`` shows the command that deletes them."""


class Config(BaseSettings):
    """All settings of one project; build it with :func:`load`."""

    model_config = SettingsConfigDict(
        env_prefix="EVERSTATE_",
        env_nested_delimiter="_",
        env_nested_max_split=1,
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
    )

    project: ProjectConfig = ProjectConfig()
    log: LogConfig = LogConfig()
    store: StoreConfig = StoreConfig()
    cassandra: CassandraConfig = CassandraConfig()
    drift: DriftConfig = DriftConfig()
    commands: CommandsConfig = CommandsConfig()
    views: ViewsConfig = ViewsConfig()
    stores: StoresConfig = StoresConfig()
    archive: ArchiveConfig = ArchiveConfig()
    pipeline: PipelineConfig = PipelineConfig()
    api: ApiConfig = ApiConfig()
    metrics: MetricsConfig = MetricsConfig()
    local: LocalConfig = LocalConfig()
    capture: CaptureConfig = CaptureConfig()
    alerts: AlertsConfig = AlertsConfig()
    logging: LoggingConfig = LoggingConfig()
    _folder: Path = PrivateAttr(default=Path("."))

    @property
    def folder(self) -> Path:
        """The project's folder, which has everstate.toml and from which the app is imported."""
        return self._folder

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
        """The brokers' addresses; raises InvalidConfig while neither configured nor started."""
        return _required("log.bootstrap_servers", self.log.bootstrap_servers)

    @property
    def store_dsn(self) -> str:
        """The store's connection string; raises InvalidConfig if neither configured nor started."""
        return _required("store.dsn", self.store.dsn)

    @property
    def views_dsn(self) -> str:
        """The views' connection string; that of the store if not configured."""
        return self.views.dsn or self.store_dsn

    @property
    def archive_path(self) -> str:
        """Folder or URL of the lake."""
        return self.archive.path or str(self.project.data_dir / "archive")

    @property
    def s3_endpoint(self) -> str | None:
        """Address of the lake's object store; ``None``: Amazon's.

        Raises InvalidConfig while the local one was not started.
        """
        s3 = self.archive.s3
        return _required("archive.s3.endpoint", s3.endpoint) if s3.local else s3.endpoint

    @property
    def has_s3(self) -> bool:
        """Whether an object store may be read or written."""
        s3 = self.archive.s3
        return self.archive_path.startswith("s3://") or s3.local or s3.endpoint is not None

    @property
    def commands_path(self) -> Path:
        """Folder of the command handlers' local state."""
        path = self.commands.state_path
        return Path(path) if path else self.project.data_dir / "commands"

    def replaced(self, section: str, **settings: Any) -> Config:
        """Copy with other values of some settings of a section; they are not checked."""
        found = getattr(self, section).model_copy(update=settings)
        return self.model_copy(update={section: found})


def expanded(text: str, field: str) -> str:
    """``text`` with ``$NAME`` and ``${NAME}`` replaced from the environment, for secrets.

    Raises InvalidConfig naming ``field`` when a variable is not set.
    """

    def value(match: re.Match[str]) -> str:
        name = match["braced"] or match["plain"]
        if name not in os.environ:
            # A name without braces may be the end of a password that has a $: it is not shown.
            raise InvalidConfig(
                field,
                f"${{{name}}}" if match["braced"] else HIDDEN,
                "each $NAME in it to be an environment variable that is set; a password in a URL "
                "has %24 instead of $",
            )
        return os.environ[name]

    return _VARIABLE.sub(value, text)


def _required(field: str, value: str | None) -> str:
    if value is None:
        raise InvalidConfig(field, None, "an address, or a running local stack (everstate up)")
    return value


def _refusal(error: ErrorDetails, file: Path) -> EverstateError:
    """The error for pydantic's first finding; it never contains a secret.

    The value is shown only if the setting is known and may not hold a secret: the value of a
    mistyped name may be a password.
    """
    place, value = [str(part) for part in error["loc"]], error.get("input")
    field, where = ".".join(place), _where(place, file)
    if len(place) > 2 and _is_nested(place):
        place = [".".join(place[:2]), *place[2:]]
    if error["type"] == "missing":
        return InvalidConfig(field, None, "a value: it is required", where=where)
    fields = _fields_of(place[0]) if place else {}
    known = fields.get(place[1]) if len(place) > 1 else None
    is_shown = known is not None and MAY_HOLD_SECRET not in known.metadata
    if error["type"] == "extra_forbidden":
        return UnknownSetting(*_unknown(place, isinstance(value, dict)), where=where)
    if not is_shown or isinstance(value, dict | list):
        value = HIDDEN
    expected = re.sub(r"^(Input|Value) should (be |have )?|^Value error, ", "", error["msg"])
    expected = expected.replace("items after validation", "characters")
    if error["type"] == "model_type":
        expected = f"a table: [{field}], and its settings below it"
    return InvalidConfig(field, value, expected, where=where)


def _unknown(place: list[str], is_section: bool) -> tuple[str, str | None]:
    """An unknown name of a setting or section, and the most similar known one."""
    sections = {name: _fields_of(name) for name in Config.model_fields}
    if len(place) == 1 and not is_section:
        # A setting outside of its section.
        meant = [f"{name}.{place[0]}" for name, fields in sections.items() if place[0] in fields]
        return f"setting {place[0]}", meant[0] if meant else None
    if len(place) == 1:
        near = get_close_matches(place[0], sections, 1)
        return f"section [{place[0]}]", f"[{near[0]}]" if near else None
    near = get_close_matches(place[-1], _fields_of(place[0]), 1)
    return f"setting {'.'.join(place)}", ".".join([*place[:-1], near[0]]) if near else None


def _fields_of(section: str) -> dict[str, Any]:
    if section.startswith("stores."):
        return dict(ViewServerConfig.model_fields)
    if section == "archive.s3":
        return dict(S3Config.model_fields)
    known = Config.model_fields.get(section)
    return {} if known is None else getattr(known.annotation, "model_fields", {})


def _is_nested(place: list[str]) -> bool:
    """Whether a setting is in a section of a section."""
    return place[:1] == ["stores"] or place[:2] == ["archive", "s3"]


def _where(place: list[str], file: Path) -> str | None:
    """Origin of a setting: its environment variable, else file and line; ``None``: unknown."""
    variable = "_".join(["EVERSTATE", *place[: 3 if _is_nested(place) else 2]]).upper()
    if variable in (name.upper() for name in os.environ):
        return variable
    header, found = "", None
    lines = file.read_text("utf-8").splitlines() if file.is_file() else []
    for number, line in enumerate(lines, start=1):
        if match := re.match(r"\s*\[+\s*([^\]]+?)\s*\]", line):
            header = match[1].replace('"', "")
            if header.split(".") == place[: header.count(".") + 1]:
                found = f"{file.name}:{number}"
        elif match := re.match(r"\s*\"?([\w-]+)\"?\s*=", line):
            named = [*header.split("."), match[1]] if header else [match[1]]
            if named == place[: len(named)]:
                return f"{file.name}:{number}"
    return found


def _read(file: Path) -> dict[str, Any]:
    """Contents of `everstate.toml`, empty if there is none; raises InvalidProject."""
    if not file.parent.is_dir():
        raise InvalidProject(
            f"there is no folder {file.parent}.", advice="Give the project's folder with -C."
        )
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except tomllib.TOMLDecodeError as cause:
        reason, _, place = str(cause).rstrip(")").rpartition(" (at ")
        line = re.search(r"line (\d+)", place)
        where = f"{file.name}:{line[1]}" if line else file.name
        raise InvalidProject(
            f"{where}: this is not TOML: {reason or cause} ({place}).",
            advice=f"Correct {file}; a text value needs quotes.",
        ) from None
    except (OSError, UnicodeDecodeError) as cause:
        raise InvalidProject(f"{file} cannot be read: {cause}.") from None


def path_of(url: str) -> str:
    """The path of a URL as it is written; an @ in it is the end of a password that has a slash."""
    _, scheme, rest = url.partition("://")
    return rest.partition("?")[0].partition("/")[2] if scheme else ""


def check_dsn(field: str, dsn: str) -> None:
    """Raise InvalidConfig for a connection string that libpq would misread.

    It splits a URL at an `@` or `%` in the password, and its messages would show the parts. The
    error does not show the address itself.
    """
    # Imported here: without an address no driver is needed.
    from everstate.postgres import settings_of

    try:
        parts = settings_of(dsn)
    except ValueError:
        parts = {"host": " @"}
    host, ports = parts.get("host", ""), parts.get("port", "").split(",")
    is_misread = "@" in host[1:] or "@" in path_of(dsn)
    if is_misread or not all(port.isdigit() for port in ports if port):
        raise InvalidConfig(
            field,
            HIDDEN,
            "a connection string of libpq: postgresql://user:password@host:port/database, with "
            "%40 for @, %25 for %, %2F for / and %20 for a space in the password, or "
            "host=… password='…' with \\ before ' and \\ in it",
        ) from None


def load(folder: Path | str = ".", **overrides: dict[str, Any]) -> Config:
    """Read `everstate.toml` in ``folder`` (if it exists) and the environment.

    ``overrides`` replace fields of the file, section by section; the environment overrides both.
    Relative paths are relative to ``folder``, and ``~`` is the user's home. Raises InvalidConfig
    and UnknownSetting naming the field and where it was set, and InvalidProject for a folder or a
    file that cannot be read.
    """
    folder = Path(folder).resolve()
    file = folder / CONFIG_FILE
    values = _read(file)
    for section, fields in overrides.items():
        values[section] = {**values.get(section, {}), **fields}
    _refuse_mistyped_variables()
    try:
        config = Config(**values)
    except ValidationError as cause:
        raise _refusal(cause.errors()[0], file) from None
    except SettingsError as cause:
        # Its message names the setting; its cause would show the value.
        raise InvalidConfig(str(cause), HIDDEN, "JSON in such a variable") from None
    for section in ("store", "views"):
        dsn = getattr(config, section).dsn
        if dsn is not None:
            check_dsn(f"{section}.dsn", dsn)
    beside = {name: _beside(folder, getattr(config, name), name) for name in _PATHS}
    servers = {k: _beside(folder, v, f"stores.{k}") for k, v in config.stores.servers.items()}
    found = config.model_copy(update={**beside, "stores": StoresConfig(**servers)})
    found._folder = folder  # noqa: SLF001
    if found.has_s3:  # Otherwise clients of S3 ask a server of Amazon's machines for the region.
        os.environ.setdefault("AWS_REGION", found.archive.s3.region)
    return found


def _beside(folder: Path, found: Section, section: str) -> Section:
    """Copy of a section in which paths are relative to ``folder``, and ``~`` is the user's home."""
    changed: dict[str, Path | str] = {}
    for name in _PATHS.get(section, ("ssl_cafile",)):
        given = getattr(found, name)
        is_text = isinstance(given, str) and f"{section}.{name}" in _TEXT_PATHS
        if not (isinstance(given, Path) or (is_text and "://" not in given)):
            continue
        try:
            place = folder / Path(given).expanduser()
        except RuntimeError:
            raise InvalidConfig(
                f"{section}.{name}", HIDDEN, "~ to be followed by / or by a user's name"
            ) from None
        changed[name] = str(place) if is_text else place
    return found.model_copy(update=changed)


def _refuse_mistyped_variables() -> None:
    """Raise UnknownSetting for a variable whose section is almost one of the sections.

    Other names that begin with ``EVERSTATE_`` are ignored: Kubernetes sets ``EVERSTATE_PORT`` and
    more in each pod when there is a Service `everstate`.
    """
    for variable in sorted(os.environ):
        prefix, _, rest = variable.upper().partition("_")
        section, separator, field = rest.partition("_")
        if prefix != "EVERSTATE" or section.lower() in Config.model_fields:
            continue
        near = get_close_matches(section.lower(), Config.model_fields, 1, _MISTYPED_RATIO)
        if near:
            meant = f"EVERSTATE_{near[0].upper()}{separator}{field}"
            raise UnknownSetting(f"section [{section.lower()}]", meant, where=variable)
