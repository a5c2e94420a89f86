"""Takes the pictures of the server's page: `python docs/page_screenshots.py` writes docs/images/page-*.png.

Starts a server with the built-in model, asks it a few things, and looks at the page in light and dark, wide
and narrow. Needs Playwright and a Chromium; looks best with the fonts Inter and JetBrains Mono.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

from kvboost import KVBoost
from kvboost.server.runner import background_server
from kvboost.server.settings import ServerSettings

IMAGES = Path(__file__).parent / "images"
SIZES = {"wide": (1280, 900), "narrow": (375, 812)}
NOTES = "The lamp on the pier is lit at dusk. The ferry waits for the mail. The baker opens at six. " * 24
QUESTIONS = ["When does the baker open?", "What does the ferry wait for?", "When is the lamp lit?"]


def post(url: str, body: dict[str, Any]) -> None:
    """Send `body` as JSON and wait for the answer."""
    headers = {"Content-Type": "application/json"}
    with urlopen(Request(url, json.dumps(body).encode(), headers)) as response:
        response.read()


def ask_around(url: str) -> None:
    """Requests before the page is opened, so that there is something to see: some cold, most of them warm."""
    for round_ in range(4):
        for question in QUESTIONS:
            messages = [
                {"role": "system", "content": f"Notes of day {round_}. {NOTES}"},
                {"role": "user", "content": question},
            ]
            post(f"{url}/v1/chat/completions", {"model": "builtin", "messages": messages, "max_tokens": 12})


def send(page: Page) -> None:
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#answer-facts")).to_contain_text("all after", timeout=120_000)


def take(page: Page, url: str, path: Path) -> None:
    """The page after a prompt was sent twice, with the reason of one span."""
    page.goto(url)
    send(page)
    send(page)
    page.wait_for_timeout(2000)  # the figures follow
    page.mouse.move(0, 0)
    is_narrow = page.evaluate("innerWidth") < 640  # there, the last one is scrolled away
    page.locator(".span").nth(1 if is_narrow else -1).evaluate("each => each.focus({ preventScroll: true })")
    page.evaluate("scrollTo(0, 0)")
    page.screenshot(path=path, full_page=True)
    with Image.open(path) as picture:  # looks the same with half the bytes
        small = picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        small.save(path, optimize=True)


def main() -> None:
    """Take all four."""
    with (
        KVBoost.from_pretrained("builtin") as engine,
        background_server(engine, ServerSettings(model_name="builtin")) as url,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"] if os.geteuid() == 0 else []
        )
        ask_around(url)
        for scheme in ("light", "dark"):
            for size, (width, height) in SIZES.items():
                post(f"{url}/v1/cache/clear", {})
                page = browser.new_page(
                    viewport={"width": width, "height": height},
                    color_scheme="light" if scheme == "light" else "dark",
                    device_scale_factor=2 if size == "narrow" else 1,
                )
                take(page, url, IMAGES / f"page-{scheme}-{size}.png")
                page.close()
        browser.close()


if __name__ == "__main__":
    main()
