"""The tokens of a text and the text of tokens, as clients ask for them apart from any answer."""

import asyncio

from dataplane.agent.parsing.families import families_of
from dataplane.agent.prompts import Conversation, PromptTokenizer
from dataplane.agent.tokenization import Tokenizer
from dataplane.protocol.errors import BadRequestError
from dataplane.protocol.limits import QUESTION_TOKENS_MAX
from dataplane.protocol.messages import Detokenize, Detokenized, ModelSpec, Tokenize, Tokenized


async def tokenized(
    asked: Tokenize, prompts: PromptTokenizer, tokenizer: Tokenizer, model: ModelSpec, *, context_tokens: int
) -> Tokenized:
    """The tokens of a prompt or conversation.

    Raises:
        BadRequestError: neither or both are given, or the chat template refuses the conversation.
        ChatTemplateError: the chat template is at fault.
        ContextLengthError: the text has more than `QUESTION_TOKENS_MAX` tokens.
        OverloadedError: the text is long, and too many long ones wait.
    """
    if (asked.messages is None) == (asked.prompt is None):
        raise BadRequestError("exactly one of messages and prompt must be set", param="messages")
    text, param, special = asked.prompt or "", "prompt", asked.special_tokens
    if asked.messages is not None:
        conversation = Conversation(
            messages=asked.messages, tools=asked.tools, variables=asked.template, answer=asked.answer
        )
        family = families_of(model, tokenizer.template).tools
        text, plain = await prompts.render(conversation, tokenizer.template, family)
        param, special = "messages", special or plain
    tokens = await prompts.encode(text, tokenizer, tokens_max=QUESTION_TOKENS_MAX, special=special, param=param)
    spelled = tuple(map(tokenizer.token_text, tokens)) if asked.spelled else ()
    return Tokenized(tokens=tokens, context_tokens=context_tokens, spelled=spelled)


async def detokenized(asked: Detokenize, tokenizer: Tokenizer) -> Detokenized:
    """The text of tokens.

    Raises:
        BadRequestError: there are more than `QUESTION_TOKENS_MAX`, or one is not in the vocabulary.
    """
    if len(asked.tokens) > QUESTION_TOKENS_MAX:
        raise BadRequestError(
            f"there are {len(asked.tokens)} tokens; {QUESTION_TOKENS_MAX} is the limit", param="tokens"
        )
    tokenizer.check_tokens(asked.tokens, "tokens")
    return Detokenized(text=await asyncio.to_thread(tokenizer.whole_text, asked.tokens))
