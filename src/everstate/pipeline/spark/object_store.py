"""Spark's part of a lake on S3: settings of Hadoop's client, and commits that are created once."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final

from pyspark.sql import SparkSession

from everstate.config import Config
from everstate.local import s3_jars
from everstate.sections import LOCAL_S3_KEY

LOG_STORE: Final = "everstate.CreatedOnceLogStore"
_SOURCE: Final = Path(__file__).with_name("CreatedOnceLogStore.java")
_IS_THERE: Final = "fs.s3.impl"


def reach_object_store(session: SparkSession, config: Config) -> None:
    """Let a session read and write the lake's object store; a second call costs nothing.

    Cost: about two seconds, for the jars and for the compiler.
    """
    java = session.sparkContext._jsc  # noqa: SLF001 (PySpark has no call for settings of Hadoop)
    hadoop = java.hadoopConfiguration()
    if hadoop.get(_IS_THERE) is None:
        jvm: Any = session.sparkContext._jvm  # noqa: SLF001 (nor for a compiler)
        loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
        for jar in s3_jars(config):
            loader.addURL(jvm.java.net.URI(jar.as_uri()).toURL())
        _define_log_store(jvm, loader)
    for name, value in s3_settings(config).items():
        if f"spark.hadoop.{name}" not in config.pipeline.options:
            hadoop.set(name, value)


def s3_settings(config: Config) -> dict[str, str]:
    """Hadoop's settings for the lake's object store; no key of a user is among them.

    The keys come from the environment of the process, its profile or the machine's role, each of
    which the JVM asks by itself. A request is repeated for some seconds; then our own retries go
    on, with the reason in `everstate status`.
    """
    s3, endpoint = config.archive.s3, config.s3_endpoint
    keys = {
        "fs.s3a.aws.credentials.provider": "software.amazon.awssdk.auth.credentials."
        "DefaultCredentialsProvider"
    }
    if s3.local:
        keys = {"fs.s3a.access.key": LOCAL_S3_KEY, "fs.s3a.secret.key": LOCAL_S3_KEY}
    return {
        _IS_THERE: "org.apache.hadoop.fs.s3a.S3AFileSystem",
        **({} if endpoint is None else {"fs.s3a.endpoint": endpoint}),
        "fs.s3a.endpoint.region": s3.region,
        "fs.s3a.path.style.access": str(s3.path_style).lower(),
        **keys,
        "fs.s3a.attempts.maximum": "3",
        "fs.s3a.retry.limit": "3",
        "fs.s3a.retry.throttle.limit": "6",
        # Hadoop's default is newer, and is made for objects that are read from end to end.
        "fs.s3a.input.stream.type": "classic",
    }


def _define_log_store(jvm: Any, loader: Any) -> None:
    """Compile :data:`LOG_STORE` in the JVM, and let the class loader have it.

    Spark has a compiler, Janino, for the code that it generates.
    """
    compiler = jvm.org.codehaus.janino.SimpleCompiler()
    compiler.setParentClassLoader(loader)
    compiler.cook(_SOURCE.read_text("utf-8"))
    with tempfile.TemporaryDirectory(prefix="everstate-") as folder:
        for name, code in compiler.getBytecodes().items():
            file = Path(folder, *name.split(".")).with_suffix(".class")
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(bytes(code))
        loader.addURL(jvm.java.net.URI(f"{Path(folder).as_uri()}/").toURL())
        loader.loadClass(LOG_STORE)
