"""Renders and tokenizes the prompts of a node: in template processes and in threads, few long ones at a time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from dataplane.agent.parsing.families import TOOL_FAMILIES, ToolFamily
from dataplane.agent.settings import AgentSettings
from dataplane.agent.templates.chat_template import ChatTemplate
from dataplane.agent.templates.conversation import calls_as_text, plain_text, spellings, tool_schemas, tools_as_text
from dataplane.agent.templates.renderers import BrokenTemplateError, TemplateRenderers
from dataplane.agent.tokenization import Tokenizer
from dataplane.protocol.errors import BadRequestError, ContextLengthError, OverloadedError
from dataplane.protocol.limits import is_reserved
from dataplane.protocol.messages import ChatMessage, Generate, Tool

_TAIL_CHARS = 64
_WAITING_PER_LONG_PROMPT = 8


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt. `tail`: the end of a conversation's text, with which the answer may have begun already."""

    tokens: tuple[int, ...]
    tail: str = ""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What a chat template is given. `variables`: those that the request sets; `answer`: whether the prompt ends where
    the assistant's answer begins.
    """

    messages: Sequence[ChatMessage]
    tools: Sequence[Tool] = ()
    variables: Mapping[str, Any]
    answer: bool = True

    @classmethod
    def of(cls, generate: Generate) -> "Conversation":
        """That of a request. Tools that must not be called are left out."""
        wanted = generate.tools is not None and generate.tools.choice != "none"
        tools = generate.tools.tools if generate.tools is not None and wanted else ()
        return cls(messages=generate.messages or (), tools=tools, variables=generate.template)

    @property
    def chars(self) -> int:
        """Of all that a template may write; of tools and variables as JSON."""
        others = msgspec.json.encode((self.tools, self.variables))
        return sum(len(text) for message in self.messages for text in message.texts) + len(others)


class PromptTokenizer:
    """Makes prompts. A long one takes seconds of a core and a hundred times its size in memory, so at most
    `long_prompts_max` of them run at once; short ones never wait for them. `family` is how the model writes tool calls.
    """

    def __init__(self, settings: AgentSettings, renderers: TemplateRenderers) -> None:
        self._renderers = renderers
        self._long_from = settings.long_prompt_chars
        self._running = asyncio.Semaphore(settings.long_prompts_max)
        self._waiting_max = _WAITING_PER_LONG_PROMPT * settings.long_prompts_max
        self._waiting = 0

    async def tokenize(
        self, generate: Generate, tokenizer: Tokenizer, *, family: ToolFamily | None = None, tokens_max: int
    ) -> Prompt:
        """The prompt of a request.

        Raises:
            BadRequestError: the prompt is empty, tokens are unknown, or the chat template refuses it.
            ChatTemplateError: the chat template is at fault.
            ContextLengthError: it has more than `tokens_max` tokens.
            OverloadedError: it is long, and too many long prompts wait; or its template has no turn.
        """
        tokenizer.check_tokens(generate.generated, "generated")
        tokenizer.check_tokens([token_id for token_id, _ in generate.sampling.logit_bias], "logit_bias")
        if generate.messages is not None:
            text, plain = await self.render(Conversation.of(generate), tokenizer.template, family)
            tokens = await self.encode(text, tokenizer, tokens_max=tokens_max, special=plain, param="messages")
            return Prompt(tokens=_not_empty(tokens, "messages"), tail=text[-_TAIL_CHARS:])
        if generate.prompt is not None:
            tokens = await self.encode(generate.prompt, tokenizer, tokens_max=tokens_max)
            return Prompt(tokens=_not_empty(tokens, "prompt"))
        return Prompt(tokens=_checked(generate.prompt_tokens or (), tokenizer, tokens_max))

    async def encode(
        self, text: str, tokenizer: Tokenizer, *, tokens_max: int, special: bool = True, param: str = "prompt"
    ) -> tuple[int, ...]:
        """The tokens of a text; raises as `Tokenizer.encode_text`, and OverloadedError."""
        async with self._long_prompt(len(text)):
            return await asyncio.to_thread(
                tokenizer.encode_text, text, tokens_max=tokens_max, special=special, param=param
            )

    async def render(
        self, conversation: Conversation, template: ChatTemplate | None, family: ToolFamily | None
    ) -> tuple[str, bool]:
        """The text of a conversation, and whether it is plain: made without a template.

        Raises:
            BadRequestError: the template refuses the conversation, or fails with it.
            ChatTemplateError: the chat template is at fault.
            OverloadedError: it is long, and too many long ones wait; or its template has no turn.
        """
        for name in conversation.variables:
            if is_reserved(name):
                raise BadRequestError(
                    f"chat_template_kwargs must not set {name!r}", param=f"chat_template_kwargs.{name}"
                )
        messages, tools = conversation.messages, conversation.tools
        call_text = (family or TOOL_FAMILIES["json"]).syntax.text
        if template is None or not template.reads_calls:
            messages = calls_as_text(messages, call_text)
        if tools and (template is None or not template.takes_tools):
            messages, tools = tools_as_text(messages, tools, call_text), ()
        if template is None:
            return plain_text(messages, answer=conversation.answer), True
        schemas = tool_schemas(tools) or None
        variables = {
            "xml_tools": schemas,
            **template.special_tokens,
            **conversation.variables,
            "tools": schemas,
            "add_generation_prompt": conversation.answer,
        }
        source = template.tool_source if tools else template.source
        short_ids = family is not None and family.short_ids
        async with self._long_prompt(conversation.chars):
            return await self._first_text(source, messages, variables, short_ids=short_ids), False

    async def _first_text(
        self, source: str, messages: Sequence[ChatMessage], variables: dict[str, Any], *, short_ids: bool
    ) -> str:
        """The text of the first spelling of the messages that the template can read."""
        failure: BrokenTemplateError | None = None
        for spelled in spellings(messages, short_ids=short_ids):
            try:
                return await self._renderers.render(source, variables | {"messages": spelled})
            except BrokenTemplateError as error:
                failure = failure or error
        assert failure is not None
        raise failure

    async def tokenize_pair(
        self, query: str, document: str, tokenizer: Tokenizer, *, tokens_max: int
    ) -> tuple[int, ...]:
        """The tokens of two texts that are scored together; raises as `tokenize`."""
        async with self._long_prompt(len(query) + len(document)):
            tokens = await asyncio.to_thread(tokenizer.encode_pair, query, document, tokens_max=tokens_max)
        return _not_empty(tokens, "messages")

    @contextlib.asynccontextmanager
    async def _long_prompt(self, chars: int) -> AsyncIterator[None]:
        """Wait while `long_prompts_max` long prompts run, if this one is long."""
        if chars < self._long_from:
            yield
            return
        if self._running.locked() and self._waiting >= self._waiting_max:
            raise OverloadedError(f"{self._waiting} prompts of {self._long_from} characters or more wait, the limit")
        self._waiting += 1
        try:
            await self._running.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._running.release()


def _checked(tokens: tuple[int, ...], tokenizer: Tokenizer, tokens_max: int) -> tuple[int, ...]:
    """A prompt given as tokens. Its length is checked first, since the event loop looks at each token."""
    if len(tokens) > tokens_max:
        raise ContextLengthError(
            f"the prompt has {len(tokens)} tokens; the model takes at most {tokens_max} here", param="prompt_tokens"
        )
    tokenizer.check_tokens(tokens, "prompt_tokens")
    return _not_empty(tokens, "prompt_tokens")


def _not_empty(tokens: tuple[int, ...], param: str) -> tuple[int, ...]:
    if not tokens:
        raise BadRequestError(f"{param} must hold at least one token", param=param)
    return tokens
