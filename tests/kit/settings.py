"""Settings of tests: those of the running servers, with other values in some sections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from everstate.config import Config


def altered(config: Config, **sections: Mapping[str, Any]) -> Config:
    """A copy of settings with other values in these sections."""
    changed = {
        name: getattr(config, name).model_copy(update=values) for name, values in sections.items()
    }
    return config.model_copy(update=changed)


def cleaning(**sections: Any) -> list[pytest.MarkDecorator]:
    """Marks of a file that runs the clean role, whose many topics are deleted after each test."""
    marks = pytest.mark
    return [marks.usefixtures("topics_deleted"), marks.settings(database=False, **sections)]


def commanding(*entities: str, **commands: Any) -> pytest.MarkDecorator:
    """The mark of a file that handles commands to these entity types."""
    commands = {"batch_wait_ms": 5, **commands}
    return pytest.mark.settings(
        log={"partitions": 3}, commands=commands, command_topics=entities, database=False
    )
