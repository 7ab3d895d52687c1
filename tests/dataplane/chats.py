"""Prompts of conversations, as a node makes them."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dataplane.agent.parsing.families import families_of
from dataplane.agent.prompts import Conversation, PromptTokenizer
from dataplane.agent.settings import AgentSettings
from dataplane.agent.templates.chat_template import ChatTemplate
from dataplane.agent.templates.renderers import TemplateRenderers
from dataplane.agent.tokenization import CheckpointTokenizer
from dataplane.protocol.messages import ChatMessage, Tool
from tests.dataplane.replay_node import PATIENCE_S, model, settings


def make_template(source: str, **special_tokens: str) -> ChatTemplate:
    """The template of a checkpoint, not compiled yet."""
    return ChatTemplate(
        source=source, tool_source=source, special_tokens={"bos_token": "", "eos_token": ""} | special_tokens
    )


def prompt_text(
    template: ChatTemplate | None,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] = (),
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The text of a conversation's prompt."""
    conversation = Conversation(messages=messages, tools=tools, variables=variables or {})
    return asyncio.run(_prompt_text(template, conversation))


async def _prompt_text(template: ChatTemplate | None, conversation: Conversation) -> str:
    agent_settings: AgentSettings = settings()
    renderers = TemplateRenderers(processes_max=1, time_max_s=PATIENCE_S)
    try:
        if template is not None:
            template.variables = frozenset().union(*[await renderers.variables(each) for each in template.sources])
        prompts = PromptTokenizer(agent_settings, renderers)
        text, _ = await prompts.render(conversation, template, families_of(model(), template).tools)
    finally:
        await renderers.close()
    return text


def prompt_tokens(folder: Path, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
    """The prompt of a conversation for a checkpoint."""
    tokenizer = CheckpointTokenizer(folder)
    text = prompt_text(tokenizer.template, messages)
    return tokenizer.encode_text(text, tokens_max=10**6, special=tokenizer.template is None, param="messages")
