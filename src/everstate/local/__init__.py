"""The local stack: real servers as child processes, the jars of Spark, and a JVM.

Layer: imports config, telemetry and errors only.
"""

from everstate.local.artifacts import spark_jars
from everstate.local.jvm import java_home
from everstate.local.progress import ConsoleProgress, Progress, Silent
from everstate.local.stack import ServerStatus, Stack, connect

__all__ = [
    "ConsoleProgress",
    "Progress",
    "ServerStatus",
    "Silent",
    "Stack",
    "connect",
    "java_home",
    "spark_jars",
]
