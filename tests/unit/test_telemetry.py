"""No secret reaches a log or a message, however the address is written."""

from __future__ import annotations

import pytest

from everstate.telemetry import without_secret


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://u:s3cret@h:5432/db",
        "postgresql://:s3cret@h/db",
        "postgresql://h/db?user=u&password=s3cret&sslmode=require",
        "host=h password=s3cret dbname=db",
        "host=h PASSWORD = 's3cret with space' dbname=db",
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
