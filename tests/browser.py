"""A real browser that shows a page."""

import contextlib
import os
import shutil
import time

import pytest


@contextlib.contextmanager
def open_browser():
    """Chromium; skips where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("no Chromium: install one, or name it in CHROMIUM")
    with sync_api.sync_playwright() as playwright:
        # Its sandbox does not start as root, as in containers; the page is our own.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def wait_until(opened, script: str, seconds: float = 20.0) -> None:
    """Waits until a script is true; Playwright's own wait needs what the page's policy forbids."""
    until = time.monotonic() + seconds
    while not opened.evaluate(script):
        assert time.monotonic() < until, f"never true: {script}"
        time.sleep(0.05)


@contextlib.contextmanager
def opened_pages(browser, path, ready):
    """Yields a function that opens the file; no page may write to the console or load from afar.

    Args:
      ready: selector of what is there when the page is drawn.
    """
    said: list[str] = []
    contexts = []

    def ask(url: str) -> None:
        if not url.startswith(("file:", "data:")):
            said.append(url)

    def open_page(width: int = 1280, height: int = 900, scheme: str = "light"):
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme
        )
        contexts.append(context)
        opened = context.new_page()
        opened.on("console", lambda message: said.append(message.text))
        opened.on("pageerror", lambda error: said.append(str(error)))
        opened.on("request", lambda request: ask(request.url))
        opened.goto(path.as_uri())
        opened.wait_for_selector(ready)
        return opened

    yield open_page
    for context in contexts:
        context.close()
    assert said == []
