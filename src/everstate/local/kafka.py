"""Kafka as a server of the stack: KRaft, one node that is broker and controller."""

from __future__ import annotations

import base64
import struct
import uuid
from pathlib import Path

from everstate.config import Config
from everstate.local.artifacts import artifacts_of, cached
from everstate.local.class_archive import class_archive_options
from everstate.local.files import fill, listed
from everstate.local.jvm import java_env, java_home
from everstate.local.server import LOG4J, Launch, Ports, Server
from everstate.private import private_folder, properties

_METADATA, _METADATA_VERSION = 3, 1

_PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{client},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{client}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
auto.create.topics.enable=false
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
broker.session.timeout.ms=3000
broker.heartbeat.interval.ms=500
log.cleaner.dedupe.buffer.size=8388608
"""

_LOGGING = f"""\
{LOG4J}logger.server.name = kafka.server
logger.server.level = INFO
"""

_ONE_REPLICA = ("--feature", "eligible.leader.replicas.version=0")
"""Turns off Kafka's eligible leader replicas (KIP-966). With that feature, the controller removes
a broker that was killed from its own partitions, and only an unclean election gives them a leader
again. The feature chooses among replicas, and here each partition has one."""


class KafkaServer(Server):
    """A broker on 127.0.0.1; topics are created explicitly, never by their first use.

    The controller refuses a restarted broker until the session of the killed one has timed out.
    The session is therefore 3 s instead of Kafka's 9 s.
    """

    name = "kafka"
    program = "java"
    port_names = ("client", "controller")

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._properties = self._folder / "server.properties"
        self.artifacts = artifacts_of("kafka")
        self.marker = str(self._properties)

    def prepare(self, ports: Ports) -> Launch:
        """Write server.properties and format the data folder when it is new (about 1.5 s)."""
        data = self._folder / "data"
        private_folder(data)
        folders = properties({"log.dirs": listed(data, "project.data_dir")})
        self._properties.write_text(_PROPERTIES.format(**ports) + folders, "ascii")
        logging = self._folder / "log4j2.properties"
        logging.write_text(_LOGGING, "utf-8")
        java = java_home(self._config) / "bin" / "java"
        jars = [str(cached(self._config, artifact)) for artifact in self.artifacts]
        env = java_env(jars)
        options: tuple[str, ...] = (f"-Dlog4j2.configurationFile={logging}", "-XX:+UseSerialGC")
        if not (data / "meta.properties").exists():
            classes = class_archive_options(self._config, self.name, jars, writes=False)
            self._format(java, (*classes, *options), env)
        options = (*class_archive_options(self._config, self.name, jars), *options)
        heap = f"-Xmx{self._config.local.kafka_heap_mb}m"
        argv = (str(java), heap, "-XX:+ExitOnOutOfMemoryError", *options, "kafka.Kafka")
        return Launch((*argv, self.marker), env, self._folder)

    def _format(self, java: Path, options: tuple[str, ...], env: dict[str, str]) -> None:
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        # A leading dash would be read as an option.
        cluster = cluster if cluster[0] != "-" else "A" + cluster[1:]
        tool = ("kafka.tools.StorageTool", "format", "--ignore-formatted", "-t", cluster)
        properties = (*_ONE_REPLICA, "-c", str(self._properties))
        command = (str(java), "-XX:TieredStopAtLevel=1", *options, *tool, *properties)
        fill(command, env, "Kafka", self._folder)

    def probe(self, ports: Ports) -> None:
        """Request the cluster's metadata; raises OSError unless it names one broker."""
        request = struct.pack(">hhihi", _METADATA, _METADATA_VERSION, 1, -1, 0)
        with self._dial(ports) as connection:
            connection.sendall(struct.pack(">i", len(request)) + request)
            with connection.makefile("rb") as stream:
                (size,) = struct.unpack(">i", _exactly(stream.read(4), 4))
                answer = _exactly(stream.read(size), size)
        _correlation, brokers = struct.unpack_from(">ii", answer)
        if brokers < 1:
            raise ConnectionError("the broker is not registered yet")

    def reached(self, config: Config, ports: Ports) -> Config:
        """The settings with its address."""
        return config.replaced("log", bootstrap_servers=f"127.0.0.1:{ports['client']}")


def _exactly(data: bytes, size: int) -> bytes:
    if len(data) != size:
        raise ConnectionError("the connection was closed in the middle of an answer")
    return data
