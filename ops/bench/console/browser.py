"""The console's pages in a real browser: when their last data is shown, what they load, and how they scroll."""

import importlib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from ops.bench.console.fleet import Filled
from ops.bench.gateway.stack import GatewayProcess

_ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
_SIZE = {"width": 1400, "height": 900}
_PATIENCE_MS = 60_000
_WATCH = """
window.tidepoolLongTasks = [];
new PerformanceObserver((list) => {
  for (const each of list.getEntries()) window.tidepoolLongTasks.push([each.startTime, each.duration]);
}).observe({ type: "longtask", buffered: true });
"""
_SHOWN = """
([selector, count]) => new Promise((done) => {
  const look = () => document.querySelectorAll(selector).length >= count
    ? requestAnimationFrame(() => done(performance.now())) : requestAnimationFrame(look);
  look();
})
"""
_SCROLL = """
async () => {
  const began = performance.now();
  const frame = () => new Promise((done) => requestAnimationFrame(done));
  const parts = [document.scrollingElement, ...document.querySelectorAll(".scroll")];
  for (const part of parts) {
    for (let step = 0; step < 90; step++) { part.scrollTop += 60; await frame(); }
    for (let step = 0; step < 30; step++) { part.scrollTop -= 200; await frame(); }
  }
  await new Promise((done) => setTimeout(done, 300));
  return window.tidepoolLongTasks.filter(([start]) => start >= began).map(([, duration]) => duration);
}
"""
_LOADED = """
() => {
  const all = [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")];
  const files = all.filter(({ name }) => !name.includes("/admin/"));
  return files.reduce((sum, { transferSize }) => sum + transferSize, 0);
}
"""
_INTERACTIVE = """
() => {
  const main = performance.getEntriesByName("first-contentful-paint")[0]?.startTime ?? 0;
  return Math.max(main, ...window.tidepoolLongTasks.map(([start, duration]) => start + duration));
}
"""


@dataclass(frozen=True, kw_only=True)
class PageFigures:
    """Of one page, each time loaded by a new browser with nothing in its cache: medians, in milliseconds from the
    navigation. `interactive_ms`: the first paint of content, or the end of the last task of more than 50 ms before the
    data are shown. `loaded_bytes`: of the app's files, as sent. `long_tasks`: of all loads, while scrolling.
    """

    page: str
    shown_ms: float
    interactive_ms: float
    loaded_bytes: int
    long_tasks: int
    longest_task_ms: float


def why_no_browser() -> str | None:
    """What pages need to be measured and is not there."""
    if not os.environ.get("TIDEPOOL_CHROMIUM"):
        return "TIDEPOOL_CHROMIUM names no browser"
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed (make test-browser installs it)"
    return None


def measure_pages(gateway: GatewayProcess[Filled], rounds: int) -> list[PageFigures]:
    """Load and scroll the overview and the page of the drafted plan."""
    pages: Mapping[str, tuple[str, str, int]] = {
        "overview": ("", "table[aria-label='Regions'] tbody tr[aria-rowindex]", 10),
        "plan": (f"#/plans/{gateway.filled.plan_drafted}", "table[aria-label='Changes'] tbody tr[aria-rowindex]", 10),
    }
    with importlib.import_module("playwright.sync_api").sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=os.environ["TIDEPOOL_CHROMIUM"], args=list(_ARGUMENTS))
        try:
            return [_measure(browser, gateway, name, *about, rounds=rounds) for name, about in pages.items()]
        finally:
            browser.close()


def _measure(
    browser: Any, gateway: GatewayProcess[Filled], name: str, link: str, selector: str, rows: int, *, rounds: int
) -> PageFigures:
    shown, interactive, loaded, tasks = [], [], [], []
    for _ in range(rounds):
        with _page(browser, gateway) as page:
            page.goto(f"http://127.0.0.1:{gateway.port}/ui/{link}", wait_until="commit")
            shown.append(page.evaluate(_SHOWN, [selector, rows]))
            interactive.append(page.evaluate(_INTERACTIVE))
            loaded.append(page.evaluate(_LOADED))
            tasks += page.evaluate(_SCROLL)
    return PageFigures(
        page=name,
        shown_ms=median(shown),
        interactive_ms=median(interactive),
        loaded_bytes=int(median(loaded)),
        long_tasks=len(tasks),
        longest_task_ms=max(tasks, default=0.0),
    )


@contextmanager
def _page(browser: Any, gateway: GatewayProcess[Filled]) -> Iterator[Any]:
    """A new page of a person who has signed in."""
    context = browser.new_context(viewport=_SIZE)
    try:
        address = f"http://127.0.0.1:{gateway.port}/ui/session"
        answer = context.request.post(address, data={"key": gateway.filled.viewer_key})
        if not answer.ok:
            raise RuntimeError(f"nobody can sign in: {answer.status} {answer.text()}")
        context.add_init_script(_WATCH)
        page = context.new_page()
        page.set_default_timeout(_PATIENCE_MS)
        yield page
    finally:
        context.close()
