"""The local stack: real servers as child processes, the jars of Spark, and a JVM."""

from everstate.local.artifacts import s3_jars as s3_jars
from everstate.local.artifacts import spark_jars as spark_jars
from everstate.local.checks import disk_check as disk_check
from everstate.local.checks import machine_checks as machine_checks
from everstate.local.checks import stack_checks as stack_checks
from everstate.local.class_archive import class_archive_options as class_archive_options
from everstate.local.jvm import java_home as java_home
from everstate.local.progress import SILENT as SILENT
from everstate.local.progress import ConsoleProgress as ConsoleProgress
from everstate.local.progress import SentenceProgress as SentenceProgress
from everstate.local.stack import ServerStatus as ServerStatus
from everstate.local.stack import Stack as Stack
from everstate.local.stack import project_config as project_config
from everstate.local.stack import resolve as resolve
from everstate.local.supervise import keep_running as keep_running
from everstate.local.supervise import supervise as supervise
