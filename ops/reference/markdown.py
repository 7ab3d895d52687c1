"""The parts of a generated Markdown page."""

import re
from collections.abc import Iterable, Sequence

_CODE = re.compile(r"(`[^`]*`)")
_SPECIAL = re.compile(r"([\\*<\[\]|])")


def page(title: str, introduction: str, *parts: str) -> str:
    """A page with a mark for editors that it is generated."""
    mark = "<!-- Generated from the code. Do not edit: change the code, then run `make reference`. -->"
    return "\n\n".join((mark, f"# {title}", introduction, *filter(None, parts))) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table. The cells are Markdown already."""
    lines = (head, ["---"] * len(head), *rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def code(text: str) -> str:
    """A piece of code within a line, in a cell of a table too; nothing for an empty text."""
    return f"`{text.replace('|', chr(92) + '|')}`" if text else ""


def plain(text: str) -> str:
    """A text that shows as it is, except that what stands between backticks is code."""
    pieces = _CODE.split(" ".join(text.split()))
    return "".join(code(piece[1:-1]) if _CODE.fullmatch(piece) else _SPECIAL.sub(r"\\\1", piece) for piece in pieces)


def block(text: str) -> str:
    """Lines that keep their form."""
    return f"```text\n{text}\n```"
