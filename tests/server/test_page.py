"""The page in a real browser: a prompt sent twice, by pointer and by keyboard, in all sizes and colours.

Needs Playwright and a Chromium: Debian's, or the one that `playwright install chromium` brings.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvboost import KVBoost
from kvboost.server.settings import ApiKey
from tests.fixture_types import MakeEngine
from tests.server.running import Running, running
from tests.unit.remote.memory_store import MemoryStore

pytestmark = [pytest.mark.real_model, pytest.mark.integration]
playwright_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
expect = playwright_api.expect

PAGE = Path(__file__).parents[2] / "src" / "kvboost" / "server" / "page"
ANSWER_MS = 120_000  # the longest that an answer may take
SIZES = {"wide": (1280, 900), "middle": (820, 1000), "narrow": (375, 812), "narrowest": (320, 640)}


def find_chromium(playwright: Any) -> str | None:
    """Where a Chromium is: the system's first, then Playwright's own."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    own = playwright.chromium.executable_path
    return own if Path(own).exists() else None


@pytest.fixture(scope="module")
def server_url(real_engine: KVBoost) -> Iterator[str]:
    """A server over the built-in model."""
    with running(real_engine, model_name="builtin") as server:
        yield f"{server.url}/"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright_api.sync_playwright() as playwright:
        path = find_chromium(playwright)
        if path is None:
            pytest.skip("needs a Chromium: apt-get install chromium, or playwright install chromium")
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # root has no sandbox
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, server_url: str) -> Iterator[Any]:
    """The page, opened; at the end nothing was complained about and no other host was asked."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    complaints: list[str] = []
    hosts: set[str] = set()
    page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
    page.goto(server_url)
    yield page
    context.close()
    assert [line for line in complaints if not line.startswith(("log:", "info:", "debug:"))] == []
    assert hosts == {urlsplit(server_url).netloc}


@pytest.fixture
def salt(request: pytest.FixtureRequest) -> str:
    """A part of the cache that only this test sees, so it begins cold."""
    return f"{request.node.name} {uuid.uuid4()}"


def send(page: Any) -> None:
    """Press Send and wait for the whole answer."""
    page.get_by_role("button", name="Send").click()
    wait_for_answer(page)


def wait_for_answer(page: Any) -> None:
    expect(page.locator("#answer-facts")).to_contain_text("all after", timeout=ANSWER_MS)
    expect(page.get_by_role("button", name="Send")).to_be_enabled()


def milliseconds(text: str) -> float:
    return float(re.sub(r"[^\d.]", "", text))


def origins(page: Any) -> dict[str, int]:
    """Tokens by origin, from the spans that are shown."""
    counts: dict[str, int] = {}
    for row in page.locator("#spans-table tr").all():
        tokens, name = (row.locator("td").nth(column).text_content() for column in (0, 1))
        start, end = (int(part.replace(",", "")) for part in tokens.split(" to "))
        name = name[1:]  # behind its letter
        counts[name] = counts.get(name, 0) + end - start
    return counts


# --- what it is for ----------------------------------------------------------------------------


def test_second_send_is_exact_and_faster(page: Any, salt: str) -> None:
    expect(page.locator("#state")).to_have_text("Live")
    page.get_by_label("Cache salt").fill(salt)
    send(page)
    cold = origins(page)
    first_answer = page.locator("#answer").inner_text()
    assert cold.get("live", 0) > 300
    assert cold.get("exact", 0) == 0
    expect(page.locator("#verdict")).to_have_text("Send again for a warm one")

    send(page)
    warm = origins(page)
    assert sum(warm.values()) == sum(cold.values())
    assert warm["exact"] > 0.9 * sum(warm.values())
    assert page.locator("#answer").inner_text() == first_answer
    exact = page.locator("#spans .span").first
    expect(exact).to_have_attribute("data-origin", "exact")
    expect(exact).to_contain_text("You are the assistant of the Harbour Inn.")

    rows = page.locator("#comparison tr")
    expect(rows).to_have_count(2)
    kinds = [row.get_attribute("data-kind") for row in rows.all()]
    assert kinds == ["cold", "warm"]
    for column in (3, 4):  # as the browser saw it, and as the server did
        slow, fast = (milliseconds(row.locator("th, td").nth(column).inner_text()) for row in rows.all())
        assert fast < slow / 2, (slow, fast)
    expect(page.locator("#verdict")).to_contain_text("sooner")
    expect(page.locator("#origin-verdict")).to_contain_text(f"of {sum(warm.values())} tokens reused")


def test_forecast_changes_nothing(page: Any, salt: str) -> None:
    page.get_by_label("Cache salt").fill(salt)
    for _ in range(2):
        page.get_by_role("button", name="Only explain").click()
        expect(page.locator("#origin-verdict")).to_contain_text("would be reused")
        assert set(origins(page)) == {"live"}
    expect(page.locator("#answer-empty")).to_be_visible()


def test_changed_word_is_where_reuse_ends(page: Any, salt: str) -> None:
    page.get_by_label("Cache salt").fill(salt)
    send(page)
    page.get_by_role("button", name="one word changed").click()
    send(page)
    expect(page.locator("#spans .span").first).to_have_attribute("data-origin", "exact")
    live = page.locator("#spans .span[data-origin=live]").first
    live.hover()
    expect(page.locator("#tip")).to_be_visible()
    expect(page.locator("#tip")).to_contain_text("live")
    reason = page.locator("#tip .tip-reason")
    expect(reason).to_contain_text("diverged")
    before = "".join(page.locator("#spans .span[data-origin=exact]").all_text_contents())
    assert before.endswith("Dinner begins at half past")


def test_completion_route(page: Any, salt: str) -> None:
    page.get_by_label("Cache salt").fill(salt)
    page.get_by_role("radio", name="Completion").check()
    page.get_by_label("System text").fill("The sea is")
    page.get_by_label("Prompt", exact=True).fill("blue. The sky is")
    page.get_by_label("Max tokens").fill("4")
    send(page)
    assert "".join(page.locator("#spans .span").all_text_contents()) == "The sea is\n\nblue. The sky is"
    expect(page.locator("#answer-facts")).to_contain_text("4 tokens")


def test_live_figures(page: Any, salt: str) -> None:
    page.get_by_label("Cache salt").fill(salt)
    send(page)
    send(page)
    expect(page.locator("#hit-share")).to_have_text(re.compile(r"\d+%"))
    expect(page.locator("#first-warm")).to_have_text(re.compile(r"\d+ ms|\d\.\d ms"))
    expect(page.locator("#first-warm-note")).to_have_text(re.compile("cold .* ms, .* ×"))
    assert page.locator("#chart .dot.warm").count() >= 1
    assert page.locator("#chart .dot.cold").count() >= 1
    expect(page.locator("#chart-readout")).to_have_text(re.compile("Latest: .* warm, .* tokens cached"))
    expect(page.locator("#tiers")).to_contain_text("Memory")
    expect(page.locator("#batch")).to_contain_text("Answered")
    assert page.locator("#chunks tbody tr").count() >= 1


def test_disk_tier_is_shown(
    bare_page: Any, serve: Callable[..., Running], make_engine: MakeEngine, tmp_path: Path
) -> None:
    bare_page.goto(serve(make_engine(disk_cache_dir=tmp_path / "kv")).url)
    tiers = bare_page.locator("#tiers .tier")
    expect(tiers).to_have_count(2)
    bare_page.get_by_label("Prompt", exact=True).fill("hello there, who are you and what do you do? " * 4)
    bare_page.get_by_label("Max tokens").fill("4")
    send(bare_page)
    for name, tier in zip(("Memory", "Disk"), tiers.all(), strict=True):
        expect(tier).to_contain_text(name)
        expect(tier).to_contain_text(re.compile(r"Chunks[1-9]"), timeout=15_000)


def test_shared_store_is_shown(
    bare_page: Any, serve: Callable[..., Running], make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvboost.parts.engine_parts.open_store", lambda _address: MemoryStore())
    bare_page.goto(serve(make_engine(remote_cache="redis://elsewhere", chunk_size=32)).url)
    tiers = bare_page.locator("#tiers .tier")
    expect(tiers).to_have_count(2)
    bare_page.get_by_label("Prompt", exact=True).fill("hello there, who are you and what do you do? " * 4)
    bare_page.get_by_label("Max tokens").fill("4")
    send(bare_page)
    shared = tiers.nth(1)
    expect(shared).to_contain_text("Shared store")
    expect(shared).to_contain_text("memory://")
    expect(shared).to_contain_text(re.compile(r"Written[1-9].*Misses[1-9]"), timeout=15_000)


# --- by keyboard, and for those who do not see it ----------------------------------------------


def test_texts_of_chunks_are_shown_where_they_are_told(
    bare_page: Any, make_engine: MakeEngine, serve: Callable[..., Any]
) -> None:
    nasty = "<b>bold</b> words that the server was told to show"
    server = serve(make_engine(), log_prompts=True)
    server.complete(nasty, max_tokens=1)
    bare_page.goto(server.url)
    text = bare_page.locator(".chunk-text").first
    expect(text).to_contain_text("<b>bold</b> wor")
    assert bare_page.locator("main b").count() == 0


def test_a_chosen_request_stays_chosen(
    bare_page: Any, make_engine: MakeEngine, serve: Callable[..., Any]
) -> None:
    """Also while others come, with the keyboard."""
    server = serve(make_engine())
    for tokens in (20, 30, 40):
        server.complete(list(range(5, 5 + tokens)), max_tokens=1)
    bare_page.goto(server.url)
    readout = bare_page.locator("#chart-readout")
    expect(readout).to_contain_text("of 40 tokens")
    bare_page.locator("#chart").focus()
    bare_page.keyboard.press("Home")
    expect(readout).to_contain_text("of 20 tokens")
    server.complete(list(range(5, 55)), max_tokens=1)
    expect(bare_page.locator("#chart .dot")).to_have_count(4, timeout=10_000)
    expect(readout).to_contain_text("of 20 tokens")


def tab_to(page: Any, selector: str, most: int = 40) -> None:
    """Press Tab until what `selector` finds has the focus."""
    for _ in range(most):
        page.keyboard.press("Tab")
        if page.evaluate("wanted => document.activeElement.matches(wanted)", selector):
            return
    pytest.fail(f"Tab does not reach {selector}")


def test_keyboard_only(page: Any, salt: str) -> None:
    tab_to(page, ".skip")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.keyboard.press("Control+A")
    page.keyboard.type("The harbour is quiet at night. The boats come back at four.")
    tab_to(page, "#salt")
    page.keyboard.type(salt)
    tab_to(page, "#send")
    page.keyboard.press("Enter")
    wait_for_answer(page)
    page.keyboard.press("Control+Enter")  # the focus is still in the form
    expect(page.locator("#comparison tr")).to_have_count(2, timeout=ANSWER_MS)
    wait_for_answer(page)

    tab_to(page, ".span")
    first = page.locator(".span:focus")
    expect(first).to_have_accessible_name(re.compile("exact, tokens 0 to "))
    expect(first).to_have_accessible_description(re.compile("exact.*tokens 0 to ", re.DOTALL))
    expect(page.get_by_role("tooltip")).to_be_visible()
    page.keyboard.press("End")
    last = page.locator(".span:focus")
    expect(last).to_have_attribute("data-origin", "live")
    expect(last).to_have_accessible_description(re.compile("live.*tokens", re.DOTALL))
    page.keyboard.press("Escape")
    expect(page.get_by_role("tooltip")).to_be_hidden()
    page.keyboard.press("Home")
    expect(page.locator(".span").first).to_be_focused()

    tab_to(page, "#chart")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#chart-readout")).not_to_contain_text("Latest")
    assert page.locator("#chart .chosen").count() == 1


def test_focus_is_seen_everywhere(page: Any, salt: str) -> None:
    page.get_by_label("Cache salt").fill(salt)
    page.get_by_label("Prompt", exact=True).fill("Short.")
    page.get_by_label("Max tokens").fill("2")
    send(page)
    page.locator(".skip").focus()
    names = []
    for _ in range(30):
        page.keyboard.press("Tab")
        outline = page.evaluate(
            """() => {
                const focused = document.activeElement;
                if (focused === document.body) return null;
                const shown = focused.type === "radio" ? focused.nextElementSibling : focused;
                const { outlineStyle, outlineWidth } = getComputedStyle(shown);
                return [focused.id || focused.className || focused.tagName, outlineStyle, outlineWidth];
            }"""
        )
        if outline is None:
            break
        names.append(outline[0])
        assert outline[1:] == ["solid", "2px"], outline
    assert {"prompt", "send", "theme", "key", "chart", "span shown"} <= set(names)


def test_every_control_has_a_name(page: Any) -> None:
    assert page.get_by_role("banner").count() == 1
    assert page.get_by_role("main").count() == 1
    assert page.get_by_role("contentinfo").count() == 1
    for role in ("button", "textbox", "spinbutton", "radio", "link", "table", "listbox", "region"):
        for each in page.get_by_role(role).all():
            expect(each).to_have_accessible_name(re.compile(r"\S"))
    expect(page.locator("#answer")).to_have_attribute("aria-live", "polite")


UNREADABLE = """() => {
  const luminance = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const found = parts(getComputedStyle(at).backgroundColor);
      if (found.length < 4 || found[3] > 0) return found;
    }
  };
  const bad = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const isOff = element.closest(".unseen, noscript, .skip") || !element.checkVisibility();
    if (!walker.currentNode.data.trim() || isOff) continue;
    const style = getComputedStyle(element);
    const ink = luminance(parts(style[element.closest("svg") ? "fill" : "color"]));
    const paper = luminance(ground(element));
    const ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    if (ratio < 4.5) bad.push([walker.currentNode.data.trim().slice(0, 40), ratio]);
  }
  return bad;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(page: Any, salt: str, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    page.get_by_label("Cache salt").fill(salt)
    send(page)
    show_all_origins(page)
    page.get_by_text("As a table").click()
    page.locator(".span").nth(1).focus()
    assert page.evaluate(UNREADABLE) == []


def show_all_origins(page: Any) -> None:
    """Spans of every origin, as a server with approximate reuse would explain them."""
    names = ("exact", "live", "recomputed", "approximate")
    spans = [span(10 * at, 10 * at + 10, name, f"Some {name} text. ") for at, name in enumerate(names)]
    told = {"prompt_tokens": 40, "cached_tokens": 30, "choice": "It pays.", "spans": spans}
    page.route("**/v1/cache/explain", lambda route: route.fulfill(json=told))
    page.get_by_role("button", name="Only explain").click()
    expect(page.locator(".span")).to_have_count(len(names))


# --- looks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_nothing_overflows(page: Any, salt: str, size: str) -> None:
    width, height = SIZES[size]
    page.set_viewport_size({"width": width, "height": height})
    page.get_by_label("Cache salt").fill(salt)
    page.get_by_label("Prompt", exact=True).fill("Averyveryverylongword" * 20)
    page.get_by_label("Max tokens").fill("4")
    for moment in ("before", "after"):
        wide = page.evaluate(
            """() => [...document.querySelectorAll("main *, header *, footer *")]
                .filter((each) => !each.closest(".unseen, .scroll") && each.checkVisibility())
                .filter((each) => each.getBoundingClientRect().right > innerWidth + 0.5)
                .map((each) => each.id || each.className || each.tagName)"""
        )
        assert wide == [], moment
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        if moment == "before":
            send(page)
            page.locator(".span").first.focus()


def answer(told: dict[str, Any], route: Any) -> None:
    route.fulfill(json=told)


@pytest.mark.parametrize("size", SIZES)
def test_chunks_of_any_age_and_use_fit_or_scroll(page: Any, size: str) -> None:
    """On the narrowest screen what is usual fits; what is rare scrolls inside its card, also by keyboard."""
    page.set_viewport_size(dict(zip(("width", "height"), SIZES[size], strict=True)))
    chunk = {"id": "0f" * 16, "tokens": 128, "uses": 40, "tier": "disk", "age_s": 5_000.0, "text": "x" * 80}
    old = {**chunk, "uses": 12_345_678, "age_s": 400 * 86_400.0, "text": ""}
    is_wider = (
        "() => { const card = document.querySelector('#chunks'); return card.scrollWidth > card.clientWidth }"
    )
    for shown, may_scroll in ((chunk, False), (old, True)):
        told = page.request.get(page.url + "v1/cache/stats").json() | {"chunks": [shown]}
        page.route("**/v1/cache/stats*", functools.partial(answer, told))
        expect(page.locator("#chunks .uses")).to_have_text([f"{shown['uses']:,}"])
        assert may_scroll or not page.evaluate(is_wider)
        assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
    page.locator("#chunks").focus()
    assert page.evaluate("document.activeElement.id") == "chunks"


def test_theme_is_remembered(page: Any) -> None:
    page.emulate_media(color_scheme="light")
    button = page.get_by_role("button", name="Theme")
    expect(button).to_have_text("Theme: auto")
    light = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    button.click()
    expect(button).to_have_text("Theme: light")
    button.click()
    expect(button).to_have_text("Theme: dark")
    dark = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert dark != light
    page.reload()
    expect(button).to_have_text("Theme: dark")
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == dark


def test_stands_still_where_asked_to(page: Any) -> None:
    page.emulate_media(reduced_motion="reduce")
    page.locator("#answer").evaluate("each => each.setAttribute('aria-busy', 'true')")
    name = page.locator("#answer").evaluate("each => getComputedStyle(each, '::after').animationName")
    assert name == "none"


# --- what can go wrong -------------------------------------------------------------------------


@pytest.fixture
def bare_page(browser: Any) -> Iterator[Any]:
    """A page whose errors are part of the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    yield context.new_page()
    context.close()


def refuse(status: int, message: str) -> Any:
    body = json.dumps({"error": {"message": message, "type": "error", "param": None, "code": None}})
    return lambda route: route.fulfill(status=status, content_type="application/json", body=body)


def test_missing_key_is_asked_for(
    bare_page: Any, serve: Callable[..., Running], make_engine: MakeEngine
) -> None:
    server = serve(make_engine(), api_keys=(ApiKey("sesame", "cave"),))
    sent: list[str | None] = []
    bare_page.goto(server.url)
    expect(bare_page.locator("#state")).to_have_text("Key needed")
    expect(bare_page.locator("#stats-notice")).to_contain_text("API key")
    bare_page.get_by_label("Prompt", exact=True).fill("hello there")
    bare_page.get_by_label("Max tokens").fill("4")
    bare_page.get_by_role("button", name="Send").click()
    alert = bare_page.get_by_role("alert")
    expect(alert).to_contain_text("This server wants an API key.")
    for wrong in ("simsim", "ü"):
        bare_page.get_by_label("API key").fill(wrong)
        bare_page.get_by_role("button", name="Send").click()
        expect(alert).to_contain_text("does not know this API key")

    bare_page.on("request", lambda request: sent.append(request.headers.get("authorization")))
    bare_page.get_by_label("API key").fill("sesame")
    send(bare_page)
    expect(alert).to_be_hidden()
    expect(bare_page.locator("#state")).to_have_text("Live")
    assert set(sent) == {"Bearer sesame"}
    bare_page.reload()
    expect(bare_page.get_by_label("API key")).to_have_value("sesame")
    expect(bare_page.locator("#state")).to_have_text("Live")
    stored = "[Object.values(sessionStorage), Object.values(localStorage), document.cookie]"
    assert bare_page.evaluate(stored) == [["sesame"], [], ""]


def test_figures_may_need_another_key(
    bare_page: Any, serve: Callable[..., Running], make_engine: MakeEngine
) -> None:
    keys = {"api_keys": (ApiKey("sesame"),), "admin_key": ApiKey("vizier")}
    bare_page.goto(serve(make_engine(), **keys).url)
    bare_page.get_by_label("Prompt", exact=True).fill("hello there")
    bare_page.get_by_label("Max tokens").fill("4")
    bare_page.get_by_label("API key").fill("sesame")
    send(bare_page)
    expect(bare_page.locator("#state")).to_have_text("Key needed")
    expect(bare_page.locator("#stats-notice")).to_contain_text("admin key")
    bare_page.get_by_label("API key").fill("vizier")
    bare_page.keyboard.press("Control+Enter")
    wait_for_answer(bare_page)
    expect(bare_page.locator("#state")).to_have_text("Live")
    expect(bare_page.locator("#stats-notice")).to_be_hidden()


def test_errors_are_text(bare_page: Any, server_url: str) -> None:
    nasty = "<img src=x onerror=\"document.title='owned'\">"
    bare_page.goto(server_url)
    bare_page.route("**/v1/chat/completions", refuse(400, nasty))
    bare_page.get_by_label("Prompt", exact=True).fill(nasty)
    bare_page.get_by_role("button", name="Send").click()
    expect(bare_page.get_by_role("alert")).to_have_text(nasty)
    expect(bare_page.locator("#spans")).to_contain_text(nasty)
    assert bare_page.locator("main img").count() == 0
    assert bare_page.title() == "kvboost"


def test_lost_server_is_said(bare_page: Any, server_url: str) -> None:
    bare_page.goto(server_url)
    expect(bare_page.locator("#state")).to_have_text("Live")
    bare_page.route("**/v1/**", lambda route: route.abort())
    expect(bare_page.locator("#state")).to_have_text("No connection", timeout=10_000)
    bare_page.get_by_role("button", name="Send").click()
    expect(bare_page.get_by_role("alert")).to_have_text("The server does not answer. Is it running?")
    bare_page.unroute("**/v1/**")
    expect(bare_page.locator("#state")).to_have_text("Live", timeout=10_000)


def test_answer_can_be_stopped(page: Any, salt: str) -> None:
    page.get_by_label("Cache salt").fill(salt)
    page.get_by_label("Max tokens").fill("400")
    page.get_by_label("Prompt", exact=True).fill("Tell a very long story about the sea.")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#answer")).not_to_be_empty(timeout=ANSWER_MS)
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#answer-facts")).to_have_text("Stopped.")
    expect(page.get_by_role("button", name="Send")).to_be_focused()
    expect(page.locator("#running")).to_have_text("0", timeout=10_000)


def test_asks_nothing_while_hidden(page: Any) -> None:
    expect(page.locator("#state")).to_have_text("Live")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    hide = """hidden => {
        Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    page.evaluate(hide, True)
    expect(page.locator("#state")).to_have_text("Paused")
    asked.clear()
    page.wait_for_timeout(3500)
    assert asked == []
    page.evaluate(hide, False)
    expect(page.locator("#state")).to_have_text("Live")
    assert asked


# --- text of spans -----------------------------------------------------------------------------

SPANS = """async ([spans, explained]) => {
    const { withText } = await import("./page/origins.js");
    return withText(spans, explained).map(({ text, estimated }) => [text, estimated]);
}"""


def span(start: int, end: int, origin: str = "live", text: str = "") -> dict[str, Any]:
    return {"start": start, "end": end, "origin": origin, "reason": "", "text": text}


def test_spans_get_their_text(page: Any) -> None:
    explained = [span(0, 2, "exact", "one two"), span(2, 4, "live", " three four")]
    whole = [span(0, 2, "exact"), span(2, 4)]
    assert page.evaluate(SPANS, [whole, explained]) == [["one two", False], [" three four", False]]
    joined = [span(0, 4)]
    assert page.evaluate(SPANS, [joined, explained]) == [["one two three four", False]]
    cut = [span(0, 3, "exact"), span(3, 4)]
    assert page.evaluate(SPANS, [cut, explained]) == [["one two three", True], [" four", True]]
    other = [span(0, 5)]
    assert page.evaluate(SPANS, [other, explained]) == [[None, False]]
    assert page.evaluate(SPANS, [whole, []]) == [[None, False], [None, False]]


# --- the files ---------------------------------------------------------------------------------


def test_files_name_no_other_place_and_nothing_inline() -> None:
    for path in sorted(PAGE.iterdir()):
        text = path.read_text()
        addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"'<>)]*", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, path.name
        assert "innerHTML" not in text
    html = (PAGE / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", html)
