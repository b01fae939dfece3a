"""A headless Chromium for tests of the report page; without one they are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]


@contextmanager
def chromium() -> Iterator[Any]:
    """Yields Playwright's browser; skips where there is no Chromium or no Playwright."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="Playwright is missing: pip install playwright"
    )
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("Chromium is missing: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


class Page:
    """A page opened from a file; `complaints` are console messages, errors and requests."""

    def __init__(self, browser: Any, file: Path, width: int = 1280, dark: bool = False) -> None:
        scheme = "dark" if dark else "light"
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme
        )
        self.page = self.context.new_page()
        self.page.set_default_timeout(15_000)
        self.complaints: list[str] = []
        url = file.resolve().as_uri()
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on(
            "request", lambda asked: asked.url != url and self.complaints.append(asked.url)
        )
        self.page.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        self.page.goto(url)

    def close(self) -> None:
        """Closes the page; nothing must have gone wrong on it."""
        self.context.close()
        assert not self.complaints, self.complaints
