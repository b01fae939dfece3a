"""A headless Chromium that opens report pages, where this machine has one.

As a command, `python -m tests.browser RUN FILE.png` takes a picture of a run's page.
"""

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


# texts of drawings that overlap, that are tiny, or that leave their drawing: nobody can read them
UNREADABLE = """() => [...document.querySelectorAll("svg")].flatMap((svg) => {
  const frame = svg.getBoundingClientRect(), found = [];
  const boxes = [...svg.querySelectorAll("text")].map((text) =>
    [text.textContent, text.getBoundingClientRect()]).filter(([, box]) => box.width);
  boxes.forEach(([text, a], i) => {
    if (a.height < 5) found.push(`${text} is tiny`);
    if (a.left < frame.left - 2 || a.right > frame.right + 2) found.push(`${text} leaves`);
    for (const [other, b] of boxes.slice(i + 1)) {
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const tall = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (wide > 1 && tall > 3) found.push(`${text} over ${other}`);
    }
  });
  return found;
})"""


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

    def check(self, width: int) -> None:
        """Nothing has gone wrong, every text can be read, and the page is as wide as the window."""
        self.page.wait_for_timeout(300)  # drawings follow their panels
        assert self.problems == []
        assert self.page.locator(".scene, .empty", has_text="cannot be drawn").count() == 0
        assert self.page.evaluate(UNREADABLE) == []
        assert self.page.evaluate("document.documentElement.scrollWidth") <= width

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


def take_picture(browser: Any, run: Path, file: Path, height: int = 1180) -> None:
    """The top of a run's page and its model at work, side by side, in few colours."""
    from io import BytesIO

    from PIL import Image

    with opened(browser, 1180) as window:
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
    with chromium() as launched:
        take_picture(launched, Path(sys.argv[1]), Path(sys.argv[2]))
