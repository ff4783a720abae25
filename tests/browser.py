"""The system's Chromium, in which pages are tested. Without one such tests are skipped, in CI they fail."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium() -> Iterator[Any]:
    """A headless browser without network."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None and os.environ.get("CI") != "true":
        pytest.skip(f"none of {', '.join(NAMES)} is on the PATH (Debian's package: chromium)")
    assert found, "CI needs a chromium: .ci/run installs it"
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


def opened(browser: Any, path: Any) -> tuple[Any, list[str]]:
    """A page offline, and what its console says and the errors that it throws, as they come."""
    context = browser.new_context(offline=True, viewport={"width": 1400, "height": 1000})
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on(
        "request", lambda request: said.append(request.url) if not request.url.startswith(("file:", "data:")) else 0
    )
    page.goto(path.as_uri())
    return page, said
