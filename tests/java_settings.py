"""Settings of the JVMs that tests start."""

from __future__ import annotations

import os

from tiers import TIER

NAME = "JAVA_TOOL_OPTIONS"


def first_compiler_only() -> None:
    """Set it for every JVM from here on that a user's own setting does not rule.

    JVMs of tests live for a minute or two: the second compiler would take half of their time for
    code that is about to go, and its tier changes nothing but speed. Its room for code is 48 MB
    alone, which a Spark under load fills in a minute; then nothing is compiled any more.
    """
    os.environ.setdefault(NAME, "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m")


def interpreted() -> dict[str, str]:
    """Settings of the Spark session that tests share: plans are interpreted, not compiled.

    A test's query reads some hundred rows once; to write Java for it and to compile that is more
    than a quarter of a file's processor seconds. The demonstration and the kills under load run
    as users do, and so does everything in the full run.
    """
    if TIER.is_full:
        return {}
    return {
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    }


def both_compilers() -> dict[str, str]:
    """The environment of a process whose JVM works long enough to be worth compiling well."""
    return {name: value for name, value in os.environ.items() if name != NAME}
