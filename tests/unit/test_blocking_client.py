"""The blocking client is the one for asyncio, without its asyncio."""

from __future__ import annotations

import blocking_client


def test_the_blocking_client_is_the_one_that_is_written_from_the_other() -> None:
    source = (blocking_client.CLIENT / "asynchronous.py").read_text("utf-8")
    written = blocking_client.blocking(source)
    assert blocking_client.BLOCKING.read_text("utf-8") == written, (
        "edit asynchronous.py, then run `python tests/blocking_client.py`"
    )
    changed = source.replace("PAGE)", "PAGE + 1)")
    assert changed != source
    assert blocking_client.blocking(changed) != written
