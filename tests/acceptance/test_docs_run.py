"""Every page that shows how to do something is done."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from everstate.config import load
from everstate.local import Stack
from page_reader import Reader, blocks
from tiers import TIER

HOWTO = Path(__file__).parents[2] / "docs" / "howto"


@pytest.fixture
def alone(tmp_path: Path, spark: SparkSession) -> Iterator[Reader]:
    """A reader who has nothing but the package: the local stack is started as the page says."""
    made = Reader(tmp_path, {"PYTHONPATH": str(tmp_path)}, real=False)
    yield made
    made.stop()
    Stack(load(tmp_path)).stop()


PAGES = (
    "commands.md",
    "handlers.md",
    "rest.md",
    "access.md",
    "drift.md",
    "clean.md",
    "derived-topics.md",
    "triggers-and-policies.md",
    "alerts-and-monitoring.md",
    "size-the-log.md",
    "read-views-over-http.md",
)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page",
    ["outbox.md", *(pytest.param(page, marks=pytest.mark.full) for page in PAGES)],
)
def test_a_howto_does_what_it_says(reader: Reader, page: str) -> None:
    assert reader.follow(HOWTO / page) >= 4


@pytest.mark.timeout(900)
def test_ones_own_entity_type_goes_from_a_model_to_a_view_by_real_processes(
    reader: Reader,
) -> None:
    reader.real = True
    assert reader.follow(HOWTO / "own-entity-type.md") >= 4
    reader.real = False
    # These go on from it.
    assert reader.follow(HOWTO / "follow-changes.md") == 7
    assert reader.follow(HOWTO / "analyse.md") == 6
    assert reader.follow(HOWTO / "console.md") == 1


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_page_of_webhooks_does_what_it_says(reader: Reader) -> None:
    reader.env = {**reader.env, "GUEST_WEBHOOK_SECRET": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"}
    assert reader.follow(HOWTO / "webhooks.md") == 9


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_first_project_of_the_tutorial_is_made_changed_and_killed(reader: Reader) -> None:
    reader.real = True
    reader.env = {**reader.env, "EVERSTATE_PIPELINE_DRIVER_MEMORY": "1g"}
    assert reader.follow(HOWTO.parent / "tutorial" / "first-project.md") == 22


@pytest.mark.full
@pytest.mark.timeout(900)
def test_views_are_read_and_changed_as_the_pages_say_on_a_project_that_runs(reader: Reader) -> None:
    """The pages go on from a project that runs: that of another page."""
    reader.follow(HOWTO / "own-entity-type.md")
    assert reader.follow(HOWTO / "read-with-sql.md") == 2
    reader.stop()
    reader.running.clear()
    assert reader.follow(HOWTO / "change-a-view-or-a-model.md") == 7


@pytest.mark.full
@pytest.mark.timeout(900)
def test_views_of_every_kind_are_declared_and_read_as_the_pages_say(reader: Reader) -> None:
    """Each page goes on from the first one's project."""
    pages = ["groups-and-top-lists", "last-n-and-timelines", "windows-and-changes"]
    for page in [*pages, "search-and-caches", "joins", "views-in-python"]:
        assert reader.follow(HOWTO / f"{page}.md") >= 3
        reader.stop()
        reader.running.clear()


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_shop_has_what_its_own_book_says(reader: Reader, tmp_path: Path) -> None:
    """Its customers keep a book beside everstate, and each view must come to the same."""
    for file in (HOWTO.parents[1] / "examples" / "shop").iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    assert reader.follow(tmp_path / "README.md") == 3


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.kafka
@pytest.mark.postgres
@pytest.mark.parametrize(("page", "count"), [("import-a-file.md", 9), ("own-servers.md", 2)])
def test_a_howto_does_what_it_says_for_who_has_nothing(
    alone: Reader, page: str, count: int
) -> None:
    assert alone.follow(HOWTO / page) == count


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_capture_howto_does_what_it_says(reader: Reader, database: str, tmp_path: Path) -> None:
    reader.env = {**reader.env, "SHOP_DSN": database}
    try:
        assert reader.follow(HOWTO / "cdc.md") > 8
    finally:
        Stack(load(tmp_path), also=("connect",)).stop(("connect",))


@pytest.mark.full
@pytest.mark.timeout(600)
def test_what_the_outbox_still_has_is_published_again_as_the_page_of_troubles_says(
    reader: Reader,
) -> None:
    """The page goes on from a project that runs: that of another page."""
    reader.follow(HOWTO / "drift.md")
    (refill,) = [each for each in blocks(HOWTO / "when-something-is-wrong.md") if each.runs]
    code, output = reader.run(["python", "-c", refill.text])
    assert (code, output) == (0, "2 changes are published again\n")


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_migration_goes_forward_and_back_with_writes_running(
    reader: Reader, tmp_path: Path
) -> None:
    """In the full run by real processes, as a reader does it."""
    reader.real = TIER.is_full
    for file in (HOWTO.parents[1] / "examples" / "migrate").iterdir():
        shutil.copy(file, tmp_path)
    assert reader.follow(HOWTO / "migrate.md") == 7
    # Some hundred writes were acknowledged while the service moved.
    assert len((tmp_path / "acknowledged.jsonl").read_text("utf-8").splitlines()) > 200
