"""The chat template of a checkpoint folder, and the variables that it is rendered with."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from dataplane.protocol.errors import ModelLoadError


@dataclass(kw_only=True)
class ChatTemplate:
    """A template. `tool_source`: the one for requests with tools, where the checkpoint has its own. `special_tokens`:
    `bos_token` and others of `tokenizer_config.json`. `variables`: the names that the sources read, once compiled.
    """

    source: str
    tool_source: str
    special_tokens: dict[str, str]
    variables: frozenset[str] = field(default=frozenset())

    @classmethod
    def of_folder(cls, folder: Path) -> Self | None:
        """The template of a checkpoint folder; None where it has none.

        Raises:
            ModelLoadError: its files are no text, or describe no template.
        """
        try:
            config = _read_json(folder / "tokenizer_config.json")
            sources = _sources(folder, config)
        except (UnicodeDecodeError, ValueError, TypeError, KeyError) as error:
            raise ModelLoadError(f"{folder}: the chat template cannot be read: {error!r}", param="path") from error
        if not sources.get("default"):
            return None
        tokens = {name: _token_text(value) for name, value in config.items() if name.endswith("_token") and value}
        return cls(
            source=sources["default"],
            tool_source=sources.get("tool_use") or sources["default"],
            special_tokens={"bos_token": "", "eos_token": ""} | tokens,
        )

    @property
    def sources(self) -> frozenset[str]:
        return frozenset({self.source, self.tool_source})

    @property
    def takes_tools(self) -> bool:
        """Whether it tells the model of tools."""
        return not self.variables.isdisjoint({"tools", "xml_tools"})

    @property
    def reads_calls(self) -> bool:
        """Whether it writes the calls of earlier turns."""
        return "tool_calls" in self.tool_source


def _sources(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """The templates by name: `default`, and what else the folder has."""
    given = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    sources = {each["name"]: each["template"] for each in given} if isinstance(given, list) else {"default": given}
    path = folder / "chat_template.jinja"
    if path.is_file():
        sources["default"] = path.read_text(encoding="utf-8")
    for path in (folder / "additional_chat_templates").glob("*.jinja"):
        sources[path.stem] = path.read_text(encoding="utf-8")
    return {name: source for name, source in sources.items() if isinstance(source, str)}


def _read_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _token_text(token: Any) -> str:
    """A special token of `tokenizer_config.json`: a text, or an object with its text in `content`."""
    return str(token.get("content", "") if isinstance(token, dict) else token)
