"""The console as somebody sees it: in a browser, by keyboard, on a phone, in the dark."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import psycopg
import pytest
from playwright.sync_api import Browser, Page, expect

from callers import caller_entry
from chromium import browser
from console_cases import ODD_KEYS, fill, fill_handler, fill_log, greeting_hotel, hotel
from everstate.api_config import ApiConfig
from everstate.config import Config
from everstate.handling.tables import HandlerTables
from everstate.local.artifacts import Artifact, obtain
from kit.serving import serving

__all__ = ["browser"]

SCREENSHOTS: Final = Path(__file__).parents[2] / "test-results" / "console"
AXE: Final = Artifact(
    "org/webjars/npm/axe-core/4.6.3/axe-core-4.6.3.jar",
    "c339ddad238886211644ff2b58f8c395bf42de4a1d7742c98af7aa01a9675ac3",
    437_569,
)
LOOKS: Final[dict[str, tuple[int, int, Literal["light", "dark"]]]] = {
    "desk-light": (1280, 900, "light"),
    "phone-dark": (360, 740, "dark"),
}
DEAD: Final = "/console/-/dead"
PAGES: Final = {
    "overview": "/",
    "entities": "/console",
    "keys": "/console/guest",
    "no-key": "/console/guest?key=nobody",
    "entity": "/console/guest/eva",
    "version": "/console/guest/eva?version=3",
    "deleted": "/console/guest/tom",
    "origin": "/console/guest/eva?explain=1&field=address.city",
    "views": "/console/-/views",
    "view": "/console/-/views/guest_history",
    "building": "/console/-/views/by_city",
    "log": "/console/-/log",
    "dead": DEAD,
    "dead-reason": f"{DEAD}/reason?entity=guest&reason=name%3A%20Field%20%3Cb%3Erequired%3C%2Fb%3E",
    "dead-letter": f"{DEAD}/letter?entity=guest&partition=0&offset=1",
    "handlers": "/console/-/handlers",
    "sources": "/console/-/sources",
    "api": "/docs",
}
TOKEN: Final = "a token that is long enough"
# The first look at all servers imports the reader of the lake, on a machine that is busy.
expect.set_options(timeout=30_000)


@pytest.fixture
def config(config: Config) -> Config:
    with psycopg.connect(config.store_dsn, autocommit=True) as connection:
        fill(connection)
    fill_log(config)
    fill_handler(config)
    return config


@pytest.fixture
def address(config: Config) -> Iterator[str]:
    with serving(config, greeting_hotel()) as made:
        yield made


@contextmanager
def opened(browser: Browser, address: str, **options: Any) -> Iterator[Page]:
    """A new window; whatever the browser calls an error fails the test at its end."""
    context = browser.new_context(base_url=address, **options)
    page, faults = context.new_page(), list[str]()
    page.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("dialog", lambda dialog: faults.append(f"dialog {dialog.message}"))
    page.on(
        "request",
        lambda asked: None if asked.url.startswith(address) else faults.append(asked.url),
    )
    page.set_default_timeout(20_000)
    with closing(context):
        yield page
    assert faults == []


@pytest.fixture(scope="module")
def axe(stack: Any) -> str:
    """The script of axe-core, which checks a page against WCAG."""
    (jar,) = obtain(stack.config, [AXE])
    with zipfile.ZipFile(jar) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith("/axe.min.js"))
        return archive.read(name).decode()


def violations(page: Page, axe: str) -> list[str]:
    page.evaluate(axe)
    rules = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]}
    found = page.evaluate("options => axe.run(document, options)", rules)
    return [
        f"{each['id']}: {node['html'][:200]} {node['failureSummary'][:300]}"
        for each in found["violations"]
        for node in each["nodes"]
    ]


@pytest.mark.timeout(300)
def test_every_page_can_be_read_by_everybody(browser: Browser, address: str, axe: str) -> None:
    """At a desk and on a phone, in the light and in the dark."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[str]] = {}
    with opened(browser, address) as page:
        for name, path in PAGES.items():
            page.goto(path)
            expect(page.locator("[data-loading]")).to_have_count(0)
            for look, (width, height, scheme) in LOOKS.items():
                page.set_viewport_size({"width": width, "height": height})
                page.emulate_media(color_scheme=scheme)
                page.screenshot(path=SCREENSHOTS / f"{name}-{look}.png", full_page=True)
                faults = violations(page, axe)
                wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
                if wide > 0:
                    faults.append(f"it is {wide} pixels wider than the window")
                if faults:
                    found[f"{name}-{look}"] = faults
    assert found == {}


def test_a_fault_of_accessibility_is_found(browser: Browser, address: str, axe: str) -> None:
    """The planted defect: text that is hardly seen, and a field without a label."""
    with opened(browser, address) as page:
        page.goto("/console/guest/eva")
        page.evaluate("document.querySelector('h1').style.color = '#eeeeee'")
        page.evaluate("document.querySelectorAll('label').forEach(each => each.remove())")
        found = "\n".join(violations(page, axe))
    assert "color-contrast: <h1" in found
    assert "label: <input" in found


def test_the_slider_moves_the_state_without_loading_the_page(
    browser: Browser, address: str
) -> None:
    with opened(browser, address) as page:
        page.goto("/console/guest/eva")
        page.evaluate("window.marker = 1")
        expect(page.locator("#entity")).to_contain_text("This is the state now")
        slider = page.get_by_role("slider")
        slider.press("ArrowLeft")
        expect(page.locator("#entity")).to_contain_text("of the past")
        expect(page.locator("#chosen")).to_have_text("3")
        expect(page.locator("tr.changed .new").first).to_have_text("Eva Maria")
        slider.press("Home")
        expect(page.locator("#chosen")).to_have_text("1")
        expect(page.get_by_role("cell", name="added").first).to_be_visible()
        assert page.evaluate("window.marker") == 1
        assert page.url.endswith("?version=1")
        page.reload()
        expect(page.locator("#chosen")).to_have_text("1")
        page.get_by_role("link", name="Newer").click()
        expect(page.locator("#chosen")).to_have_text("2")


def test_versions_are_links_where_no_script_runs(browser: Browser, address: str) -> None:
    with opened(browser, address, java_script_enabled=False) as page:
        page.goto("/console/guest/eva")
        page.get_by_role("link", name="Older").click()
        expect(page.locator("#entity")).to_contain_text("of the past")
        page.get_by_role("slider").press("Home")
        page.locator(".slider button").click()
        expect(page.locator("#chosen")).to_have_text("1")
        page.goto("/")
        expect(page.locator("main")).to_contain_text("The way of a change")


def test_markup_in_keys_and_values_is_text(browser: Browser, address: str) -> None:
    with opened(browser, address) as page:
        for key in ODD_KEYS:
            page.goto("/console/guest")
            page.get_by_label("Key of a guest").fill(key)
            page.get_by_role("button", name="Show").first.click()
            shown = key.replace("\t", " ")
            expect(page.locator("h1")).to_have_text(shown)
            page.get_by_role("slider").press("Home")
            expect(page.locator("#entity")).to_contain_text("what version 1 changed")
            expect(page.locator("#entity")).to_contain_text("<script>alert(1)</script>")
            page.get_by_role("link", name="Where this version comes from").click()
            expect(page.locator("h1")).to_have_text("Origin of version 1")
        assert page.locator("main script, main b").count() == 0


def test_a_script_within_a_page_does_not_run(browser: Browser, address: str) -> None:
    """Even markup that got past the escaping would not run: the policy of the page forbids it."""
    context = browser.new_context(base_url=address)
    page = context.new_page()
    page.goto("/console/guest/eva")
    page.evaluate(
        """() => {
          const script = document.createElement("script");
          script.textContent = "window.ran = 1";
          document.body.append(script);
          document.body.insertAdjacentHTML("beforeend", "<img src=x onerror='window.ran = 1'>");
        }"""
    )
    page.wait_for_timeout(300)
    assert page.evaluate("window.ran") is None
    context.close()


def test_a_failed_change_is_shown_with_its_reason_and_leads_to_its_entity(
    browser: Browser, address: str, config: Config
) -> None:
    with opened(browser, address) as page:
        page.goto("/")
        page.get_by_role("link", name="Handlers", exact=True).click()
        table = page.get_by_role("region", name="Failed changes of mail.greet")
        expect(table.locator("tbody tr")).to_have_count(2)
        expect(table).to_contain_text("ValueError: <script>alert(1)</script>")
        expect(page.locator("#handlers")).to_contain_text("parked")
        table.get_by_role("link", name="eva").click()
        expect(page.locator("h1")).to_have_text("eva")
        expect(page.locator("#chosen")).to_have_text("3")
        page.clock.install()
        page.goto(PAGES["handlers"])
        expect(table.locator("tbody tr")).to_have_count(2)
        tables = HandlerTables(config, greeting_hotel().handlers["mail.greet"])
        with tables.connected() as connection:
            assert tables.run(connection, "skip", None, None).rowcount == 2
        page.clock.fast_forward(11_000)
        expect(table).to_have_count(0)


_FOCUSED: Final = """wanted => {
  const all = [...document.querySelectorAll(wanted)].filter(each => each.checkVisibility());
  const style = getComputedStyle(document.activeElement);
  const seen = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
  return [all.length, all.indexOf(document.activeElement), seen];
}"""


def test_the_keyboard_reaches_everything_and_is_seen(browser: Browser, address: str) -> None:
    wanted = "a[href], button, input:not([type=hidden]):not([disabled]), summary, [tabindex='0']"
    paths = ("overview", "entity", "view", "dead-letter")
    with opened(browser, address) as page:
        for path in paths:
            page.goto(PAGES[path])
            expect(page.locator("[data-loading]")).to_have_count(0)
            page.keyboard.press("Tab")
            expect(page.locator("a.skip")).to_be_focused()
            count, at, seen = page.evaluate(_FOCUSED, wanted)
            reached = {at}
            for _ in range(count - 1):
                page.keyboard.press("Tab")
                _, at, seen = page.evaluate(_FOCUSED, wanted)
                assert seen, page.evaluate("document.activeElement.outerHTML")[:300]
                reached.add(at)
            assert reached == set(range(count)), path
        page.goto("/")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(page.locator("main")).to_be_focused()


def test_the_overview_says_when_nothing_answers_and_recovers(
    browser: Browser, config: Config
) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.clock.install()
    with serving(config, hotel()) as address:
        page.goto(address)
        expect(page.locator("main")).to_contain_text("The way of a change")
        expect(page.locator("#away")).to_be_hidden()
    page.clock.fast_forward(6_000)
    expect(page.locator("#away")).to_contain_text("does not answer")
    with serving(config, hotel(), int(address.rpartition(":")[2])):
        page.clock.fast_forward(6_000)
        expect(page.locator("#away")).to_be_hidden()
        expect(page.locator("main")).to_contain_text("does not run in this project's folder")
    context.close()


def test_a_token_opens_the_console_until_the_log_out(browser: Browser, config: Config) -> None:
    desk = caller_entry(TOKEN)
    secured = config.model_copy(update={"api": ApiConfig(tokens={"desk": desk})})
    with serving(secured, hotel()) as address:
        context = browser.new_context(base_url=address)
        page = context.new_page()
        page.goto("/console/guest/eva")
        page.get_by_label("Token of the API").fill("another token, not valid")
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_role("alert")).to_contain_text("not valid")
        page.get_by_label("Token of the API").fill(TOKEN)
        page.get_by_role("button", name="Log in").click()
        expect(page.locator("h1")).to_have_text("eva")
        assert page.evaluate("document.cookie") == ""
        page.get_by_role("slider").press("ArrowLeft")
        expect(page.locator("#entity")).to_contain_text("of the past")
        page.get_by_role("button", name="Log out").click()
        expect(page.locator("h1")).to_have_text("Log in")
        context.close()
