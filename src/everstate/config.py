"""Settings: `everstate.toml`, overridden by ``EVERSTATE_<SECTION>_<FIELD>``, read once.

Each room has one frozen section. Nothing below this module reads the environment.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from everstate.errors import (
    HIDDEN,
    EverstateError,
    InvalidConfig,
    InvalidProject,
    UnknownSetting,
)

CONFIG_FILE = "everstate.toml"
_VARIABLE = re.compile(r"\$(?:\{(?P<braced>\w+)\}|(?P<plain>[A-Za-z_]\w*))")

MAY_HOLD_SECRET: Final = "may hold a secret"
"""Mark of a setting whose value no message shows."""


class Section(BaseModel):
    """A frozen section; an unknown field is an error, so that a typing slip is not silent."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True
    )

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        """Fields as ``repr`` shows them: not those that may hold a secret."""
        fields = type(self).model_fields
        for name, value in super().__repr_args__():
            hidden = value is not None and MAY_HOLD_SECRET in fields[str(name)].metadata
            yield name, "…" if hidden else value


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
    options: Annotated[dict[str, str], MAY_HOLD_SECRET] = Field(default_factory=dict)
    """More client options (security, …) for every producer, consumer and Spark reader, in
    librdkafka's names. Spark gets its security settings in Java's words; one that Java does not
    have is refused."""
    java_options: Annotated[dict[str, str], MAY_HOLD_SECRET] = Field(default_factory=dict)
    """Options of Kafka's Java client in its own names, for Spark readers: `sasl.jaas.config`, and
    whatever else ``options`` cannot be translated to. With any of them nothing is refused."""
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
    """Largest change, in bytes, checked before a write commits. Of its states before and after only
    the larger one counts, so that what was created can be updated; its message may be twice as
    large."""
    occurred_ahead_hours: float = Field(default=24, ge=0)
    """How far ahead of now a change may say that it happened."""
    linger_ms: float = Field(default=5, ge=0)
    """How long a producer waits for more records to send together; 0 sends each at once."""
    queue_messages_max: int = Field(default=200_000, ge=1)
    """A full producer queue makes ``send`` wait: back-pressure, never loss."""


class StoreConfig(Section):
    """`[store]`: the source of truth in PostgreSQL, with its outbox."""

    dsn: Annotated[str | None, MAY_HOLD_SECRET] = None
    """libpq connection string; ``None``: the local stack's PostgreSQL."""
    outbox_keep_hours: float = Field(default=24, ge=0)
    """How long published rows stay, so that a log that lost its tail can be refilled."""
    relay_batch_rows: int = Field(default=10_000, ge=1)
    """Most changes that the relay sends in one Kafka transaction."""
    relay_transaction_rows: int = Field(default=100_000, ge=1)
    """A source transaction of more changes (or of 128 MiB) is sent in parts, each in a Kafka
    transaction of its own; a smaller one is visible whole or not at all."""
    relay_poll_ms: int = Field(default=20, ge=1)
    """How long the relay waits when the outbox is empty, before it looks again."""
    relay: Literal["polling", "replication"] = "polling"
    """How the relay learns of changes; replication is quicker, and needs wal_level = logical."""
    slot_lost: Literal["stop", "refill"] = "stop"
    """When WAL was lost that the relay had not read: stop, or publish from the outbox table."""
    slot_alarm_mib: int = Field(default=1024, ge=1)
    """WAL held for the relay, above which it warns."""


class CassandraConfig(Section):
    """`[cassandra]`: a source of truth in Cassandra, for entity types that name it."""

    local: bool = False
    """Start a server with the local stack (needs Java 17)."""
    contact_points: tuple[str, ...] = ()
    """Hosts of a cluster of your own; empty: the local stack's server."""
    port: int = Field(default=9042, ge=1, le=65535)
    """Where the contact points speak CQL."""
    user: str | None = None
    """Login of a cluster that asks for one."""
    password: Annotated[SecretStr | None, MAY_HOLD_SECRET] = None
    """Its password; better by the environment than in a file."""
    datacenter: str = "datacenter1"
    """The datacenter that is asked first, and where a new keyspace is kept."""
    replication: int = Field(default=1, ge=1)
    """Replicas of a keyspace that is made; one that exists stays as it is."""
    keyspace: str = Field(default="everstate", pattern=r"^[a-z][a-z0-9_]{0,47}$")
    """Where the tables are; made when it is missing."""
    write_patience_s: float = Field(default=10, gt=0)
    """How long a write is tried against other writers, or until its outcome is known."""
    poll_ms: int = Field(default=50, ge=1)
    """How often the publisher looks for unpublished changes."""
    batch_changes: int = Field(default=2_000, ge=1)
    """Most changes that the publisher sends in one Kafka transaction."""
    heap_mb: int = Field(default=512, ge=256)
    """Heap of the local server."""


class DriftConfig(Section):
    """`[drift]`: comparing the sources of truth with the changelogs."""

    every_s: float = Field(default=3600, ge=0)
    """How often the pipeline compares by itself; 0: never."""
    repair: bool = True
    """Whether the pipeline mends what it finds, or only tells it."""
    rebuild_share: float = Field(default=0.1, gt=0, le=1)
    """Share of the entities that has drifted from which on the whole type is published again."""
    ranges: int = Field(default=1024, ge=1, le=65_536)
    """Key ranges that are compared by count and hash before any row is."""
    settle_s: float = Field(default=2, ge=0)
    """How long a committed change may be on its way before it counts as drift."""
    keys_max: int = Field(default=1000, ge=0)
    """Most keys that a report names; all are counted."""


class CommandsConfig(Section):
    """`[commands]`: the handler of commands, its transactions and its local state."""

    group: str = Field(default="commands", pattern=r"^[a-zA-Z0-9_-]+$")
    """Name of the handlers' consumer group, after the prefix."""
    batch_wait_ms: float = Field(default=20, ge=0)
    """How long the first command of a transaction waits for others."""
    batch_commands_max: int = Field(default=1_000, ge=1, le=100_000)
    """Most commands of one transaction."""
    remember_hours: float = Field(default=24, gt=0)
    """How long an answer is remembered: a command repeated within it is not decided again."""
    retention_hours: float = Field(default=72, gt=0)
    """How long commands and answers stay in the log; not less than ``remember_hours``."""
    state_path: str | None = None
    """Folder of the handlers' local state; ``None``: ``<data_dir>/commands``."""
    cache_entities_max: int = Field(default=100_000, ge=0)
    """Entities that a handler keeps in memory, over all its partitions."""
    session_timeout_s: float = Field(default=10, ge=6)
    """A handler that is silent for so long loses its partitions to others."""
    transaction_timeout_s: float = Field(default=10, ge=1, le=900)
    """The broker aborts a transaction that is open for longer."""

    @model_validator(mode="after")
    def _answers_outlive_memory(self) -> CommandsConfig:
        if self.remember_hours > self.retention_hours:
            raise ValueError("remember_hours to be at most retention_hours")
        return self


class ViewsConfig(Section):
    """`[views]`: where the views live."""

    dsn: Annotated[str | None, MAY_HOLD_SECRET] = None
    """libpq connection string; ``None``: the same database as the store."""
    schema_name: str = Field(default="everstate_views", pattern=r"^[a-z_][a-z0-9_]*$")
    """PostgreSQL schema of the views and of their positions; another one begins anew."""
    on_change: Literal["rebuild", "ask"] = "rebuild"
    """A view whose meaning changed is built again, or waits for `everstate views rebuild`."""
    keep_old_hours: float = Field(default=24, ge=0)
    """How long a version that was replaced can be gone back to."""


class ArchiveConfig(Section):
    """`[archive]`: the lake."""

    path: Annotated[str | None, MAY_HOLD_SECRET] = None
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
    options: Annotated[dict[str, str], MAY_HOLD_SECRET] = Field(default_factory=dict)
    """More Spark settings, by their names `spark.…`; those that carry a guarantee are refused."""
    batch_changes_max: int = Field(default=200_000, ge=1)
    """Most changes of one keeper batch over all partitions."""
    poll_ms: int = Field(default=50, ge=1)
    """How long the keeper waits when there is nothing new, before it looks again."""
    held_max: int = Field(default=10_000, ge=0)
    """Most changes held behind version gaps, per entity type: `latest` is then `behind` until a gap
    fills. Of a capture: most rows held because their state before is unknown."""
    retry_s_max: float = Field(default=10, gt=0)
    """Longest pause between attempts while a server is away, or the disk is full."""


class TokenConfig(Section):
    """`[api.tokens.NAME]`: a caller, and the provenance of what it writes."""

    token: SecretStr = Field(min_length=16)
    service: str = Field(min_length=1)
    identifier: str = Field(min_length=1)


class ApiConfig(Section):
    """`[api]`: the HTTP API of `everstate serve`."""

    host: str = "127.0.0.1"
    """Address to listen on; any other than this machine's own needs tokens."""
    port: int = Field(default=8080, ge=0, le=65535)
    """0 takes a free one."""
    ssl_certfile: Path | None = None
    """Certificate chain in PEM: with it the server speaks HTTPS. Relative to everstate.toml."""
    ssl_keyfile: Path | None = None
    """Its private key in PEM, when it is not in the same file."""
    ssl_keyfile_password: Annotated[SecretStr | None, MAY_HOLD_SECRET] = None
    """The key's password, when it has one."""
    receive_timeout_s: float = Field(default=30, gt=0)
    """How long a request may take to come, headers and body; then its connection is closed."""
    tokens: Annotated[dict[str, TokenConfig], MAY_HOLD_SECRET] = Field(default_factory=dict)
    """Callers: a table ``[api.tokens.NAME]`` each, with ``token``, ``service`` and ``identifier``.
    Without any the API is in local mode: it listens to this machine only, and headers say who
    calls."""
    threads: int = Field(default=16, ge=1, le=1000)
    """Requests that are worked on at once; each may hold a connection of the store."""
    page_max: int = Field(default=500, ge=1, le=10_000)
    """Most entities of one page of a list."""
    scan_rows_max: int = Field(default=10_000, ge=1)
    """Most rows that one page of a filtered list looks at."""
    idempotency_keep_hours: float = Field(default=24, gt=0)
    """How long answers are kept by their Idempotency-Key."""
    event_timeout_s: float = Field(default=10, gt=0)
    """How long a POST of an event waits for the log before it answers 503."""


class MetricsConfig(Section):
    """`[metrics]`: the figures of each role, for Prometheus."""

    enabled: bool = True
    """Whether they are served, at `/metrics`; there is no token."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=0, ge=0, le=65_000)
    """0: a free one (see `everstate status`); else the relay's, and the others' follow it."""


class LocalConfig(Section):
    """`[local]`: the local stack."""

    fsync: bool = True
    """Whether PostgreSQL waits for the disk at each commit; `false` only for tests."""
    jars_url: Annotated[str | None, MAY_HOLD_SECRET] = None
    """A Maven repository of your own; ``None``: the public one."""
    cache_dir: Path | None = None
    """Where jars are kept; ``None``: the user's cache folder."""
    kafka_heap_mb: int = Field(default=512, ge=128)
    """Heap of the broker, in MiB."""


class CaptureConfig(Section):
    """`[capture]`: change data capture by Debezium on Kafka Connect."""

    connect_url: Annotated[str | None, MAY_HOLD_SECRET] = None
    """REST address of a Connect cluster of your own; ``None``: a worker of the local stack."""
    local: tuple[Literal["connect", "mariadb"], ...] = ()
    """Servers that `everstate up` starts beside Kafka and PostgreSQL; `cdc add` starts Connect by
    itself when it is needed."""
    connect_heap_mb: int = Field(default=512, ge=128)
    """Heap of the local worker, in MiB."""
    worker_options: Annotated[dict[str, str], MAY_HOLD_SECRET] = Field(default_factory=dict)
    """More settings of the local worker, in Java's names; security settings of the brokers are
    given to its producers and consumers too."""
    password_reference: Annotated[str | None, MAY_HOLD_SECRET] = None
    """How connectors on a cluster of your own find a password, as Connect's config providers
    spell it; ``{source}`` is the source's name: ``${file:/etc/secrets/{source}:password}``."""
    retention_hours: float = Field(default=168, gt=0)
    """How long raw topics keep what a capture wrote."""
    bulk_records: int = Field(default=500_000, ge=0)
    """A backlog of more raw records than this is parsed by Spark, in parallel."""
    heartbeat_s: float = Field(default=5, gt=0)
    """How often an idle database is written to, so that its log is let go and delay is seen."""


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
    archive: ArchiveConfig = ArchiveConfig()
    pipeline: PipelineConfig = PipelineConfig()
    api: ApiConfig = ApiConfig()
    metrics: MetricsConfig = MetricsConfig()
    local: LocalConfig = LocalConfig()
    capture: CaptureConfig = CaptureConfig()
    _folder: Path = PrivateAttr(default=Path("."))

    @property
    def folder(self) -> Path:
        """The project's folder: where everstate.toml is, and the app's module is looked for."""
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

    def with_cassandra(self, host: str, port: int) -> Config:
        """Copy with the address of a Cassandra server."""
        found = self.cassandra.model_copy(update={"contact_points": (host,), "port": port})
        return self.model_copy(update={"cassandra": found})

    @property
    def commands_path(self) -> Path:
        """Folder of the command handlers' local state."""
        path = self.commands.state_path
        return Path(path) if path else self.project.data_dir / "commands"

    def with_addresses(self, *, bootstrap_servers: str | None, store_dsn: str | None) -> Config:
        """Copy with the addresses that are not set filled in (from the local stack)."""
        log, store = self.log, self.store
        if log.bootstrap_servers is None:
            log = log.model_copy(update={"bootstrap_servers": bootstrap_servers})
        if store.dsn is None:
            store = store.model_copy(update={"dsn": store_dsn})
        return self.model_copy(update={"log": log, "store": store})


def expanded(text: str, field: str) -> str:
    """``text`` with ``$NAME`` and ``${NAME}`` taken from the environment: how secrets come in.

    Raises InvalidConfig naming ``field`` and the variable that is not set.
    """

    def value(match: re.Match[str]) -> str:
        name = match["braced"] or match["plain"]
        if name not in os.environ:
            raise InvalidConfig(field, f"${name}", f"the environment variable {name} to be set")
        return os.environ[name]

    return _VARIABLE.sub(value, text)


def _required(field: str, value: str | None) -> str:
    if value is None:
        raise InvalidConfig(field, None, "an address, or a running local stack (everstate up)")
    return value


def _refusal(error: ErrorDetails, file: Path) -> EverstateError:
    """The error for the first thing that pydantic found wrong; no secret is in it.

    The value is shown only where the setting is known and is none that may hold a secret: what
    stands under a mistyped name may be a password.
    """
    place, value = [str(part) for part in error["loc"]], error.get("input")
    field, where = ".".join(place), _where(place, file)
    if error["type"] == "missing":
        return InvalidConfig(field, None, "a value: it is required", where=where)
    fields = _fields_of(place[0]) if place and place[0] in Config.model_fields else {}
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
    """A name that is no setting's or section's, and the one that may be meant."""
    sections = {name: _fields_of(name) for name in Config.model_fields}
    if len(place) == 1 and not is_section:
        # A setting outside of its section.
        meant = [f"{name}.{place[0]}" for name, fields in sections.items() if place[0] in fields]
        return f"setting {place[0]}", meant[0] if meant else None
    if len(place) == 1:
        near = get_close_matches(place[0], sections, 1)
        return f"section [{place[0]}]", f"[{near[0]}]" if near else None
    near = get_close_matches(place[-1], sections.get(place[0], ()), 1)
    return f"setting {'.'.join(place)}", ".".join([*place[:-1], near[0]]) if near else None


def _fields_of(section: str) -> dict[str, Any]:
    return getattr(Config.model_fields[section].annotation, "model_fields", {})


def _where(place: list[str], file: Path) -> str | None:
    """Where a setting was set: its environment variable, else file and line; ``None``: unknown."""
    variable = "_".join(["EVERSTATE", *place[:2]]).upper()
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
    """What `everstate.toml` says, empty when it is not there; raises InvalidProject."""
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
            advice=f"Correct {file}; a value that is text stands in quotes.",
        ) from None
    except (OSError, UnicodeDecodeError) as cause:
        raise InvalidProject(f"{file} cannot be read: {cause}.") from None


def check_dsn(field: str, dsn: str) -> None:
    """Raise InvalidConfig for a connection string that libpq would not read as it was meant.

    A password with an `@` or a `%` in a URL is taken apart by it, and its messages would show the
    parts. The address itself is not shown.
    """
    # Imported here: who has no address needs no driver.
    from psycopg import ProgrammingError
    from psycopg.conninfo import conninfo_to_dict

    try:
        parts = conninfo_to_dict(dsn)
    except ProgrammingError:
        parts = {"host": " @"}
    host, ports = str(parts.get("host", "")), str(parts.get("port", "")).split(",")
    if "@" in host[1:] or not all(port.isdigit() for port in ports if port):
        raise InvalidConfig(
            field,
            HIDDEN,
            "a connection string of libpq: postgresql://user:password@host:port/database, with "
            "%40 for @, %25 for %, %2F for / and %20 for a space in the password, or "
            "host=… password='…' with \\ before ' and \\ in it",
        ) from None


def load(folder: Path | str = ".", **overrides: dict[str, Any]) -> Config:
    """Read `everstate.toml` in ``folder`` (if it is there) and the environment.

    ``overrides`` replace fields of the file, section by section; the environment wins over both.
    Relative paths are taken from ``folder``. Raises InvalidConfig and UnknownSetting naming the
    field and where it was set, and InvalidProject for a folder or a file that cannot be read.
    """
    folder = Path(folder).resolve()
    file = folder / CONFIG_FILE
    values = _read(file)
    for section, fields in overrides.items():
        values[section] = {**values.get(section, {}), **fields}
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
    project, archive, local = config.project, config.archive, config.local
    if not project.data_dir.is_absolute():
        project = project.model_copy(update={"data_dir": folder / project.data_dir})
    if archive.path is not None and "://" not in archive.path:
        archive = archive.model_copy(update={"path": str(folder / archive.path)})
    if local.cache_dir is not None:
        local = local.model_copy(update={"cache_dir": folder / local.cache_dir.expanduser()})
    found = config.model_copy(
        update={
            "project": project,
            "archive": archive,
            "local": local,
            "api": _beside(folder, config.api, "ssl_certfile", "ssl_keyfile"),
        }
    )
    found._folder = folder  # noqa: SLF001
    return found


def _beside(folder: Path, section: ApiConfig, *names: str) -> ApiConfig:
    """Copy with the paths of these settings taken from ``folder``."""
    given = {name: getattr(section, name) for name in names}
    return section.model_copy(
        update={name: folder / path.expanduser() for name, path in given.items() if path}
    )
