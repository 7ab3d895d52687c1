"""The scenarios that the project ships, and changed copies of them."""

from pathlib import Path

EXAMPLES = Path(__file__).parents[3] / "ops" / "scenarios"
SMALL = EXAMPLES / "simulate-small.toml"
SCALED = EXAMPLES / "simulate-scaled.toml"


def changed(example: Path, folder: Path, *changes: tuple[str, str]) -> Path:
    """A copy in a folder, with each text replaced, which must be there."""
    text = example.read_text()
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    path = folder / "scenario.toml"
    path.write_text(text)
    return path
