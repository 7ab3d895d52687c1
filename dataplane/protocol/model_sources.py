"""The syntax of a model's source. The admin API checks it, and so does each node before it opens or fetches one."""

import posixpath
import re
from urllib.parse import unquote, urlsplit

SOURCE_CHARACTERS_MAX = 4096
_THIS_MACHINE = frozenset({"127.0.0.1", "localhost", "::1"})
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*|[0-9A-Fa-f:.]+")
_HUB_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?")
_HUB_CHARACTERS_MAX = 96
_HALF_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_NOT_IN_REVISION = re.compile(r"[ ~^:?*\[\\@{}%]|\.\.|//|\.lock(/|$)|(^|/)\.|/$|\.$|^/")
"""Not allowed by git in names of branches and tags; also "%", which a server may decode into any of these."""


def is_remote(source: str) -> bool:
    """Whether a model's path names a source elsewhere instead of a file or folder of the node."""
    return source.startswith(("https://", "http://", "hf://"))


def check_source(source: str) -> str:
    """The source itself, if it is `/FOLDER`, `https://HOST/PATH/` (plain http on this machine alone) or
    `hf://ORG/NAME[@REVISION]`.

    Raises:
        ValueError: it is none of these, or leads out of the place that it names; the message says why.
    """
    if len(source) > SOURCE_CHARACTERS_MAX:
        raise ValueError(f"at most {SOURCE_CHARACTERS_MAX} characters, not {len(source)}")
    if not source.isprintable():
        raise ValueError("control characters, line breaks and invisible characters are not allowed")
    if source.startswith("hf://"):
        _check_hub(source)
    elif is_remote(source):
        _check_url(source)
    elif not source.startswith("/"):
        raise ValueError("must be an absolute path, https://HOST/PATH/ or hf://ORG/NAME[@REVISION]")
    elif source.startswith("//") or posixpath.normpath(source) != (source.rstrip("/") or "/"):
        raise ValueError("the path must have no '.', '..' or empty parts")
    return source


def _check_hub(source: str) -> None:
    repository, at, revision = source.removeprefix("hf://").partition("@")
    names = repository.split("/")
    if len(names) != 2 or not all(map(_HUB_NAME.fullmatch, names)) or len(repository) > _HUB_CHARACTERS_MAX:
        raise ValueError(
            "not of the form hf://ORG/NAME[@REVISION]: ORG and NAME hold letters, digits, '.', '_' and '-', and are"
            f" at most {_HUB_CHARACTERS_MAX} characters together"
        )
    if ".." in repository or "--" in repository or repository.endswith(".git"):
        raise ValueError("the hub has no repository with '..' or '--' in its name, nor one that ends in '.git'")
    if at and (not revision or _NOT_IN_REVISION.search(revision)):
        raise ValueError(f"'{revision}' is no name of a branch, tag or commit")


def _check_url(source: str) -> None:
    try:
        parts = urlsplit(source)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise ValueError(f"not a URL: {error}") from None
    if not _HOST.fullmatch(host) or port == 0 or parts.netloc.endswith(":"):
        raise ValueError("the URL must name a host, and a port from 1 to 65535 if any")
    if "@" in parts.netloc:
        raise ValueError("the URL must hold no user name or password")
    if any(character in source for character in "?# "):
        raise ValueError("the URL must have no query, no fragment and no space")
    if parts.scheme == "http" and host not in _THIS_MACHINE:
        raise ValueError("plain http is for this machine alone; use https")
    for part in parts.path.removesuffix("/").split("/")[1:]:
        _check_url_part(part)


def _check_url_part(part: str) -> None:
    """Raise ValueError for a part of a URL's path that a server may read as another place."""
    plain = unquote(part, errors="replace")
    if plain in {"", ".", ".."} or _HALF_ESCAPE.search(part):
        raise ValueError("the URL's path must have no '.', '..' or empty parts, encoded ones included, and no bare '%'")
    if any(character in "/\\%\N{REPLACEMENT CHARACTER}" for character in plain) or not plain.isprintable():
        raise ValueError("the URL's path must have no encoded '/', '%', backslash or control character")
