"""The generated pages and where they lie."""

from collections.abc import Callable, Mapping
from pathlib import Path

from ops.reference.commands import commands_page
from ops.reference.metrics import metrics_page
from ops.reference.settings import settings_page

DOCS = Path(__file__).parents[1] / "docs"
PAGES: Mapping[str, Callable[[], str]] = {
    "settings.md": settings_page,
    "metrics.md": metrics_page,
    "cli.md": commands_page,
}


def write_pages(folder: Path) -> list[Path]:
    """Write each page whose text differs.

    Returns:
        the files that changed.
    """
    changed = []
    for name, generate in PAGES.items():
        path, text = folder / name, generate()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            changed.append(path)
    return changed
