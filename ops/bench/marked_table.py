"""A table on a page of the documentation, between two marks: no figure there is typed by hand."""

from dataclasses import dataclass
from pathlib import Path


class PageError(ValueError):
    """A page that a table cannot be written into."""


@dataclass(frozen=True)
class MarkedTable:
    """The table between `<!-- NAME: begin -->` and `<!-- NAME: end -->`."""

    name: str

    @property
    def begin(self) -> str:
        return f"<!-- {self.name}: begin -->"

    @property
    def end(self) -> str:
        return f"<!-- {self.name}: end -->"

    def split(self, page: Path) -> tuple[str, str, str]:
        """What stands before the table, with its mark; the table; what stands after it.

        Raises:
            PageError: the file cannot be read, or lacks a mark.
        """
        try:
            before, begin, rest = page.read_text(encoding="utf-8").partition(self.begin)
        except (OSError, UnicodeDecodeError) as error:
            raise PageError(f"{page}: cannot be read: {error}") from error
        table, end, after = rest.partition(self.end)
        if not begin or not end:
            raise PageError(f"{page}: needs the lines {self.begin} and {self.end}, the table comes between them")
        return before + begin, table.strip(), end + after

    def write(self, page: Path, table: str) -> None:
        """Replace the table of a page.

        Raises:
            PageError: see `split`.
        """
        before, _, after = self.split(page)
        page.write_text(f"{before}\n\n{table}\n{after}", encoding="utf-8")
