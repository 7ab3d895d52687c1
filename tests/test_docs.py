"""Links between documents lead to files and headings that exist. What they name in backticks is in `test_tidy.py`."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = (*ROOT.glob("*.md"), *(ROOT / "ops").glob("*.md"), *(ROOT / "ops/docs").rglob("*.md"))
DECISIONS = tuple((ROOT / "ops/decisions").glob("*.md"))
_FENCE = re.compile(r"^ *(```|~~~).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]+`")
_LINK = re.compile(r"\[[^\]]*\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)")
_HEADING = re.compile(r"^#{1,6} +(.*?) *#*$", re.MULTILINE)


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _prose(path: Path) -> str:
    return _FENCE.sub("", path.read_text(encoding="utf-8"))


def _anchors(path: Path) -> Iterator[str]:
    """The anchors that GitHub, and the site, give the headings of a page."""
    seen: dict[str, int] = {}
    for heading in _HEADING.findall(_prose(path)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        count = seen[slug] = seen.get(slug, -1) + 1
        yield f"{slug}-{count}" if count else slug


def _broken_links(path: Path) -> Iterator[str]:
    for target in _LINK.findall(_CODE.sub("", _prose(path))):
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        if not linked.exists():
            yield f"{target}: no such file"
        elif anchor and anchor not in set(_anchors(linked)):
            yield f"{target}: no such heading"


@pytest.mark.parametrize("path", [*PAGES, *DECISIONS], ids=_name)
def test_links_lead_somewhere(path: Path) -> None:
    broken = list(_broken_links(path))
    assert not broken, "\n".join(broken)


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n## Two `words`, here\n\n[a](page.md#two-words-here) [b](#a-page) [c](https://x.org)\n")
    assert list(_broken_links(page)) == []
    page.write_text("# A page\n\n[a](gone.md) [b](#gone) `[c](gone.md)`\n\n```\n[d](gone.md)\n```\n")
    assert list(_broken_links(page)) == ["gone.md: no such file", "#gone: no such heading"]
