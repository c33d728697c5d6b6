"""Feeds on real servers: pages that never change, and walkers that miss nothing."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from random import Random
from typing import Any
from xml.etree import ElementTree as ET

import httpx
import pytest
from test_reading_changes import woven
from test_reading_handover import load
from test_subscriptions import faults, served

from callers import caller_entry
from everstate.changes.tokens import Spot
from everstate.client import AsyncClient, Client, RequestFailed
from everstate.log.topics import Topics
from everstate.serving import feeds as feeds_module
from everstate.serving.feeds import FeedReader
from kit.settings import altered
from log_cases import forget
from reading_cases import PARTITIONS, Orders

pytestmark = pytest.mark.settings(api={"port": 0})

ATOM = "{http://www.w3.org/2005/Atom}"
ARCHIVE = "{http://purl.org/syndication/history/1.0}archive"
APP = "{http://www.w3.org/2007/app}"
JSON = {"Accept": "application/json"}
SECRET = "a secret of some length"
OFFSETS = 8


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that a few changes fill."""
    monkeypatch.setattr(feeds_module, "PAGE_OFFSETS", OFFSETS)


@pytest.fixture
def address(orders: Orders) -> Iterator[str]:
    with served(orders) as found:
        yield found


class Walker:
    """Walks the feeds again and again, leaves the walk at random, and comes back."""

    def __init__(self, address: str, random: Random) -> None:
        self._address, self._random = address, random
        self.changes: list[dict[str, Any]] = []
        self.left = 0
        self.ended = threading.Event()
        self.failed: list[BaseException] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        bookmark = "beginning"
        try:
            while True:
                was_last = self.ended.is_set()
                stay = 10**9 if was_last else self._random.randrange(8)
                with Client(self._address) as client:
                    for page in client.feed("order", since=bookmark):
                        self.changes += page.changes
                        bookmark = page.bookmark
                        stay -= 1
                        if stay < 0:
                            self.left += 1
                            break
                if was_last:
                    return
                time.sleep(self._random.random() * 0.05)
        except BaseException as error:
            self.failed.append(error)

    def stop(self) -> None:
        self.ended.set()
        self._thread.join()


def walk_under_load(orders: Orders, address: str, seconds: float) -> list[Walker]:
    """Walkers that began with the writers, and ended when everything was kept."""
    random, ended = Random(3), threading.Event()
    writer = threading.Thread(target=load, args=(orders, ended, random))
    with orders.keeping():
        walkers = [Walker(address, Random(seed)) for seed in range(4)]
        writer.start()
        time.sleep(seconds)
        ended.set()
        writer.join()
        orders.wait_until_kept()
        for each in walkers:
            each.stop()
    assert [error for each in walkers for error in each.failed] == []
    return walkers


def told(orders: Orders, walker: Walker) -> list[str]:
    """What is wrong with the changes that a walker has."""
    wrong = faults(walker.changes, dict.fromkeys(orders.versions, 0))
    newest = {change["key"]: change["version"] for change in walker.changes}
    for key, (version, _) in orders.versions.items():
        if newest.get(key, 0) != version:
            wrong.append(f"{key}: {newest.get(key, 0)} is the last, not {version}")
    return wrong


@pytest.mark.timeout(120)
def test_walkers_that_leave_and_come_back_miss_nothing_and_get_nothing_twice(
    orders: Orders, address: str
) -> None:
    walkers = walk_under_load(orders, address, 4.0)
    for each in walkers:
        assert told(orders, each) == []
    assert sum(each.left for each in walkers) > 20, "they were away often"
    pages = [page for page, _ in closed_pages(address)]
    assert len(pages) > 20, "some pages were closed meanwhile"


@pytest.mark.timeout(120)
def test_the_checker_catches_a_page_without_what_was_released_on_it(
    orders: Orders, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: a page has the changes that were written on it, not those that take effect on it."""
    monkeypatch.setattr(
        feeds_module,
        "in_effect",
        lambda records, offsets, since, *_: [
            (Spot(offset + 1), record)
            for record, offset in zip(records, offsets, strict=True)
            if offset >= since.next_offset
        ],
    )
    walkers = walk_under_load(orders, address, 1.5)
    assert all(told(orders, each) for each in walkers)


@pytest.mark.full
@pytest.mark.timeout(120)
def test_the_checker_catches_a_page_that_is_closed_before_it_is_judged(
    orders: Orders, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: a page is closed as soon as it has one change."""
    monkeypatch.setattr(
        feeds_module.FeedPlace, "is_closed", property(lambda place: place.end > place.start)
    )
    random, ended = Random(3), threading.Event()
    writer = threading.Thread(target=load, args=(orders, ended, random))
    with orders.keeping():
        writer.start()
        walker = Walker(address, random)
        time.sleep(2)
        ended.set()
        writer.join()
        orders.wait_until_kept()
        walker.stop()
    assert told(orders, walker) or walker.failed, "the page after the head is not there"


def listed(address: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{address}/feed/v1/order", headers=JSON).json()[
        "feeds"
    ]
    return found


def closed_pages(address: str) -> list[tuple[str, bytes]]:
    """Path and form, and bytes, of all closed pages in both forms."""
    found = []
    for feed in listed(address):
        for number in range(feed["pages"]):
            for form in ("application/atom+xml", "application/json"):
                path = f"{feed['current']}/{number}"
                answer = httpx.get(f"{address}{path}", headers={"Accept": form})
                assert answer.headers["content-type"] == form
                assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
                assert answer.headers["vary"] == "Accept"
                found.append((f"{path} {form}", answer.content))
    return found


def filled(orders: Orders, changes: int = 150) -> None:
    """A log with some closed pages, a change that came late, a duplicate and no change."""
    orders.send(*woven(orders))
    orders.send(*(orders.change(f"m{n % 50}", quantity=n, status="open") for n in range(changes)))
    orders.keep()


@pytest.mark.full
def test_a_closed_page_has_the_same_bytes_for_ever(orders: Orders, address: str) -> None:
    """Whatever is written, released, forgotten by the log, or read by another server."""
    early = [orders.change("late", quantity=n, status="open") for n in range(3)]
    orders.send(*early[1:])
    filled(orders)
    before = dict(closed_pages(address))
    assert len(before) > 8
    orders.send(early[0])
    with orders.keeping():
        for n in range(40):
            orders.send(*(orders.change(f"m{k}", quantity=n, status="paid") for k in range(20)))
        orders.wait_until_kept()
    after = dict(closed_pages(address))
    assert len(after) > len(before)
    assert {page: after[page] for page in before} == before
    ends = orders.kept.vector()
    orders.archive(ends).mix()
    forget(orders.config, orders.topic, {partition: end - 1 for partition, end in ends.items()})
    with served(orders) as other:
        assert dict(closed_pages(other)) == after
    with Client(address) as client:
        changes = [change for page in client.feed("order") for change in page.changes]
    assert [change["version"] for change in changes if change["key"] == "late"] == [1, 2, 3]


def test_a_page_whose_changes_nobody_has_is_gone_and_not_shorter(
    orders: Orders, address: str
) -> None:
    filled(orders)
    feed = max(listed(address), key=lambda each: each["pages"])
    assert feed["pages"] > 1
    partition = int(feed["feed"].rpartition("-")[2])
    forget(orders.config, orders.topic, {partition: OFFSETS - 1})
    gone = httpx.get(f"{address}{feed['first']}")
    assert (gone.status_code, gone.json()["type"]) == (410, "urn:everstate:error:PageGone")
    assert "immutable" not in gone.headers.get("cache-control", "")
    assert httpx.get(f"{address}{feed['current']}/1").status_code == 200
    with Client(address) as client, pytest.raises(RequestFailed) as refused:
        list(client.feed("order"))
    assert refused.value.status == 410


def test_links_lead_through_all_pages_in_both_directions(orders: Orders, address: str) -> None:
    filled(orders)
    service = ET.fromstring(httpx.get(f"{address}/feed/v1/order").content)
    heads = [each.attrib["href"] for each in service.iter(f"{APP}collection")]
    assert len(heads) == PARTITIONS
    ids = []
    for head in heads:
        back = list(followed(address, head, "prev-archive"))
        assert back[0][1].find(ARCHIVE) is None
        assert all(page.find(ARCHIVE) is not None for _, page in back[1:])
        there = list(followed(address, back[-1][0], "next-archive"))
        assert [path for path, _ in there[:-1]] == [path for path, _ in reversed(back[1:])]
        assert entries(there[-1][1]) == entries(back[0][1]), "the last one is the head's page"
        for path, page in [*back, *there]:
            assert links(page)["self"] == path
            assert links(page)["current"] == head
            assert {page.findtext(f"{ATOM}{name}", "") for name in ("id", "title")}.isdisjoint({""})
            assert page.findtext(f"{ATOM}updated", "").endswith("Z")
        ids += [each for _, page in there for each in entries(page)]
    assert len(ids) == len(set(ids)) == sum(version for version, _ in orders.versions.values())


def followed(address: str, path: str, relation: str) -> Iterator[tuple[str, ET.Element]]:
    following: str | None = path
    while following is not None:
        page = ET.fromstring(httpx.get(address + following).content)
        yield following, page
        following = links(page).get(relation)


def links(page: ET.Element) -> dict[str, str]:
    return {each.attrib["rel"]: each.attrib["href"] for each in page.findall(f"{ATOM}link")}


def entries(page: ET.Element) -> list[str]:
    return [each.findtext(f"{ATOM}id", "") for each in page.findall(f"{ATOM}entry")]


def test_who_has_an_answer_already_gets_304(orders: Orders, address: str) -> None:
    filled(orders)
    feed = max(listed(address), key=lambda each: each["pages"])
    places = ["/feed/v1/order", feed["current"], f"{feed['current']}/{feed['pages']}"]
    for place in (*places, feed["first"]):
        tags = set()
        for headers in ({}, JSON):
            answer = httpx.get(address + place, headers=headers)
            tag = answer.headers["etag"]
            tags.add(tag)
            known = {**headers, "If-None-Match": f'W/"other", {tag}'}
            again = httpx.get(address + place, headers=known)
            assert (again.status_code, again.content) == (304, b"")
            assert again.headers["etag"] == tag
            assert again.headers["cache-control"] == answer.headers["cache-control"]
            weak = httpx.get(address + place, headers={**headers, "If-None-Match": f"W/{tag}"})
            assert weak.status_code == 304
        assert len(tags) == 2, "each form has a tag of its own"
    before = [httpx.get(address + place) for place in places]
    orders.send(*(orders.change(f"m{n}", quantity=1, status="paid") for n in range(30)))
    orders.keep()
    for place, answer in zip(places, before, strict=True):
        assert answer.headers["cache-control"] == "public, no-cache"
        known = {"If-None-Match": answer.headers["etag"]}
        again = httpx.get(address + place, headers=known)
        assert (again.status_code, again.content != answer.content) == (200, place != places[0])


def test_an_entry_has_whatever_a_change_may_have(orders: Orders, address: str) -> None:
    """Markup, quotes, what XML cannot have at all; the content is the change's JSON."""
    texts = [
        "<b>&amp;]]></content>\"'",
        "\x01\x0b\x7f\ufffe\uffff\U0001f600 \u2028",
        "\r\n\t ",
        "é",
    ]
    for number, text in enumerate(texts):
        orders.send(orders.change(f"k{number}{text}", region=text, status="open"))
    orders.keep()
    found = {}
    for feed in listed(address):
        page = ET.fromstring(httpx.get(address + feed["current"]).content)
        listing = httpx.get(address + feed["current"], headers=JSON).json()
        contents = [
            (entry, json.loads(entry.findtext(f"{ATOM}content", "")))
            for entry in page.findall(f"{ATOM}entry")
        ]
        assert [content for _, content in contents] == listing["changes"]
        for entry, content in contents:
            found[content["key"]] = content
            assert entry.findtext(f"{ATOM}id") == f"urn:uuid:{content['id']}"
            assert entry.findtext(f"{ATOM}updated", "") == content["recordedAt"]
            assert content["key"][0] in entry.findtext(f"{ATOM}title", "")
            who = content["provenance"]
            names = [each.findtext(f"{ATOM}name") for each in entry.findall(f"{ATOM}author")]
            assert names[0] == f"{who['serviceName']} {who['identifier']}"
            category = entry.find(f"{ATOM}category")
            assert category is not None
            assert category.attrib["term"] == content["kind"] == "created"
            assert content["originalEntityState"] is None
    wanted = {f"k{number}{text}": text for number, text in enumerate(texts)}
    assert {key: each["currentEntityState"]["region"] for key, each in found.items()} == wanted


def test_a_feed_of_one_kind_of_changes(orders: Orders, address: str) -> None:
    orders.send(*(orders.change(f"k{n % 9}", quantity=n, status="open") for n in range(150)))
    orders.send(*(orders.change(f"k{n}") for n in range(4)))
    orders.keep()
    deleted = []
    for feed in listed(address):
        place: str | None = f"{feed['first']}?kind=deleted"
        while place is not None:
            page = httpx.get(address + place, headers=JSON).json()
            assert page["self"] == place
            deleted += [change["key"] for change in page["changes"]]
            place = page["next"]
    assert sorted(deleted) == ["k0", "k1", "k2", "k3"]
    wrong = httpx.get(f"{address}{feed['current']}?kind=made")
    assert (wrong.status_code, "created" in wrong.text) == (400, True)


def test_what_is_no_feed_and_no_page_is_said(orders: Orders, address: str) -> None:
    filled(orders, 10)
    feed = listed(address)[0]
    mark = feed["feed"].partition("-")[0]
    for place in (
        *(
            "zzz",
            f"{mark}-99",
            f"{mark}-00",
            f"{'0' * 16}-0",
            f"{mark}-0/{feed['pages'] + 1}",
            f"{mark}-0/x",
        ),
        *(f"{mark}-0/-1", f"{mark}-0/00", f"{mark}-0/{'9' * 5000}"),
    ):
        answer = httpx.get(f"{address}/feed/v1/order/{place}")
        assert answer.status_code == 404, place
    assert httpx.get(f"{address}/feed/v1/order?kind=created").status_code == 400
    assert httpx.get(f"{address}/feed/v1/guest").status_code == 404
    assert httpx.head(f"{address}{feed['current']}").status_code == 200


def test_with_tokens_only_callers_read_and_no_shared_cache_keeps_pages(orders: Orders) -> None:
    filled(orders)
    entry = caller_entry(SECRET, "web", "w1")
    orders.config = altered(orders.config, api={"tokens": {"web": entry}})
    with served(orders) as address:
        known = {"Authorization": f"Bearer {SECRET}"}
        feeds = httpx.get(f"{address}/feed/v1/order", headers={**known, **JSON}).json()["feeds"]
        feed = max(feeds, key=lambda each: each["pages"])
        for place in ("/feed/v1/order", feed["current"], feed["first"]):
            assert httpx.get(address + place).status_code == 401
            answer = httpx.get(address + place, headers=known)
            assert answer.status_code == 200
            assert answer.headers["cache-control"].startswith("private, ")


def test_a_log_that_was_begun_anew_has_other_pages(orders: Orders, address: str) -> None:
    """Also while its views are still those of the old one: nothing of the new log is a page."""
    filled(orders)
    feed = max(listed(address), key=lambda each: each["pages"])
    assert httpx.get(f"{address}{feed['first']}").status_code == 200
    with Topics(orders.config) as topics:
        admin = topics._admin
        admin.delete_topics([orders.topic])[orders.topic].result(30)
        deadline = time.monotonic() + 30
        while True:
            try:
                topics.ensure(["order"])
                identity = topics.identity(orders.topic)
                break
            except Exception:
                assert time.monotonic() < deadline
                time.sleep(0.2)
    assert identity.topic_id != orders.identity.topic_id
    orders.versions.clear()
    orders.send(*(orders.change(f"n{n % 50}", quantity=n, status="open") for n in range(150)))
    answer = httpx.get(f"{address}{feed['first']}", timeout=30)
    assert answer.status_code == 503, answer.text


def test_the_clients_walk_from_the_beginning_from_now_and_from_a_bookmark(
    orders: Orders, address: str
) -> None:
    filled(orders)
    before = sum(version for version, _ in orders.versions.values())

    async def walked(since: str) -> list[Any]:
        async with AsyncClient(address) as client:
            return [page async for page in client.feed("order", since=since)]

    with Client(address) as client:
        whole = list(client.feed("order"))
        assert sum(len(page.changes) for page in whole) == before
        assert asyncio.run(walked("beginning")) == whole
        now = list(client.feed("order", since="now"))
        assert [page.changes for page in now] == [[]]
        assert json.loads(now[-1].bookmark) == json.loads(whole[-1].bookmark)
        orders.send(*(orders.change(f"m{n}", quantity=1, status="paid") for n in range(30)))
        orders.keep()
        for rest in (
            list(client.feed("order", since=now[-1].bookmark)),
            asyncio.run(walked(whole[-1].bookmark)),
        ):
            assert sum(len(page.changes) for page in rest) == 30
        with pytest.raises(Exception, match="bookmark"):
            list(client.feed("order", since="yesterday"))


def test_a_reader_gives_pages_without_a_server(orders: Orders) -> None:
    filled(orders)
    with FeedReader(orders.config, "order") as reader:
        heads = reader.heads()
        assert [head.partition for head in heads] == list(range(PARTITIONS))
        for head in heads:
            assert reader.place(head.feed, head.number) == head
            numbers = range(head.number + 1)
            pages = [reader.read(reader.place(head.feed, number)) for number in numbers]
            assert sum(map(len, pages)) > 0
            places = [(record.offset // OFFSETS) for page in pages for record in page]
            assert set(places) <= set(numbers)
