"""No secret reaches a log or a message, however the address is written."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest

from everstate.sections import LoggingConfig
from everstate.telemetry import configure_logging, without_secret


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://u:s3cret@h:5432/db",
        "postgresql://:s3cret@h/db",
        "postgresql://h/db?user=u&password=s3cret&sslmode=require",
        "host=h password=s3cret dbname=db",
        "host=h PASSWORD = 's3cret with space' dbname=db",
        "postgresql://u:p@s3cret@h/db",
        "postgresql://u:p/s3cret@h/db",
        "host=h password=s3cret\\ s3cret dbname=db",
        "host=h password='it\\'s s3cret' dbname=db",
        "host=h dbname=db password='not closed s3cret",
        "redis://u:s3cret@h and postgresql://h/db?password=s3cret",
    ],
)
def test_a_password_is_struck_out(address: str) -> None:
    told = without_secret(address)
    assert "s3cret" not in told
    assert "***" in told
    assert "h" in told


def test_what_is_no_secret_stays() -> None:
    address = "postgresql://u@h:5432/db?sslmode=require"
    assert without_secret(address) == address


@contextmanager
def configured(section: LoggingConfig) -> Iterator[None]:
    """Logging as the command line sets it up, during the block."""
    logger = logging.getLogger("everstate")
    before = logger.handlers, logger.level, logger.propagate
    try:
        configure_logging(section, "relay")
        yield
    finally:
        logger.handlers, logger.level, logger.propagate = before


def test_a_log_line_obeys_nobody_and_looks_like_one_record(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with configured(LoggingConfig()):
        logging.getLogger("everstate.api").warning("GET %s", "/v1/\x1b[2J\n2026-01-01 ERROR forged")
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("everstate.api GET /v1/\\u001b[2J")
    assert second == "    2026-01-01 ERROR forged"


def test_json_records_are_one_line_each_with_the_exception_as_a_field(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with configured(LoggingConfig(format="json")):
        log = logging.getLogger("everstate.api")
        log.warning("GET %s", '/v1/\x1b[2J"\n\u2028{"level": "error"}')
        try:
            raise ValueError("two\nlines")
        except ValueError:
            log.exception("it failed: %s", without_secret("postgresql://u:s3cret@h/db"))
        log.debug("not shown")
    printed = capsys.readouterr().err
    lines = printed.splitlines()
    assert len(lines) == 2, "one line for each record, whatever it contains"
    assert "\x1b" not in printed
    first, second = (json.loads(line) for line in lines)
    age = datetime.now(UTC) - datetime.fromisoformat(first.pop("time"))
    assert timedelta(0) <= age < timedelta(minutes=1)
    assert first == {
        "level": "warning",
        "logger": "everstate.api",
        "role": "relay",
        "message": 'GET /v1/\x1b[2J"\n\u2028{"level": "error"}',
    }
    assert second["level"] == "error"
    assert second["exception"].startswith("Traceback")
    assert second["exception"].endswith("ValueError: two\nlines")
    assert "s3cret" not in lines[1]


@pytest.mark.parametrize("kind", ["text", "json"])
def test_records_below_the_level_are_not_written(
    capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    with configured(LoggingConfig.model_validate({"format": kind, "level": "error"})):
        logging.getLogger("everstate.api").warning("left out")
        logging.getLogger("everstate.api").error("written")
    (line,) = capsys.readouterr().err.splitlines()
    assert "written" in line
