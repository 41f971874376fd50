"""A real browser for pages: Debian's Chromium, driven by playwright. Where one is missing, tests are skipped."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.worlds.waiting import PATIENCE

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")

# Width, and whether it is dark: a phone and a desktop, each once in every run.
SCREENS = [
    pytest.param(400, True, id="400 dark"),
    pytest.param(1280, False, id="1280 light"),
    pytest.param(400, False, id="400 light", marks=pytest.mark.nightly),
    pytest.param(1280, True, id="1280 dark", marks=pytest.mark.nightly),
]


@contextmanager
def open_browser() -> Iterator[object]:
    """A headless browser of playwright's synchronous interface."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip("no browser: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=program, args=["--no-sandbox"], timeout=1000 * PATIENCE
        )
        try:
            yield browser
        finally:
            browser.close()


class Tab:
    """A page that is open, and what its scripts complained of.

    page       playwright's
    troubles   exceptions and what the console was told of as an error
    """

    def __init__(self, browser: object, width: int = 1280, dark: bool = False) -> None:
        self.page = browser.new_page(
            viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light"
        )
        self.page.set_default_timeout(1000 * PATIENCE)
        self.troubles: list[str] = []
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("console", lambda said: said.type == "error" and self.troubles.append(said.text))
        self.page.on("dialog", lambda dialog: (self.troubles.append(dialog.message), dialog.dismiss()))

    def open(self, html: str, folder: Path) -> "Tab":
        """Show a page that is a file."""
        path = folder / "page.html"
        path.write_text(html, encoding="utf-8")
        self.page.goto(path.as_uri())
        self.drawn()
        return self

    def drawn(self) -> None:
        """Wait until what was asked for is on the screen."""
        self.page.evaluate(
            "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def until(self, condition: str) -> None:
        """Wait until an expression of the page's scripts is true. Pages forbid what playwright does for this."""
        end = time.monotonic() + PATIENCE
        while not self.page.evaluate(condition):
            assert time.monotonic() < end, f"{condition} has not become true; {self.troubles}"
            self.page.wait_for_timeout(20)

    def pixel(self, chart: int, x: float, y: float) -> list[int]:
        """The colour in one of the page's canvases, at parts of its width and height."""
        code = """([number, x, y]) => {
            const canvas = document.querySelectorAll("canvas")[number];
            const at = [Math.floor(x * canvas.width), Math.floor(y * canvas.height)];
            return [...canvas.getContext("2d").getImageData(...at, 1, 1).data.slice(0, 3)];
        }"""
        return self.page.evaluate(code, [chart, x, y])
