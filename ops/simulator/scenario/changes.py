"""What the command line changes in a scenario before it is checked: another recording, single keys."""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

from ops.simulator.kernel.scenario_values import Part
from ops.simulator.traffic.traffic_parts import AegaeonPart, ListedPart, RatesPart

RECORDINGS: dict[str, type[Part]] = {
    kind: part
    for part in (AegaeonPart, ListedPart, RatesPart)
    for kind in get_args(part.model_fields["kind"].annotation)
}
"""The kinds of traffic that are read from a file, and the table of each."""


class ChangeError(ValueError):
    """A change that cannot be made; the message names it."""


def with_trace(document: dict[str, Any], trace: str) -> dict[str, Any]:
    """The document with a recording for its traffic, as FORMAT:PATH. Keys of its table that both take are kept.

    Raises:
        ChangeError: there is no such format.
    """
    kind, colon, path = trace.partition(":")
    if kind not in RECORDINGS or not colon or not path:
        raise ChangeError(f"--trace {trace}: must be FORMAT:PATH, with one of {', '.join(sorted(RECORDINGS))}")
    before = document.get("traffic")
    fields = RECORDINGS[kind].model_fields
    kept = {key: value for key, value in before.items() if key in fields} if isinstance(before, dict) else {}
    return document | {"traffic": kept | {"kind": kind, "path": str(Path(path).absolute())}}


def with_settings(document: dict[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """The document with keys set, each as KEY=VALUE: dots lead into tables, numbers into lists from 0. A value is read
    as TOML, and as a string where it is none.

    Raises:
        ChangeError: a change is no KEY=VALUE, or its key leads nowhere.
    """
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not all(key.split(".")):
            raise ChangeError(f"--set {setting}: must be KEY=VALUE, such as traffic.scale=0.5")
        document = _with(document, key.split("."), _value(text), setting)
    return document


def _with(held: Any, keys: list[str], value: Any, setting: str) -> Any:
    if not keys:
        return value
    first, *rest = keys
    if isinstance(held, list):
        if not first.isdecimal() or int(first) >= len(held):
            raise ChangeError(f"--set {setting}: {first} is no place in a list of {len(held)}, from 0")
        place = int(first)
        return [*held[:place], _with(held[place], rest, value, setting), *held[place + 1 :]]
    if not isinstance(held, dict):
        raise ChangeError(f"--set {setting}: {first} is below a value that is no table")
    return held | {first: _with(held.get(first, {}) if rest else None, rest, value, setting)}


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
