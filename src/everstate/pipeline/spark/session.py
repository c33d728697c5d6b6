"""The Spark session of everstate, and the translation of Spark's errors."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NoReturn

import pyspark
from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException, PySparkRuntimeError
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

from everstate.config import Config
from everstate.errors import (
    HIDDEN,
    ArchiveDamaged,
    ArchiveError,
    ArchiveFull,
    ArchiveUnreachable,
    DataLoss,
    EverstateError,
    Fenced,
    InvalidConfig,
    PipelineError,
    PositionMoved,
    SparkLost,
    Unavailable,
)
from everstate.local import class_archive_options, java_home, s3_jars, spark_jars
from everstate.pipeline.spark.object_store import LOG_STORE, reach_object_store
from everstate.private import private_folder, properties, write_private

_SUBMIT: Final = "PYSPARK_SUBMIT_ARGS"
_LOG_SETTINGS: Final = Path(__file__).with_name("log4j2.properties")
_POOLS: Final = Path(__file__).with_name("fairscheduler.xml")

# Each of these settings is needed for a guarantee; `pipeline.options` may not change them.
_FIXED: Final = {
    "spark.sql.session.timeZone": "UTC",
    # Two attempts at one range at the same time would race for its position (C11).
    "spark.speculation": "false",
    # A bad CAST in a view's SQL is an error that names it, never a silent NULL.
    "spark.sql.ansi.enabled": "true",
    # A product that needs more than 38 digits is an error too, never rounded to six places.
    "spark.sql.decimalOperations.allowPrecisionLoss": "false",
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    # A page that differs from its sum is an error, and so is a file that is gone or unreadable.
    "spark.hadoop.parquet.page.write-checksum.enabled": "true",
    "spark.hadoop.parquet.page.verify-checksum.enabled": "true",
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.files.ignoreMissingFiles": "false",
    # Of two processes that commit to a table on S3, the second is refused.
    "spark.delta.logStore.s3.impl": LOG_STORE,
    # Kafka through the second reader API: rows are not converted twice.
    "spark.sql.sources.useV1SourceList": "avro,csv,json,orc,parquet,text",
}

_DEFAULTS: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.catalogImplementation": "in-memory",
    "spark.sql.adaptive.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.python.worker.reuse": "true",
    # Else each method of a column asks the JVM five times, so that an error can name its line.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    # Over TCP each task of Python waits 40 ms for an acknowledgement that is sent late.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # These columns differ in every row: a dictionary of them would be built and discarded.
    "spark.hadoop.parquet.enable.dictionary#raw_value": "false",
    "spark.hadoop.parquet.enable.dictionary#id": "false",
    "spark.hadoop.parquet.enable.dictionary#offset": "false",
    # With a lower value Spark reads the size of every vector after every row: a fifth of a batch.
    "spark.sql.execution.arrow.maxBytesPerBatch": "2147483647",
    "spark.sql.codegen.cache.maxEntries": "1000",
    # Snapshots of a Delta log are small; fifty partitions of them would be fifty tasks.
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.cleaner.referenceTracking.cleanCheckpoints": "true",
}

# Arrow checks bounds at every value by default; Spark's writers allocate room before they write.
# Java interprets methods of more than 8,000 bytes for ever by default, and Spark generates one such
# method for the rows of a few views.
_JAVA_OPTIONS: Final = (
    "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false "
    "-XX:-DontCompileHugeMethods"
)

_LOCAL: Final = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # Python workers write to the terminal here, and PySpark's own print harmless tracebacks.
    "spark.python.daemon.module": "everstate.pipeline.spark.daemon",
    "spark.sql.shuffle.partitions": "4",
    "spark.scheduler.mode": "FAIR",
    # Jobs that keep published views have priority over builds and proofs.
    "spark.scheduler.allocation.file": _POOLS.as_uri(),
}


# A cluster gives an application all its cores unless the application limits them; others would
# then wait for ever without an error.
_CLUSTER: Final = {"spark.cores.max": "8"}
# PySpark prints each error of a query as JSON, with its trace; our error has the reason alone.
_LOGS_OF_ERRORS: Final = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")

_CORES_WITHIN_S: Final = 60.0


def spark_session(config: Config, *, app_name: str = "everstate") -> SparkSession:
    """The Spark session of this process, started on the first call.

    ``local[*]`` or any master of ``pipeline.master``; jars come from the local cache. Times are
    UTC. ANSI mode is on: a cast that fails in a view's SQL fails that view instead of counting
    NULL; :func:`everstate.pipeline.spark.parse.parse` never fails on a record. Raises InvalidConfig
    for an option that would break a guarantee, LocalStackError without Java or jars. Cost:
    about 4 s for the first session of a process, nothing for the next.
    """
    try:
        return SparkSession.active()
    except PySparkRuntimeError:
        pass  # this process has no session yet
    settings = session_settings(config)
    # PySpark's launcher finds Java only by this environment variable.
    os.environ["JAVA_HOME"] = str(java_home(config))
    settings |= {"spark.master": config.pipeline.master, "spark.app.name": app_name}
    with spark_errors("starting Spark"):
        _start_jvm(config, settings)
        conf = SparkConf(loadDefaults=False)
        for name, value in settings.items():
            conf.set(name, value)
        on_interrupt = signal.getsignal(signal.SIGINT)
        session = SparkSession.builder.config(conf=conf).getOrCreate()
        if threading.current_thread() is threading.main_thread():
            # PySpark's own would ask the JVM on the connection of the call that it interrupts.
            signal.signal(signal.SIGINT, on_interrupt)
        # Python workers are this Python, not the first one of PATH.
        session.sparkContext.pythonExec = sys.executable
        for name in _LOGS_OF_ERRORS:
            PySparkLogger.getLogger(name).disabled = True
        if config.has_s3:
            reach_object_store(session, config)
    if not config.pipeline.master.startswith("local"):
        _await_cores(session, config.pipeline.master)
    return session


def _await_cores(session: SparkSession, master: str) -> None:
    """Raise Unavailable when the cluster runs no job of this application within a minute."""
    ran = threading.Event()

    def run() -> None:
        with suppress(PySparkException, Py4JError, ConnectionError):
            session.range(1).count()
            ran.set()

    threading.Thread(target=run, name="cores", daemon=True).start()
    if not ran.wait(_CORES_WITHIN_S):
        session.stop()
        raise Unavailable(
            f"{master} assigned no cores within {_CORES_WITHIN_S:.0f} s.",
            advice="Other applications may have all cores: give each a share with spark.cores.max "
            "under [pipeline.options]. Check also that its workers run.",
        )


@contextmanager
def own_spark(config: Config, *, app_name: str = "everstate") -> Iterator[SparkSession]:
    """The Spark session of this process; the block that started the session stops it at its end.

    A process has one session. A block that finds it running (a command within a test, a part of a
    role) does not stop it.
    """
    is_mine = SparkContext._active_spark_context is None  # noqa: SLF001 (it cannot be asked)
    session = spark_session(config, app_name=app_name)
    try:
        yield session
    finally:
        if is_mine:
            session.stop()


def leave(code: int) -> bool:
    """End each later call of Spark's JVM by SystemExit(code); False: this process has no JVM.

    For a handler of a signal: the JVM may still be at work on the call that the signal interrupts,
    and the connection would take its answer for that of the next call. It ends with this process.
    """
    gateway = SparkContext._gateway  # noqa: SLF001 (PySpark asks nowhere else)
    if gateway is None:
        return False

    def ended(*_given: object, **_more: object) -> NoReturn:
        raise SystemExit(code)

    gateway._gateway_client.send_command = ended  # noqa: SLF001 (it cannot be told to end)
    return True


def _start_jvm(config: Config, settings: Mapping[str, str]) -> None:
    """Start Spark's JVM, when this process has none, with its settings in a file.

    PySpark by itself puts each setting, S3 keys included, on the command line, which everybody on
    the machine can see. The JVM has read the file when it answers, so the file is deleted then.
    """
    if SparkContext._gateway is not None:  # noqa: SLF001 (PySpark asks nowhere else)
        return
    file = private_folder(config.project.data_dir) / f"spark.{os.getpid()}.properties"
    write_private(file, properties(settings))
    os.environ[_SUBMIT] = f"--properties-file {shlex.quote(str(file))} pyspark-shell"
    try:
        SparkContext._ensure_initialized()  # noqa: SLF001 (nor starts it without a context)
    finally:
        file.unlink(missing_ok=True)
        os.environ[_SUBMIT] = "pyspark-shell"


def session_settings(config: Config) -> dict[str, str]:
    """Spark's settings for this configuration, as text; raises InvalidConfig (see above)."""
    options = config.pipeline.options
    for name in options:
        if not name.startswith("spark."):
            # Options of a reader, such as `minPartitions`, would cut a partition's range (C12).
            raise InvalidConfig(
                f"pipeline.options[{name!r}]", HIDDEN, "a name that begins with spark."
            )
        if name in _FIXED and options[name] != _FIXED[name]:
            raise InvalidConfig(
                f"pipeline.options[{name!r}]", options[name], f"{_FIXED[name]!r}, or no such option"
            )
    jars = [str(path) for path in spark_jars(config)]
    java_options = [
        f"-Dlog4j2.configurationFile={_LOG_SETTINGS.as_uri()}",
        "-XX:+UseParallelGC",
        _JAVA_OPTIONS,
    ]
    if config.pipeline.master.startswith("local"):
        # On the JVM's class path from the start: only then its class archive can contain them.
        own = {**_LOCAL, "spark.driver.extraClassPath": os.pathsep.join(jars)}
        of_spark = sorted(map(str, Path(pyspark.__file__).parent.glob("jars/*.jar")))
        java_options += class_archive_options(config, "spark", [*jars, *of_spark])
    else:
        jars += [str(path) for path in (s3_jars(config) if config.has_s3 else ())]
        own = {**_CLUSTER, "spark.jars": ",".join(jars)}
    return {
        **_DEFAULTS,
        **own,
        "spark.driver.memory": config.pipeline.driver_memory,
        "spark.driver.extraJavaOptions": " ".join(java_options),
        "spark.executor.extraJavaOptions": _JAVA_OPTIONS,
        **options,
        **_FIXED,
    }


@contextmanager
def spark_errors(doing: str) -> Iterator[None]:
    """Translate Spark's errors in the block to ours; ``doing`` begins the message."""
    try:
        yield
    except (PySparkException, Py4JError, ConnectionError) as cause:
        raise translate(cause, doing) from cause


_SIGNS: Final[tuple[tuple[str, type[EverstateError], str], ...]] = (
    (
        r"No space left on device|Disk quota exceeded|File too large",
        ArchiveFull,
        "the disk is full",
    ),
    (
        r"ConcurrentTransactionException|DELTA_CONCURRENT_TRANSACTION",
        Fenced,
        "another process writes this archive",
    ),
    (
        r"ConcurrentAppendException|ConcurrentDelete\w+Exception|MetadataChangedException"
        r"|ProtocolChangedException|DELTA_CONCURRENT_",
        PositionMoved,
        "another process committed first",
    ),
    (
        r"KAFKA_DATA_LOSS|data may have been lost|OffsetOutOfRangeException"
        r"|Cannot fetch offset|could not be fetched|has been deleted|INCONSISTENT_OFFSETS"
        r"|UnknownTopic\w+Exception|KafkaIllegalStateException",
        DataLoss,
        "the log no longer has the records that were to be read",
    ),
    (r"everstate\.errors\.(?:\w+\.)?Unavailable", Unavailable, "a server does not answer"),
    (
        r"org\.apache\.kafka\.common\.errors\.\w*(Timeout|Disconnect|Network|Coordinator)\w*"
        r"|No resolvable bootstrap|Failed to (create|construct) (new )?(Kafka|Admin)"
        r"|UNABLE_TO_FETCH|Timeout of \d+ms expired|Cannot fetch record",
        Unavailable,
        "Kafka does not answer",
    ),
    (
        r"ChecksumException|CRC checksum verification failed",
        ArchiveDamaged,
        "a file differs from its sums",
    ),
    (
        r"fs\.s3a\.(auth\.)?\w+Exception"
        r"|Caused by: software\.amazon\.awssdk\.(?!\S*NoSuchKey)\S+Exception",
        ArchiveUnreachable,
        "the object store does not answer or refuses",
    ),
    (r"DELTA_[A-Z_]+", ArchiveError, "Delta refused"),
)


def translate(cause: BaseException, doing: str) -> EverstateError:
    """Our error for one of Spark's, with one line of its reason."""
    if isinstance(cause, Py4JNetworkError | ConnectionError):
        return SparkLost(f"{doing}: the JVM of Spark ended.", advice="Start it again.")
    text = str(cause)
    for pattern, error, meaning in _SIGNS:
        if re.search(pattern, text):
            return error(f"{doing}: {meaning} ({_reason(text)}).")
    return PipelineError(f"{doing}: {_reason(text)}")


def _reason(text: str) -> str:
    """The line with the reason: Python's exception, else Java's innermost cause, else the first."""
    _, python, trace = text.rpartition("Traceback (most recent call last)")
    raised = [line for line in trace.splitlines()[1:] if line[:1].strip()] if python else []
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    causes = [line for line in lines if line.startswith("Caused by:")]
    if raised:
        chosen = re.sub(r"^(?:\w+\.)+(?=[A-Z])", "", raised[0])
    elif causes:
        chosen = causes[-1].removeprefix("Caused by:")
    else:
        chosen = (lines or ["Spark gave no reason"])[0]
    chosen = re.sub(r"(?:[a-z]\w*\.){2,}(?=[A-Z])", "", chosen).strip()
    file = re.search(r"error while reading file (?:file:(?://)?)?(\S+?)\.?\s+SQLSTATE", text)
    if file is not None and file[1] not in chosen:
        chosen = f"{file[1]}: {chosen}"
    # A message of our own raise_error needs no SQLSTATE.
    chosen = re.sub(
        r"(?:\w+: )?\[USER_RAISED_EXCEPTION\] (.*?)(?: SQLSTATE: P0001)?$", r"\1", chosen
    )
    # Those settings are fixed here; a CAST in the definition is what helps.
    chosen = re.sub(r" If necessary set \S+ to \S+ to bypass this error[^.]*\.", "", chosen)
    return chosen if len(chosen) <= 300 else chosen[:299] + "…"
