"""Every board, and where its JSON is."""

from pathlib import Path

from ops.deploy.boards.board import dashboard
from ops.deploy.boards.overview import OVERVIEW
from ops.deploy.boards.planning import PLANNING
from ops.deploy.boards.pools import POOLS
from ops.deploy.boards.queue import QUEUE
from ops.deploy.boards.serving import SERVING

BOARDS = (OVERVIEW, SERVING, POOLS, QUEUE, PLANNING)
FOLDER = Path(__file__).parents[1] / "dashboards"


def write_boards(folder: Path = FOLDER) -> list[Path]:
    """Write the boards that differ from their files; returns which."""
    written = []
    for board in BOARDS:
        path, text = folder / f"{board.name}.json", dashboard(board)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            written.append(path)
    return written
