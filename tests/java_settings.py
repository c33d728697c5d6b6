"""Settings of the JVMs that tests start."""

from __future__ import annotations

import os

NAME = "JAVA_TOOL_OPTIONS"


def first_compiler_only() -> None:
    """Set it for every JVM from here on that a user's own setting does not rule.

    JVMs of tests live for a minute or two: the second compiler would take half of their time for
    code that is about to go, and its tier changes nothing but speed.
    """
    os.environ.setdefault(NAME, "-XX:TieredStopAtLevel=1")


def both_compilers() -> dict[str, str]:
    """The environment of a process whose JVM works long enough to be worth compiling well."""
    return {name: value for name, value in os.environ.items() if name != NAME}
