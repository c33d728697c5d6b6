"""Cassandra as a server of the stack: one node on loopback, started if the settings enable it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Final

from everstate.config import Config
from everstate.errors import LocalStackError
from everstate.local.artifacts import artifacts_of, cached
from everstate.local.class_archive import class_archive_options
from everstate.local.jvm import Jvm, find_jvm, java_env, java_home
from everstate.local.server import Launch, Ports, Server
from everstate.private import private_folder

_JAVA_MAJOR: Final = 17
_PROTOCOL_VERSION, _OPTIONS, _SUPPORTED = 0x05, 0x05, 0x06

# JSON is valid YAML: paths are inserted as JSON.
_SETTINGS: Final = """\
cluster_name: everstate
num_tokens: 1
partitioner: org.apache.cassandra.dht.Murmur3Partitioner
endpoint_snitch: SimpleSnitch
listen_address: 127.0.0.1
rpc_address: 127.0.0.1
storage_port: {storage}
native_transport_port: {client}
seed_provider:
  - class_name: org.apache.cassandra.locator.SimpleSeedProvider
    parameters: [{{seeds: "127.0.0.1:{storage}"}}]
data_file_directories: [{data}]
commitlog_directory: {commitlog}
saved_caches_directory: {caches}
hints_directory: {hints}
cdc_raw_directory: {cdc}
{sync}
commitlog_segment_size: 16MiB
disk_optimization_strategy: ssd
authenticator: AllowAllAuthenticator
authorizer: AllowAllAuthorizer
auto_snapshot: false
concurrent_reads: 16
concurrent_writes: 16
key_cache_size: 8MiB
counter_cache_size: 2MiB
file_cache_size: 32MiB
memtable_heap_space: 96MiB
memtable_offheap_space: 96MiB
"""

# An acknowledged write is on disk; without fsync it is on disk within a second.
_SYNC: Final = "commitlog_sync: group\ncommitlog_sync_group_window: 2ms"
_NO_SYNC: Final = "commitlog_sync: periodic\ncommitlog_sync_period: 1000ms"

_LOGGING: Final = """\
<configuration>
  <appender name="out" class="ch.qos.logback.core.ConsoleAppender">
    <encoder><pattern>%date{ISO8601} %-5level %logger{0}: %msg%n</pattern></encoder>
  </appender>
  <root level="WARN"><appender-ref ref="out"/></root>
</configuration>
"""

_EXPORTS: Final = (
    "java.base/jdk.internal.misc",
    "java.management.rmi/com.sun.jmx.remote.internal.rmi",
    "java.rmi/sun.rmi.registry",
    "java.rmi/sun.rmi.server",
    "java.sql/java.sql",
    "java.base/java.lang.ref",
    "jdk.unsupported/sun.misc",
)
_OPENS: Final = (
    "java.base/java.lang.module",
    "java.base/jdk.internal.loader",
    "java.base/jdk.internal.ref",
    "java.base/jdk.internal.reflect",
    "java.base/jdk.internal.math",
    "java.base/jdk.internal.module",
    "java.base/jdk.internal.util.jar",
    "jdk.management/com.sun.management.internal",
    "java.base/sun.nio.ch",
    "java.base/java.io",
    "java.base/java.lang",
    "java.base/java.lang.reflect",
    "java.base/java.util",
    "java.base/java.util.concurrent",
    "java.base/java.util.concurrent.atomic",
    "java.base/java.nio",
)


def cassandra_java() -> Jvm:
    """The Java found, if Cassandra 5 can run on it.

    Cassandra installs Java's security manager at its start, which is disabled from 18 on and
    removed in 24. Raises LocalStackError naming the Java found.
    """
    jvm = find_jvm()
    if jvm.major != _JAVA_MAJOR:
        raise LocalStackError(
            f"Cassandra 5 needs Java {_JAVA_MAJOR}; found was {jvm.version} from {jvm.source} "
            f"({jvm.home}).",
            advice=f"Point JAVA_HOME to a Java {_JAVA_MAJOR}, or set cassandra.contact_points to "
            "a cluster of your own.",
        )
    return jvm


class CassandraServer(Server):
    """One node on 127.0.0.1, without passwords; the store creates keyspaces."""

    name = "cassandra"
    program = "java"
    port_names = ("client", "storage", "jmx")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._settings = self._folder / "cassandra.yaml"
        self.artifacts = artifacts_of("cassandra")
        self.marker = f"-Dcassandra.config={self._settings.as_uri()}"

    def prepare(self, ports: Ports) -> Launch:
        """Write its settings; raises LocalStackError when the Java found is not 17."""
        cassandra_java()
        private_folder(self._folder)
        places = {
            name: json.dumps(str(self._folder / name))
            for name in ("data", "commitlog", "caches", "hints", "cdc")
        }
        sync = _SYNC if self._config.local.fsync else _NO_SYNC
        self._settings.write_text(_SETTINGS.format(**places, **ports, sync=sync), "utf-8")
        logging = self._folder / "logback.xml"
        logging.write_text(_LOGGING, "utf-8")
        jars = [str(cached(self._config, artifact)) for artifact in self.artifacts]
        env = java_env(jars)
        argv = (
            str(java_home(self._config) / "bin" / "java"),
            *class_archive_options(self._config, self.name, jars),
            *self._java_options(logging, ports),
            "org.apache.cassandra.service.CassandraDaemon",
        )
        return Launch(argv, env, self._folder)

    def _java_options(self, logging: Path, ports: Ports) -> tuple[str, ...]:
        heap = self._config.cassandra.heap_mb
        settings = {
            "jdk.attach.allowAttachSelf": "true",
            "java.net.preferIPv4Stack": "true",
            "cassandra.storagedir": str(self._folder),
            "cassandra.logdir": str(self._folder),
            "logback.configurationFile": logging.as_uri(),
            "cassandra-foreground": "yes",
            # A single node has no other node to wait for.
            "cassandra.skip_wait_for_gossip_to_settle": "0",
            "cassandra.ring_delay_ms": "100",
            "cassandra.superuser_setup_delay_ms": "0",
            "cassandra.jmx.local.port": str(ports["jmx"]),
        }
        if not self._config.local.fsync:
            # Otherwise a schema change flushes ten system tables.
            settings["cassandra.unsafesystem"] = "true"
        return (
            *(f"--add-exports={name}=ALL-UNNAMED" for name in _EXPORTS),
            *(f"--add-opens={name}=ALL-UNNAMED" for name in _OPENS),
            f"-Xms{heap}M",
            f"-Xmx{heap}M",
            "-Xss384k",
            "-XX:+UseSerialGC",
            # Only the JVM's fast compiler: half the time to the first answer on two cores.
            "-XX:TieredStopAtLevel=1",
            "-XX:+ExitOnOutOfMemoryError",
            "-XX:+PerfDisableSharedMem",
            f"-XX:MaxDirectMemorySize={heap // 2}M",
            self.marker,
            *(f"-D{name}={value}" for name, value in settings.items()),
        )

    def probe(self, ports: Ports) -> None:
        """Request the options of the native protocol; raises OSError while there is no answer."""
        with self._dial(ports) as connection:
            connection.sendall(struct.pack(">BBhBi", _PROTOCOL_VERSION, 0, 1, _OPTIONS, 0))
            with connection.makefile("rb") as stream:
                head = stream.read(9)
        if len(head) != 9 or head[4] != _SUPPORTED:
            raise ConnectionError("the answer is not Cassandra's native protocol")

    def reached(self, config: Config, ports: Ports) -> Config:
        """The settings with its address."""
        return config.replaced("cassandra", contact_points=("127.0.0.1",), port=ports["client"])
