"""Conversations in chat templates as transformers itself writes them."""

import pytest

from dataplane.agent.templates.conversation import tool_schemas
from dataplane.protocol.messages import ChatMessage, Tool, ToolCall
from tests.dataplane.agent.templates import styles
from tests.dataplane.chats import make_template, prompt_text

chat_templates = pytest.importorskip("transformers.utils.chat_template_utils", reason="install the torch extra")

TOOL = Tool(name="weather", description="Of a <city> in °C", parameters={"type": "object", "properties": {}})
CALL = ToolCall(id="Abc123xyz", name="weather", arguments='{"city": "Kyōto", "days": [1, 2.5, null]}')
TURNS = (
    ChatMessage(role="user", content="Is it raining in Kyōto?\n"),
    ChatMessage(role="assistant", tool_calls=(CALL,)),
    ChatMessage(role="tool", tool_call_id=CALL.id, content='{"rain": false}'),
    ChatMessage(role="assistant", content="No.", reasoning="It is false."),
    ChatMessage(role="user", content="Thanks & <bye>"),
)
IN_TRANSFORMERS = [
    {"role": "user", "content": "Is it raining in Kyōto?\n"},
    {
        "role": "assistant",
        "tool_calls": [
            {
                "id": CALL.id,
                "type": "function",
                "function": {"name": "weather", "arguments": {"city": "Kyōto", "days": [1, 2.5, None]}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": CALL.id, "name": "weather", "content": '{"rain": false}'},
    {"role": "assistant", "content": "No.", "reasoning_content": "It is false."},
    {"role": "user", "content": "Thanks & <bye>"},
]


@pytest.mark.parametrize("style", ["CHATML", "LLAMA", "MISTRAL"])
@pytest.mark.parametrize("tools", [(), (TOOL,)])
def test_a_prompt_is_what_transformers_writes(style: str, tools: tuple[Tool, ...]) -> None:
    source, variables = getattr(styles, style), {"date_string": "1 May 2026"}
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    [theirs], _ = chat_templates.render_jinja_template(
        conversations=[IN_TRANSFORMERS],
        tools=tool_schemas(tools) or None,
        chat_template=source,
        add_generation_prompt=True,
        **tokens,
        **variables,
    )
    assert prompt_text(make_template(source, **tokens), TURNS, tools, variables) == theirs
