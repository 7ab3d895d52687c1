"""One self-contained HTML page: headings, figures in a row, tables and pictures; it loads nothing."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

_CSS = """
:root { --ink: #1f2933; --soft: #616e7c; --line: #e4e7eb; --accent: #0072b2; }
* { box-sizing: border-box; }
body { margin: 0; background: #f5f7fa; color: var(--ink);
       font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { margin: 0; font-size: 26px; line-height: 1.25; }
h2 { margin: 0 0 2px; font-size: 18px; }
p.about { margin: 0 0 12px; color: var(--soft); font-size: 13.5px; }
header p { margin: 4px 0 18px; color: var(--soft); }
section { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px; margin: 16px 0; }
svg { display: block; width: 100%; height: auto; }
svg text { font-family: "DejaVu Sans", Verdana, sans-serif; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(165px, 1fr)); gap: 12px; }
.card { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 12px 14px; }
.card b { display: block; font-size: 22px; line-height: 1.3; font-variant-numeric: tabular-nums; }
.card span { color: var(--soft); font-size: 12.5px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th { text-align: right; font-weight: 600; color: var(--soft); border-bottom: 2px solid var(--line); }
td { text-align: right; border-bottom: 1px solid var(--line); }
th, td { padding: 5px 9px; white-space: nowrap; }
th.word, td.word { text-align: left; }
td.good { color: #157f3b; } td.bad { color: #b42318; }
footer { color: var(--soft); font-size: 12.5px; margin-top: 22px; overflow-wrap: anywhere; }
@media print { body { background: #fff; } section { break-inside: avoid; } }
"""


class PageError(Exception):
    """A page that cannot be written."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A table's cell. `verdict`: good, bad or empty; `word`: aligned left."""

    text: str
    verdict: str = ""
    word: bool = False


def cards(figures: Iterable[tuple[str, str]]) -> str:
    """Figures with a word for each below it: (name, figure)."""
    inner = "".join(
        f'<div class="card"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in figures
    )
    return f'<div class="cards">{inner}</div>'


def table(headers: Sequence[Cell], rows: Iterable[Sequence[Cell]]) -> str:
    """A table."""
    body = "".join(f"<tr>{''.join(_cell('td', cell) for cell in row)}</tr>" for row in rows)
    head = "".join(_cell("th", cell) for cell in headers)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def section(title: str, about: str, inner: str | None) -> str:
    """A part of the page; nothing where there is nothing to show."""
    if inner is None:
        return ""
    return f'<section><h2>{escape(title)}</h2><p class="about">{escape(about)}</p>{inner}</section>'


def page(title: str, below: str, parts: Iterable[str], footer: str) -> str:
    """The whole page."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{_CSS}</style></head><body><main><header><h1>{escape(title)}</h1><p>{escape(below)}</p></header>"
        f"{''.join(parts)}<footer>{escape(footer)}</footer></main></body></html>\n"
    )


def write_page(path: Path, text: str) -> None:
    """Write it.

    Raises:
        PageError: it cannot be written there.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PageError(f"{path}: cannot be written: {error.strerror or error}") from error


def _cell(tag: str, cell: Cell) -> str:
    classes = " ".join(name for name in (cell.verdict, "word" if cell.word else "") if name)
    return f'<{tag} class="{classes}">{escape(cell.text)}</{tag}>'
