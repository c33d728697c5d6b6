"""Views in OpenSearch keep the contract of views in another store, and are found by words."""

from __future__ import annotations

from contextlib import closing
from decimal import Decimal

import pytest
from keep_cases import drain
from store_kept_contract import VIEW, Mirrored, StoreChangedContract, StoreKeptContract

from everstate.errors import ContradictoryQuery, Unavailable
from everstate.serving import Reader
from everstate.serving.view_rows import RowsQuery, read_page
from kit.opensearch import OpenSearchServer


@pytest.fixture
def served(opensearch: OpenSearchServer) -> OpenSearchServer:
    return opensearch


@pytest.mark.full
class TestOpenSearchChanged(StoreChangedContract):
    """As every store."""


class TestOpenSearchKept(StoreKeptContract):
    def test_its_rows_are_found_by_words(
        self, mirrored: Mirrored, served: OpenSearchServer
    ) -> None:
        world = mirrored.world
        with closing(world.keeper()) as keeper:
            world.send(
                world.put("o-1", "green apple", "150.00"),
                world.put("o-2", "green pear, green all over", "150.00"),
                world.put("o-3", "green apple", "99.00"),
                world.put("o-4", "green apple of the past", "150.00"),
            )
            world.send(world.change("o-4", None))
            drain(keeper)
        here = read_page(world.config, world.app, "large", RowsQuery()).standpoint.token
        one = RowsQuery(words="green -pear")
        page = read_page(world.config, world.app, VIEW, one, wait_for=here)
        (found,) = page.records()
        assert found.pop("_rank") > 0
        expected = {"country": "green apple", "amount": Decimal("150.00")}
        assert found == {**expected, "_key": "o-1", "_version": 1, "_headline": "**green** apple"}
        assert page.standpoint.token == here
        with Reader(world.config, world.app) as reader:
            best, other = reader.search(VIEW, "green")
            assert [best.key, other.key] == ["o-2", "o-1"]
            assert other.row == expected
            assert len(reader.search(VIEW, "green", limit=1)) == 1
            with pytest.raises(ContradictoryQuery, match="takes no where"):
                reader.search(VIEW, "green", where=["amount>1"])
        # The index may be refreshed later than the position: no token is promised.
        assert read_page(world.config, world.app, VIEW, one).standpoint.token is None
        with pytest.raises(ContradictoryQuery, match="its own order"):
            read_page(world.config, world.app, VIEW, RowsQuery(words="green", order=["amount"]))
        served.kill()
        try:
            with pytest.raises(Unavailable, match="the store opensearch failed"):
                read_page(world.config, world.app, VIEW, one)
        finally:
            served.start()
