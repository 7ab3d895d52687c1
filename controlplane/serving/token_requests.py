"""The bodies of `/tokenize` and `/detokenize`, with vLLM's fields, and the question to a node that each of them is."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from controlplane.serving.openai_fields import JsonObject, RequestBody, Text, TokenId, fault, unsupported
from controlplane.serving.openai_messages import Messages, Tools, chat_tools, check_conversation
from dataplane.protocol.limits import QUESTION_TOKENS_MAX
from dataplane.protocol.messages import Detokenize, Tokenize

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"


def _only_false(value: Any) -> Any:
    if value:
        raise unsupported("the last message is never continued")
    return value


class TokenizeRequest(RequestBody):
    """`POST /tokenize`: a plain `prompt`, or the `messages` of a conversation."""

    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(
        None, description="those that the checkpoint puts around a text; default: only around a plain prompt"
    )
    return_token_strs: bool | None = Field(None, description="also each token as the vocabulary spells it")
    add_generation_prompt: bool = Field(True, description="a conversation's text ends where the answer begins")
    continue_final_message: Annotated[Literal[False] | None, BeforeValidator(_only_false)] = None
    tools: Tools | None = None
    chat_template_kwargs: JsonObject | None = Field(None, description="variables of the chat template")

    @model_validator(mode="after")
    def _one_text(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise fault("prompt", "exactly one of prompt and messages must be given")
        if self.prompt is not None and self.tools:
            raise fault("tools", "tools belong to messages")
        check_conversation(self.messages or [])
        chat_tools(self.tools or [], None, parallel=True)
        return self

    def question(self) -> Tokenize:
        """The question, for an instance that is still to be chosen."""
        uses = chat_tools(self.tools or [], None, parallel=True)
        plain = self.prompt is not None
        return Tokenize(
            instance_id="",
            model=self.model,
            prompt=self.prompt,
            messages=None if self.messages is None else tuple(message.flattened() for message in self.messages),
            tools=() if uses is None else uses.tools,
            template=self.chat_template_kwargs or {},
            special_tokens=plain if self.add_special_tokens is None else self.add_special_tokens,
            answer=self.add_generation_prompt,
            spelled=bool(self.return_token_strs),
        )


class DetokenizeRequest(RequestBody):
    """`POST /detokenize`."""

    tokens: Annotated[list[TokenId], Field(max_length=QUESTION_TOKENS_MAX, fail_fast=True)]

    def question(self) -> Detokenize:
        """The question, for an instance that is still to be chosen."""
        return Detokenize(instance_id="", model=self.model, tokens=tuple(self.tokens))
