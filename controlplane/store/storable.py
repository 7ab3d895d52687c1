"""Text of clients and nodes as Postgres stores it: `text` and `jsonb` refuse U+0000, UTF-8 half a surrogate pair."""

from typing import Any


def storable(value: Any) -> Any:
    """A string, or JSON of dicts and lists of them, in which what cannot be stored is replaced (U+FFFD for U+0000)."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode().replace("\0", "\ufffd")
    if isinstance(value, dict):
        return {storable(key): storable(each) for key, each in value.items()}
    if isinstance(value, list):
        return [storable(each) for each in value]
    return value
