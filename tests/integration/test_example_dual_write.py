"""The example of the race: it diverges without a log, and never with one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from everstate.config import Config
from everstate.log.topics import Topics

EXAMPLE = Path(__file__).parents[2] / "examples" / "dual_write" / "dual_write.py"


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dual_write_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_two_stores_diverge_without_a_log_and_end_equal_with_one(
    example: ModuleType, config: Config
) -> None:
    with Topics(config) as topics:
        topics.ensure(example.app.entities)
    assert example.without_a_log(config) > 0
    assert example.with_a_log(config) == 0
