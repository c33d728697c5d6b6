"""No secret reaches a log or a message, however the address is written."""

from __future__ import annotations

import logging

import pytest

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


def test_a_log_line_obeys_nobody_and_looks_like_one_record(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logger = logging.getLogger("everstate")
    before = logger.handlers, logger.level, logger.propagate
    try:
        configure_logging()
        logging.getLogger("everstate.api").warning("GET %s", "/v1/\x1b[2J\n2026-01-01 ERROR forged")
    finally:
        logger.handlers, logger.level, logger.propagate = before
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("everstate.api GET /v1/\\u001b[2J")
    assert second == "    2026-01-01 ERROR forged"
