"""Kafka Connect with Debezium as a server of the stack: one distributed worker, loopback only."""

from __future__ import annotations

import hashlib
import json
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from everstate.config import Config
from everstate.local.artifacts import artifacts_of, cache_dir, cached
from everstate.local.class_archive import class_archive_options
from everstate.local.files import listed, unpacked
from everstate.local.jvm import java_env, java_home
from everstate.local.server import LOG4J, Launch, Ports, Server
from everstate.private import private_folder, properties, write_private

_PROBE_S = 2.0
_SECURITY = ("security.", "sasl.", "ssl.")

_PROPERTIES = """\
group.id={prefix}.connect
listeners=http://127.0.0.1:{client}
rest.advertised.host.name=127.0.0.1
rest.advertised.port={client}
admin.listeners=
key.converter=org.apache.kafka.connect.json.JsonConverter
key.converter.schemas.enable=false
value.converter=org.apache.kafka.connect.json.JsonConverter
value.converter.schemas.enable=false
config.storage.topic={prefix}.connect.configs
offset.storage.topic={prefix}.connect.offsets
status.storage.topic={prefix}.connect.status
config.storage.replication.factor={replication}
offset.storage.replication.factor={replication}
status.storage.replication.factor={replication}
offset.storage.partitions=1
status.storage.partitions=1
offset.flush.interval.ms=5000
scheduled.rebalance.max.delay.ms=0
plugin.discovery=SERVICE_LOAD
config.providers=file
config.providers.file.class=org.apache.kafka.common.config.provider.FileConfigProvider
producer.compression.type=lz4
"""

_LOGGING = f"""\
{LOG4J}# A topic that is made a moment later is no news.
logger.network.name = org.apache.kafka.clients.NetworkClient
logger.network.level = ERROR
"""


class ConnectServer(Server):
    """A worker on 127.0.0.1 that keeps its connectors, offsets and states in the log's cluster."""

    name = "connect"
    program = "java"

    def __init__(self, config: Config, brokers: Callable[[], str]) -> None:
        """``brokers`` returns the log's addresses once they are known."""
        super().__init__(config)
        self._brokers = brokers
        self._properties = self._folder / "connect.properties"
        self._plugins = artifacts_of("debezium")
        jars = (*artifacts_of("kafka"), *artifacts_of("connect"))
        self._jars = tuple(dict.fromkeys(jars))
        self.artifacts = (*self._jars, *self._plugins)
        self.marker = str(self._properties)

    def prepare(self, ports: Ports) -> Launch:
        """Unpack the plugins once per user and write the worker's settings."""
        secrets = secrets_dir(self._config)
        private_folder(secrets)
        text = _PROPERTIES.format(
            prefix=self._config.log.prefix, replication=self._config.log.replication, **ports
        )
        settings = {
            "bootstrap.servers": self._brokers(),
            "plugin.path": listed(self._unpack(), "local.cache_dir"),
            "config.providers.file.param.allowed.paths": listed(secrets, "project.data_dir"),
            **self._options(),
        }
        write_private(self._properties, text + properties(settings))
        logging = self._folder / "log4j2.properties"
        logging.write_text(_LOGGING, "utf-8")
        java = java_home(self._config) / "bin" / "java"
        jars = [str(cached(self._config, artifact)) for artifact in self._jars]
        argv = (
            str(java),
            f"-Xmx{self._config.capture.connect_heap_mb}m",
            "-XX:+ExitOnOutOfMemoryError",
            "-XX:+UseSerialGC",
            *class_archive_options(self._config, self.name, jars),
            f"-Dlog4j2.configurationFile={logging}",
            "org.apache.kafka.connect.cli.ConnectDistributed",
            self.marker,
        )
        return Launch(argv, java_env(jars), self._folder)

    def probe(self, ports: Ports) -> None:
        """Request the worker's version and health; raises OSError while it does not answer."""
        for path in ("/", "/connectors"):
            url = f"http://127.0.0.1:{ports['client']}{path}"
            try:
                with urllib.request.urlopen(url, timeout=_PROBE_S) as answer:
                    json.load(answer)
            except (urllib.error.HTTPError, ValueError) as cause:
                raise ConnectionError(f"{url}: {cause}") from cause

    def reached(self, config: Config, ports: Ports) -> Config:
        """The settings with its REST address."""
        return config.replaced("capture", connect_url=f"http://127.0.0.1:{ports['client']}")

    def _options(self) -> dict[str, str]:
        settings = dict(self._config.capture.worker_options)
        for name, value in self._config.capture.worker_options.items():
            if name.startswith(_SECURITY):
                clients = ("producer", "consumer", "admin")
                settings.update({f"{client}.{name}": value for client in clients})
        return settings

    def _unpack(self) -> Path:
        """The folder of the plugins, one folder in it for each connector."""
        content = "".join(plugin.sha256 for plugin in self._plugins)
        name = hashlib.sha256(content.encode()).hexdigest()[:16]

        def unpack(folder: Path) -> None:
            for plugin in self._plugins:
                with tarfile.open(cached(self._config, plugin), mode="r:gz") as tar:
                    tar.extraction_filter = getattr(tarfile, "data_filter", None)
                    tar.extractall(folder)

        return unpacked(cache_dir(self._config) / "debezium" / name, unpack)


def secrets_dir(config: Config) -> Path:
    """Folder from which the local worker reads passwords; no other user may read it."""
    return config.project.data_dir / "connect" / "secrets"
