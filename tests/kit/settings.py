"""Settings of tests: those of the running servers, with other values in some sections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everstate.config import Config


def altered(config: Config, **sections: Mapping[str, Any]) -> Config:
    """A copy of settings with other values in these sections."""
    changed = {
        name: getattr(config, name).model_copy(update=values) for name, values in sections.items()
    }
    return config.model_copy(update=changed)
