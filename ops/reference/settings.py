"""`settings.md`: every setting, from the settings classes that read them."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from controlplane.settings import Settings
from dataplane.agent.settings import AgentSettings, WorkerSettings
from dataplane.runtime.logs import LogSettings
from ops.cli.unknown_settings import OTHER_VARIABLES
from ops.reference.markdown import code, page, plain, table

_INTRODUCTION = """\
Each process reads its settings from environment variables when it starts, and ends with an error that names the setting
where a value is out of its limits. A variable that begins with `TIDEPOOL_` and is no setting gets a warning with the
nearest name. Unset means that the variable is absent or that the setting is off."""
_HEAD = ("setting", "type", "default", "limits", "unit", "what it does")
_LIMITS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "multipleOf": "a multiple of {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
}
_UNITS = {
    "s": "seconds",
    "days": "days",
    "bytes": "bytes",
    "tokens": "tokens",
    "chars": "characters",
    "minute": "per minute",
    "share": "share of 1",
    "ratio": "share of 1",
    "margin": "factor",
}
_QUALIFIERS = {"max", "min"}


def settings_page() -> str:
    """The page."""
    return page(
        "Settings",
        _INTRODUCTION,
        "## Control plane",
        "Gateways (`tidepool api`), dispatchers, workers, forecasters and beat read these. `tidepool up` passes them to"
        " its processes.",
        _class_table(Settings),
        "## Node agents",
        "`tidepool agent` reads these. A worker group is one worker process and the GPUs that it drives.",
        _class_table(AgentSettings),
        "### Fields of a worker group",
        "Each item of `TIDEPOOL_AGENT_SLOTS` is a JSON object with these fields.",
        table(_HEAD, _rows(WorkerSettings.model_fields, WorkerSettings.model_json_schema(), "")),
        "## Logs",
        "Every process reads these, workers of agents included.",
        _class_table(LogSettings),
        "## Other variables",
        table(("variable", "what it does"), ((code(name), plain(about)) for name, about in OTHER_VARIABLES.items())),
    )


def _class_table(settings: type[BaseSettings]) -> str:
    prefix = settings.model_config["env_prefix"]
    return table(_HEAD, _rows(settings.model_fields, settings.model_json_schema(), prefix))


def _rows(fields: Mapping[str, FieldInfo], schema: dict[str, Any], prefix: str) -> Iterator[tuple[str, ...]]:
    for name, field in fields.items():
        form = schema["properties"][name]
        # What may be absent is one form or null.
        form = next((each for each in form.get("anyOf", ()) if each != {"type": "null"}), form)
        yield (
            code(f"{prefix}{name.upper()}" if prefix else name),
            _type(form),
            _default(field),
            plain("; ".join(_limits(form))),
            _unit(name, form),
            plain(field.description or ""),
        )


def _type(form: Mapping[str, Any]) -> str:
    kinds = {"boolean": "true or false", "array": "JSON list", "object": "JSON object"}
    named = {"password": "secret", "path": "path"}
    return named.get(form.get("format", ""), kinds.get(form["type"], str(form["type"])))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if field.default_factory is not None:
        return "computed"
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if isinstance(value, bool):
        return code(str(value).lower())
    return "unset" if value in (None, "", ()) else code(f"{value:.15g}" if isinstance(value, float) else str(value))


def _limits(form: Mapping[str, Any]) -> Iterator[str]:
    choices = form.get("enum") or _alternatives(form.get("pattern", ""))
    if choices:
        yield ", ".join(f"`{choice}`" for choice in choices)
    elif "pattern" in form:
        yield f"`{form['pattern']}`"
    for key, text in _LIMITS.items():
        if key in form:
            yield text.format(f"{form[key]:.15g}")


def _alternatives(pattern: str) -> list[str]:
    """The words of a pattern ^(one|other)$; empty for any other pattern."""
    inner = pattern.removeprefix("^(").removesuffix(")$")
    words = inner.split("|")
    return words if len(words) > 1 and all(word.replace("-", "").isalnum() for word in words) else []


def _unit(name: str, form: Mapping[str, Any]) -> str:
    """The unit that a number's name ends with, as `wait_max_s` and `body_bytes_max` do."""
    if form["type"] not in {"integer", "number"}:
        return ""
    words = [word for word in name.split("_") if word not in _QUALIFIERS]
    if words[-1] in _UNITS:
        return _UNITS[words[-1]]
    highest = form.get("maximum", form.get("exclusiveMaximum"))
    return "share of 1" if form["type"] == "number" and highest == 1 else ""
