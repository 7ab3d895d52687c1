"""The tools of a request, whichever API it came by: which kinds there are, and which of them the model may call."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BeforeValidator

from controlplane.serving.openai_fields import fault, refuse_other_kinds
from dataplane.protocol.messages import Tool, ToolUse

TOOLS_MAX = 128
Choice = Literal["auto", "none", "required", "named"]


def only_tools(kind: str) -> BeforeValidator:
    """Refuse tools, calls of tools and choices of tools that are of another type, by its name."""

    def check(value: Any) -> Any:
        refuse_other_kinds(value, [kind], f"only tools of type '{kind}' are supported, not '{{}}'")
        return value

    return BeforeValidator(check)


def tool_use(
    tools: Sequence[Tool], choice: Choice, *, names: Sequence[str | None] | None = None, parallel: bool
) -> ToolUse | None:
    """The tools of a request as nodes take them; None: it has none. `names`: of the one that must be called (choice
    `named`), or of those that may be; None: all may be.

    Raises:
        PydanticCustomError: two tools have one name, or the choice is not among them.
    """
    known = Counter(tool.name for tool in tools)
    for name, count in known.items():
        if count > 1:
            raise fault("tools", f"several have the name '{name}'; every tool needs a name of its own")
    for asked in names or ():
        if asked not in known:
            raise fault("tool_choice", f"there is no tool '{asked}' in tools")
    if not tools:
        if choice == "required":
            raise fault("tool_choice", "'required' needs tools")
        return None
    if choice == "named":
        return ToolUse(tools=tuple(tools), choice=choice, name=names[0] if names else None, parallel=parallel)
    allowed = tuple(tool for tool in tools if names is None or tool.name in names)
    return ToolUse(tools=allowed, choice=choice if allowed else "none", parallel=parallel)
