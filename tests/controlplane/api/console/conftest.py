"""Browsers at a running API."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from fastapi.testclient import TestClient

from tests.controlplane.api.console.browser import Browser


@pytest.fixture
def open_browser(api: TestClient) -> Iterator[Callable[..., Browser]]:
    """Open one more browser."""
    with ExitStack() as stack:

        def opened(**options: str) -> Browser:
            browser = Browser(api, **options)
            stack.callback(browser.http.close)
            return browser

        yield opened


@pytest.fixture
def browser(open_browser: Callable[..., Browser]) -> Browser:
    """A browser that is not signed in."""
    return open_browser()
