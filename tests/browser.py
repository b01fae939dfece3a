"""A headless Chromium that opens report pages, where this machine has one.

As a command, `python -m tests.browser RUN FILE.png` takes a picture of a run's page.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# nothing but the page itself may be a reason for a request
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


class Opened:
    """A page, and what went wrong in it."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.problems: list[str] = []
        page.on("console", lambda said: self.problems.append(said.text))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", self._requested)
        page.on("dialog", lambda dialog: self.problems.append(dialog.message))

    def open(self, path: Path) -> Any:
        """Returns the page when it has drawn itself."""
        self.page.goto(path.absolute().as_uri())
        self.page.wait_for_selector("footer")
        return self.page

    def _requested(self, request: Any) -> None:
        if not request.url.startswith(("file:", "data:")):
            self.problems.append(f"request: {request.url}")


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser for as long as it takes; skips where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("no browser here: apt-get install chromium")
    api = pytest.importorskip("playwright.sync_api", reason="no playwright here: pip install it")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Any, width: int = 1280, dark: bool = False) -> Iterator[Opened]:
    """A fresh window."""
    scheme = "dark" if dark else "light"
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.set_default_timeout(15_000)
    try:
        yield Opened(page)
    finally:
        page.close()


def take_picture(run: Path, file: Path, height: int = 1180) -> None:
    """The top of a run's page and its model at work, side by side, in few colours."""
    from io import BytesIO

    from PIL import Image

    with chromium() as browser, opened(browser, 1180) as window:
        page = window.open(run / "report.html")
        page.set_viewport_size({"width": 1180, "height": height})
        page.wait_for_timeout(500)
        left = Image.open(BytesIO(page.screenshot()))
        page.evaluate("document.querySelector('.theme').click()")
        page.evaluate("document.getElementById('model').scrollIntoView()")
        page.wait_for_timeout(300)
        right = Image.open(BytesIO(page.screenshot()))
    both = Image.new("RGB", (left.width * 2, height))
    both.paste(left, (0, 0))
    both.paste(right, (left.width, 0))
    both.convert("P", palette=Image.Palette.ADAPTIVE, colors=160).save(file, optimize=True)


if __name__ == "__main__":
    take_picture(Path(sys.argv[1]), Path(sys.argv[2]))
