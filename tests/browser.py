"""Debian's chromium, driven by Playwright, for the tests of pages; where either is absent these are skipped."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

PHONE, DESK = 390, 1280


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser without a window."""
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


class Looked:
    """A page in a browser, and all that it complained of or asked other machines for."""

    def __init__(self, browser: Any, url: str, width: int = DESK, *, dark: bool = False) -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light")
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(url)

    @property
    def wider_than_its_window(self) -> bool:
        """Whether one has to scroll sideways."""
        found: bool = self.page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
        return found
