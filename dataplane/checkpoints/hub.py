"""Checkpoints from the Hugging Face hub, through its own client. It lists the files, resumes downloads, checks sizes
and sends the node's token to gated repositories.
"""

import re
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.request import getproxies

import httpx2 as httpx
from huggingface_hub import constants, set_client_factory, snapshot_download
from tqdm import tqdm  # type: ignore[import-untyped]

from dataplane.checkpoints.pooling import module_folders
from dataplane.checkpoints.sources import WEIGHTS, FetchError, FetchRules, Progress, open_client

_SOURCE = re.compile(r"hf://(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>.+))?")
_FILES = ["*.json", "*.model", "*.tiktoken", "*.txt", "*.jinja"]


def fetch_from_hub(source: str, folder: Path, weights: bool, progress: Progress, rules: FetchRules) -> None:
    """Download the repository `source` into `folder`, with its weights if `weights` is set. If the hub does not answer,
    a folder that an earlier call completed is used as it is.

    Raises:
        FetchError: the hub is unreachable or refuses, or redirects to where the rules do not allow.
    """
    match = _SOURCE.fullmatch(source)
    if match is None:
        raise FetchError(f"{source} is not of the form hf://ORG/NAME[@REVISION]")
    apply_rules(rules)
    download = partial(
        snapshot_download,
        match["repository"],
        revision=match["revision"],
        local_dir=folder,
        tqdm_class=_progress_bars(progress),
    )
    try:
        download(allow_patterns=[*_FILES, *([f"*{WEIGHTS}"] if weights else [])], ignore_patterns=["*/*"])
        if modules := module_folders(folder):
            download(allow_patterns=[f"{module}/config.json" for module in modules])
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise FetchError(f"{source} cannot be fetched: {' '.join(str(error).split())}") from error
    total_bytes = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    progress(total_bytes, total_bytes)


@cache
def apply_rules(rules: FetchRules) -> None:
    """Make the hub's client, of which a process has one, check addresses and redirects by the rules."""
    hub = httpx.URL(constants.ENDPOINT)
    if hub.scheme not in getproxies():
        constants.HF_HUB_DISABLE_XET = True  # the Xet client opens connections of its own, which nothing here checks
        set_client_factory(partial(open_client, rules, trusted=hub.host))


def _progress_bars(progress: Progress) -> Any:
    """A class of progress bars that draw nothing and call `progress`.

    The hub's client has a bar for bytes received, one for bytes written and one for files. The totals grow as it opens
    the files.
    """
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
