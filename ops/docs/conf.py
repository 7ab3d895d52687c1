"""How Sphinx builds the documentation (`make docs`): Markdown pages, a search without a server, nothing from a CDN.

The source folder is the repository, so that pages may link to decisions, to the README and to source files.
"""

import base64
import html
from pathlib import Path
from typing import Any, ClassVar

import mermaidx
from docutils import nodes
from docutils.parsers.rst import Directive

_ROOT = Path(__file__).parents[2]
_NAVIGATION = {
    "Concepts": ("concepts", "architecture", "life-of-a-request", "life-of-a-batch", "life-of-a-plan"),
    "Operation": (
        "deploy",
        "postgres-over-regions",
        "backup",
        "operate",
        "monitoring",
        "security",
        "support",
        "limits",
    ),
    "Reference": ("api", "tools-and-reasoning", "cli", "settings", "metrics"),
    "In depth": ("data-plane", "forecasting-and-planning", "scaling", "simulator", "results"),
}
"""Pages by heading of the side bar, in this order. All other pages follow under `More`."""

project = "Tidepool"
html_title = "Tidepool"
html_theme = "furo"
html_copy_source = False
html_show_copyright = False
root_doc = "ops/docs/index"
include_patterns = ["*.md", "ops/*.md", "ops/docs/*.md", "ops/docs/runbooks/*.md", "ops/decisions/*.md"]
exclude_patterns = [".*", "build", "tests"]
extensions = ["myst_parser"]
myst_heading_anchors = 6
myst_fence_as_directive = ["mermaid"]
nitpicky = True


class Mermaid(Directive):
    """A Mermaid diagram, drawn when the page is built. As an image its style sheet and its ids are its own."""

    has_content: ClassVar[bool] = True

    def run(self) -> list[nodes.Node]:
        """The image; its text is the diagram's source."""
        source = "\n".join(self.content)
        svg = base64.b64encode(mermaidx.render(source).svg().encode()).decode()
        image = f'<img alt="{html.escape(source)}" src="data:image/svg+xml;base64,{svg}" style="background: white">'
        return [nodes.raw("", image, format="html")]


def _add_navigation(app: Any, name: str, content: list[str]) -> None:
    """Append the side bar's table of contents to the first page, whose Markdown stays free of directives."""
    if name != root_doc:
        return
    for heading, pages in _NAVIGATION.items():
        content[0] += _tree(heading, *(page for page in pages if (_ROOT / "ops/docs" / f"{page}.md").exists()))
    named = {page for pages in _NAVIGATION.values() for page in (*pages, "index")}
    others = sorted(path.stem for path in (_ROOT / "ops/docs").glob("*.md") if path.stem not in named)
    content[0] += _tree("Runbooks of alerts", "runbooks/*")
    content[0] += _tree("More", *others, "/*", "/ops/*")
    content[0] += _tree("Decisions", "../decisions/*")


def _tree(heading: str, *pages: str) -> str:
    return "\n".join(("", "", "```{toctree}", ":hidden:", ":glob:", f":caption: {heading}", "", *pages, "```", ""))


def _lead_to_the_first_page(app: Any, error: Exception | None) -> None:
    """`index.html` at the top of the site leads to the first page."""
    if error is None:
        target = f"{root_doc}.html"
        Path(app.outdir, "index.html").write_text(
            f'<!DOCTYPE html><title>{project}</title><meta http-equiv="refresh" content="0; url={target}">'
            f'<a href="{target}">{project}</a>\n',
            encoding="utf-8",
        )


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.add_directive("mermaid", Mermaid)
    app.connect("source-read", _add_navigation)
    app.connect("build-finished", _lead_to_the_first_page)
