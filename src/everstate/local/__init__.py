"""The local stack: real servers as child processes, the jars of Spark, and a JVM.

Layer: imports config, telemetry and errors only.
"""

from everstate.local.artifacts import spark_jars
from everstate.local.checks import disk_check, machine_checks, stack_checks
from everstate.local.class_archive import class_archive_options
from everstate.local.jvm import java_home
from everstate.local.progress import ConsoleProgress, SentenceProgress, Silent, StackProgress
from everstate.local.stack import ServerStatus, Stack, project_config, resolve
from everstate.local.supervise import keep_running, supervise

__all__ = [
    "ConsoleProgress",
    "SentenceProgress",
    "ServerStatus",
    "Silent",
    "Stack",
    "StackProgress",
    "class_archive_options",
    "disk_check",
    "java_home",
    "keep_running",
    "machine_checks",
    "project_config",
    "resolve",
    "spark_jars",
    "stack_checks",
    "supervise",
]
