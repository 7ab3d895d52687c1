"""The prompts of a node on their way to tokens: in threads, and few long ones at a time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial

from dataplane.agent.settings import AgentSettings
from dataplane.agent.tokenization import Text
from dataplane.protocol.errors import BadRequestError, ContextLengthError, OverloadedError
from dataplane.protocol.messages import Generate

_WAITING_PER_PLACE = 8


class Tokenizing:
    """Tokenizes prompts. A long one takes seconds of a core and a hundred times its size in memory, so only
    `long_prompts_max` of them are worked on at once; short ones never wait for them.
    """

    def __init__(self, settings: AgentSettings) -> None:
        self._long_from = settings.long_prompt_chars
        self._places = asyncio.Semaphore(settings.long_prompts_max)
        self._waiting_max = _WAITING_PER_PLACE * settings.long_prompts_max
        self._waiting = 0

    async def tokenize(self, generate: Generate, text: Text, *, tokens_max: int) -> tuple[int, ...]:
        """The prompt's tokens, made off the loop.

        Raises:
            BadRequestError: the prompt is empty, tokens are unknown, or the chat template refuses it.
            ContextLengthError: it has more than `tokens_max` tokens.
            OverloadedError: it is long, and too many long ones wait.
        """
        text.check_tokens(generate.generated, "generated")
        if generate.messages is not None:
            chars = sum(len(message.content) for message in generate.messages)
            work, param = partial(text.encode_chat, generate.messages, tokens_max=tokens_max), "messages"
        elif generate.prompt is not None:
            chars = len(generate.prompt)
            work, param = partial(text.encode_text, generate.prompt, tokens_max=tokens_max), "prompt"
        else:
            return _given(generate.prompt_tokens or (), text, tokens_max)
        async with self._place(chars):
            tokens = await asyncio.to_thread(work)
        return _not_empty(tokens, param)

    @contextlib.asynccontextmanager
    async def _place(self, chars: int) -> AsyncIterator[None]:
        """A place for a prompt of so many characters; short ones need none."""
        if chars < self._long_from:
            yield
            return
        if self._places.locked() and self._waiting >= self._waiting_max:
            raise OverloadedError(f"{self._waiting} prompts of {self._long_from} characters or more wait, the limit")
        self._waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._places.release()


def _given(tokens: tuple[int, ...], text: Text, tokens_max: int) -> tuple[int, ...]:
    """A prompt that came as tokens. The loop looks at each, so there must not be too many."""
    if len(tokens) > tokens_max:
        raise ContextLengthError(
            f"the prompt has {len(tokens)} tokens; the model takes at most {tokens_max} here", param="prompt_tokens"
        )
    text.check_tokens(tokens, "prompt_tokens")
    return _not_empty(tokens, "prompt_tokens")


def _not_empty(tokens: tuple[int, ...], param: str) -> tuple[int, ...]:
    if not tokens:
        raise BadRequestError(f"{param} must hold at least one token", param=param)
    return tokens
