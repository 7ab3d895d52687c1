"""A fleet's file read: YAML whose faults are named with their line, checked against what a file may say."""

from typing import Any

import yaml
from pydantic import ValidationError

from ops.client.api import CommandError
from ops.client.fleet_file.document import FleetFile

Path = tuple[str | int, ...]
_SHOWN_MAX = 10
_VALUE_CHARACTERS_MAX = 60


def read_fleet_file(text: str, *, name: str) -> FleetFile:
    """The file of that text; `name` stands in messages.

    Raises:
        CommandError: it is no YAML, or says what it may not; every fault has a line of the message.
    """
    try:
        lines = _lines(text)
        return FleetFile.model_validate({} if (content := yaml.safe_load(text)) is None else content)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise CommandError(f"{name}:{mark.line + 1 if mark else 1}: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise CommandError(f"{name} is no YAML: {error}") from None
    except RecursionError:
        raise CommandError(f"{name} is nested too deeply") from None
    except (ValueError, OverflowError) as error:
        if not isinstance(error, ValidationError):  # such as the 31st of February
            raise CommandError(f"{name} has a value that cannot be read: {error}") from None
        faults = [_fault(name, lines, each) for each in error.errors(include_url=False)]
        more = [f"and {len(faults) - _SHOWN_MAX} more"] if len(faults) > _SHOWN_MAX else []
        raise CommandError("\n".join([*faults[:_SHOWN_MAX], *more])) from None


def says_nothing(text: str) -> bool:
    """Whether a file that was read has no document, or an empty one; `{}` is a file that names nothing."""
    return yaml.safe_load(text) is None


def _fault(name: str, lines: dict[Path, int], error: Any) -> str:
    """One fault: the file and line, the field, its limit and its value."""
    path: Path = tuple(part for part in error["loc"] if part != "[key]")
    known = path
    while known and known not in lines:
        known = known[:-1]
    field = ".".join(str(part) for part in path)
    value = error["input"]
    got = "" if isinstance(value, dict | list) or error["type"] == "missing" else f", not {_shown(value)}"
    message = error["msg"].removeprefix("Value error, ")
    message = "no such field" if error["type"] == "extra_forbidden" else message[:1].lower() + message[1:] + got
    return f"{name}:{lines.get(known, 1)}: {field + ': ' if field else ''}{message}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _VALUE_CHARACTERS_MAX else f"{text[:_VALUE_CHARACTERS_MAX]}..."


def _lines(text: str) -> dict[Path, int]:
    """The line of every field, from 1.

    Raises:
        yaml.YAMLError: it is no YAML, names a field twice, or has an alias: YAML would take the last of two fields,
            and a few aliases of aliases are as long as a disk.
    """
    for token in yaml.scan(text, Loader=yaml.SafeLoader):
        if isinstance(token, yaml.AliasToken):
            raise yaml.MarkedYAMLError(problem="an alias (*) cannot be used here", problem_mark=token.start_mark)
    lines: dict[Path, int] = {}
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    left: list[tuple[Path, yaml.Node | None]] = [((), root)]
    while left:
        path, node = left.pop()
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                field: Path = (*path, key.value if isinstance(key, yaml.ScalarNode) else "")
                if field in lines:
                    problem = f"{'.'.join(map(str, field))} is here twice"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                lines[field] = key.start_mark.line + 1
                left.append((field, value))
        elif isinstance(node, yaml.SequenceNode):
            for at, value in enumerate(node.value):
                lines[*path, at] = value.start_mark.line + 1
                left.append(((*path, at), value))
    return lines
