"""What the peers need, made once and kept in the cache: Kafka Streams by Maven, Flink by PyPI."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from everstate.config import Config
from everstate.local.artifacts import cache_dir

FLINK = "apache-flink==2.3.0"
FLINK_CONNECTOR = "org.apache.flink:flink-sql-connector-kafka:5.0.0-2.2"
_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Peers:
    """Where the peers are."""

    streams: str
    """Class path of the Kafka Streams peer."""
    flink_python: Path
    flink_connector: Path


def peers(config: Config) -> Peers:
    """Make what is missing: needs `mvn`, Java 17 and some 800 MB; minutes the first time."""
    home = cache_dir(config) / "peers"
    home.mkdir(parents=True, exist_ok=True)
    streams, flink, connector = home / "streams", home / "flink", home / "connector"
    # Maven looks itself whether the source is newer.
    project = ("-f", str(_HERE / "streams" / "pom.xml"))
    _run("mvn", "-q", "-B", *project, "package", env={"PEERS_OUT": str(streams)})
    python = flink / "bin" / "python"
    if not (flink / "complete").exists():
        uv = str(Path(sys.executable).with_name("uv"))
        _run(uv, "venv", "-q", "--clear", "--python", sys.executable, str(flink))
        _run(uv, "pip", "install", "-q", "-p", str(python), FLINK)
        (flink / "complete").touch()
    if not list(connector.glob("*.jar")):
        copy = "dependency:copy", f"-Dartifact={FLINK_CONNECTOR}", f"-DoutputDirectory={connector}"
        _run("mvn", "-q", "-B", *copy)
    (jar,) = connector.glob("*.jar")
    return Peers(f"{streams}/streams-1.jar{os.pathsep}{streams}/lib/*", python, jar)


def _run(*command: str, env: dict[str, str] | None = None) -> None:
    subprocess.run(command, check=True, env={**os.environ, **(env or {})})
