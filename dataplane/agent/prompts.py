"""Tokenizes the prompts of a node in threads, few long ones at a time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial

from dataplane.agent.settings import AgentSettings
from dataplane.agent.tokenization import Tokenizer
from dataplane.protocol.errors import BadRequestError, ContextLengthError, OverloadedError
from dataplane.protocol.messages import Generate

_WAITING_PER_LONG_PROMPT = 8


class PromptTokenizer:
    """Tokenizes prompts. A long one takes seconds of a core and a hundred times its size in memory, so at most
    `long_prompts_max` of them run at once; short ones never wait for them.
    """

    def __init__(self, settings: AgentSettings) -> None:
        self._long_from = settings.long_prompt_chars
        self._running = asyncio.Semaphore(settings.long_prompts_max)
        self._waiting_max = _WAITING_PER_LONG_PROMPT * settings.long_prompts_max
        self._waiting = 0

    async def tokenize(self, generate: Generate, tokenizer: Tokenizer, *, tokens_max: int) -> tuple[int, ...]:
        """The prompt's tokens.

        Raises:
            BadRequestError: the prompt is empty, tokens are unknown, or the chat template refuses it.
            ContextLengthError: it has more than `tokens_max` tokens.
            OverloadedError: it is long, and too many long prompts wait.
        """
        tokenizer.check_tokens(generate.generated, "generated")
        tokenizer.check_tokens([token_id for token_id, _ in generate.sampling.logit_bias], "logit_bias")
        if generate.messages is not None:
            chars = sum(len(message.content) for message in generate.messages)
            work, param = partial(tokenizer.encode_chat, generate.messages, tokens_max=tokens_max), "messages"
        elif generate.prompt is not None:
            chars = len(generate.prompt)
            work, param = partial(tokenizer.encode_text, generate.prompt, tokens_max=tokens_max), "prompt"
        else:
            return _checked(generate.prompt_tokens or (), tokenizer, tokens_max)
        async with self._long_prompt(chars):
            tokens = await asyncio.to_thread(work)
        return _not_empty(tokens, param)

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
