"""The generated files and where they lie."""

from collections.abc import Callable, Mapping
from pathlib import Path

from ops.reference.commands import commands_page
from ops.reference.metrics import metrics_page
from ops.reference.openapi import openapi_document
from ops.reference.settings import settings_page

OPS = Path(__file__).parents[1]
PAGES: Mapping[str, Callable[[], str]] = {
    "docs/settings.md": settings_page,
    "docs/metrics.md": metrics_page,
    "docs/cli.md": commands_page,
    "console/openapi.json": openapi_document,
}


def write_pages(folder: Path) -> list[Path]:
    """Write each file below `folder` whose text differs.

    Returns:
        the files that changed.
    """
    changed = []
    for name, generate in PAGES.items():
        path, text = folder / name, generate()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            changed.append(path)
    return changed
