"""The page of the lake on S3 is done, on the object store of this run."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit.served_s3 import KEYS, ServedS3, address
from page_reader import Reader

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "lake-on-s3.md"


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_howto_of_the_lake_on_s3_does_what_it_says(s3: ServedS3, reader: Reader) -> None:
    reader.env = {
        **reader.env,
        **KEYS,
        "EVERSTATE_ARCHIVE_S3_LOCAL": "false",
        "EVERSTATE_ARCHIVE_S3_ENDPOINT": address(s3.port),
        "EVERSTATE_ARCHIVE_S3_PATH_STYLE": "true",
    }
    assert reader.follow(PAGE) == 6
    assert list((s3.data / "lake" / "hotel" / "guest").glob("*.parquet"))
