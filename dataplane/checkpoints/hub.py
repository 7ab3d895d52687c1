"""Checkpoints from the Hugging Face hub, through its own client."""

import re
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.request import getproxies

import httpx2 as httpx

from dataplane.checkpoints.sources import WEIGHTS, FetchError, FetchRules, Progress, open_client

_SOURCE = re.compile(r"hf://(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>.+))?")
_FILES = ["*.json", "*.model", "*.tiktoken", "*.txt", "*.jinja"]


def fetch_from_hub(source: str, folder: Path, weights: bool, progress: Progress, rules: FetchRules) -> None:
    """Bring what `source` names into `folder`, its weights too if they are wanted.

    Raises:
        FetchError: the hub is unreachable or refuses, or redirects to where the rules do not allow.
    """
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - only nodes with the torch extra have it

    match = _SOURCE.fullmatch(source)
    if match is None:
        raise FetchError(f"{source} is not of the form hf://ORG/NAME[@REVISION]")
    _check_redirects(rules)
    try:
        snapshot_download(
            match["repository"],
            revision=match["revision"],
            local_dir=folder,
            allow_patterns=[*_FILES, *([f"*{WEIGHTS}"] if weights else [])],
            ignore_patterns=["*/*"],
            tqdm_class=_silent_bars(progress),
        )
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise FetchError(f"{source} cannot be fetched: {error}") from error
    total_bytes = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    progress(total_bytes, total_bytes)


@cache
def _check_redirects(rules: FetchRules) -> None:
    """Let the hub's client keep the rules too. Once for a process, which has one such client."""
    from huggingface_hub import constants, set_client_factory  # noqa: PLC0415 - only nodes with the torch extra have it

    hub = httpx.URL(constants.ENDPOINT)
    if hub.scheme not in getproxies():
        constants.HF_HUB_DISABLE_XET = True  # its transfers would go wherever the hub says, past this client
        set_client_factory(partial(open_client, rules, trusted=hub.host))


def _silent_bars(progress: Progress) -> Any:
    """A class of progress bars for the hub's client, which draw nothing and tell `progress`.

    The client has a bar for bytes received, one for bytes written and one for files. How many bytes are to come it
    learns file by file.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]  # noqa: PLC0415 - comes with the hub's client

    most_bytes = 0

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **(options | {"disable": True}))
            self.counts_bytes = options.get("unit") == "B"

        def update(self, n: float | None = 1) -> None:
            nonlocal most_bytes
            self.n += n or 0
            if self.counts_bytes:
                most_bytes = max(most_bytes, int(self.n))
                progress(most_bytes, int(self.total or 0))

    return Bar
