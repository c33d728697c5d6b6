"""C25: an archiver that lost its position, or writes under a new id, cannot pass unseen.

A position lives in the table's own commits, so there is no checkpoint to delete. The planted
archiver asks one that is gone, as an archive with a checkpoint beside the table would: it begins
again at the earliest offset, with the number that it thinks is next.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from fault_harness import archive_problems, read_lake, read_log

from archive_cases import ORDER, Shop
from everstate.archive import Commit
from everstate.errors import ArchiveError, Fenced
from everstate.pipeline.archiving.archiver import Archiver
from everstate.pipeline.archiving.audit import audit


@pytest.fixture
def shop(shop: Shop) -> Shop:
    shop.write_orders(keys=12, versions=1)
    shop.archiver().step()
    return shop


class LostPosition(Archiver):
    """Planted: begins at the log's begin, though the table goes further."""

    next_epoch: int | None = None
    """The number of its next append; ``None``: what the table says."""

    def _last(self) -> Commit:
        commit = super()._last()
        note = commit.note
        assert note is not None
        begins = {p: begin for (_, p), begin in self._offsets.beginnings([self._topic]).items()}
        epoch = note.epoch if self.next_epoch is None else self.next_epoch - 1
        lost = replace(note, epoch=epoch, positions={self._generation: begins})
        return replace(commit, user_metadata=lost.to_json())


class LostNumber(LostPosition):
    """Planted: its number begins again too."""

    next_epoch = 1


def lost(shop: Shop, kind: type[Archiver]) -> Archiver:
    return kind(shop.spark, shop.config, ORDER, offsets=shop.offsets, topics=shop.topics)


def wrong(shop: Shop) -> list[str]:
    """What the checker of the kill tests says."""
    log, ends = read_log(shop.config, "order")
    return archive_problems(log, read_lake(shop.config, "order"), ends)


def test_c25_a_right_archiver_that_starts_again_doubles_nothing(shop: Shop) -> None:
    shop.write_orders(keys=12, versions=1, first=2)
    shop.archiver().step()
    assert wrong(shop) == []
    assert audit(shop.spark, shop.config, "order").problems == []


def test_c25_planted_an_archive_that_begins_again_at_earliest_is_caught(shop: Shop) -> None:
    lost(shop, LostPosition).step()
    found = wrong(shop)
    assert sum("is there 2 times" in each for each in found) == 12
    assert any("overlap" in each for each in found)
    report = audit(shop.spark, shop.config, "order")
    assert {each.rule for each in report.problems} >= {"ranges", "offset twice", "rows"}
    assert "are in two commits" in report.problems[0].message


def test_c25_planted_an_old_number_writes_nothing_and_the_writer_is_told(shop: Shop) -> None:
    """Delta passes over the append without an error: the driver would go on and lose all."""
    with pytest.raises(Fenced, match="another process also archives it"):
        lost(shop, LostNumber).step()
    assert wrong(shop) == []


def test_c25_planted_a_new_writer_id_appends_all_again_and_is_caught(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstate.pipeline.archiving.archiver.app_id", lambda _: "a-new-id")
    with pytest.raises(ArchiveError, match="has epoch 2"):
        lost(shop, LostPosition).step()
    assert sum("is there 2 times" in each for each in wrong(shop)) == 12
    with pytest.raises(ArchiveError, match="has epoch 2"):
        audit(shop.spark, shop.config, "order")
