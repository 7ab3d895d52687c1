"""Long prompts of a node wait for each other; short prompts and streams do not wait for them."""

import asyncio
import threading
from typing import Any

import pytest

from dataplane.agent.prompts import Conversation, Prompt, PromptTokenizer
from dataplane.agent.templates.renderers import TemplateRenderers
from dataplane.agent.tokenization import WordTokenizer
from dataplane.protocol.errors import OverloadedError
from dataplane.protocol.messages import ChatMessage, Failed, Finished, Tool, ToolCall, ToolUse
from tests.dataplane.replay_node import PATIENCE_S, desired, generate, instance, running_node, settings
from tests.dataplane.streams import read
from tests.event_loop import asynchronous

LONG_CHARS = 1000
LONG = "tide " * 300
LIMITS = {"long_prompt_chars": LONG_CHARS, "long_prompts_max": 2}


class SteppedTokenizer(WordTokenizer):
    """Takes as long for a long prompt as the test wants."""

    def __init__(self) -> None:
        self._steps = threading.Semaphore(0)
        self._lock = threading.Lock()
        self.running = self.running_most = 0

    def step(self, prompts: int) -> None:
        """Let so many long prompts end."""
        self._steps.release(prompts)

    def encode_text(
        self, prompt: str, *, tokens_max: int, special: bool = True, param: str = "prompt"
    ) -> tuple[int, ...]:
        if len(prompt) >= LONG_CHARS:
            with self._lock:
                self.running += 1
                self.running_most = max(self.running_most, self.running)
            assert self._steps.acquire(timeout=PATIENCE_S)
            with self._lock:
                self.running -= 1
        return super().encode_text(prompt, tokens_max=tokens_max, special=special, param=param)


@pytest.mark.parametrize(
    ("message", "others"),
    [
        (ChatMessage(role="user", content=LONG), {}),
        (ChatMessage(role="assistant", reasoning=LONG), {}),
        (ChatMessage(role="assistant", tool_calls=(ToolCall(id="1", name="a", arguments=LONG),)), {}),
        (ChatMessage(role="user"), {"tools": ToolUse(tools=(Tool(name="a", description=LONG),))}),
        (ChatMessage(role="user"), {"template": {"text": LONG}}),
    ],
)
def test_a_conversation_is_as_long_as_all_that_its_template_may_write(
    message: ChatMessage, others: dict[str, Any]
) -> None:
    chars = Conversation.of(generate(prompt=None, messages=(message,), **others)).chars
    assert len(LONG) <= chars <= len(LONG) + 100


@asynchronous
async def test_streams_of_the_node_go_on_while_long_prompts_are_tokenized() -> None:
    tokenizer = SteppedTokenizer()
    uncached = settings(**LIMITS, prefix_cache=False)
    async with running_node(uncached, load_tokenizer=lambda *_: tokenizer) as node:
        await node.hold(1, instance())
        long = [asyncio.create_task(read(node, generate(f"long{n}", prompt=LONG))) for n in range(4)]
        await node.until(lambda: tokenizer.running == 2)
        for number in range(20):
            events = await read(node, generate(f"short{number}"))
            assert events[-1] == Finished(finish_reason="length", prompt_tokens=3, completion_tokens=20)
        assert not any(reading.done() for reading in long)
        tokenizer.step(4)
        for reading in long:
            finished = (await reading)[-1]
            assert isinstance(finished, Finished)
            assert (finished.prompt_tokens, finished.completion_tokens) == (300, 20)
        assert tokenizer.running_most == 2


@asynchronous
async def test_too_many_long_prompts_are_refused_and_may_go_elsewhere() -> None:
    tokenizer = SteppedTokenizer()
    prompts = PromptTokenizer(settings(**LIMITS), TemplateRenderers(processes_max=1, time_max_s=5.0))

    def one() -> "asyncio.Task[Prompt]":
        return asyncio.create_task(prompts.tokenize(generate(prompt=LONG), tokenizer, tokens_max=4096))

    admitted = [one() for _ in range(2 + 16)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="16 prompts of 1000 characters or more wait"):
        await one()
    admitted[-1].cancel()
    await asyncio.wait(admitted[-1:])
    again = one()
    tokenizer.step(18)
    assert {len((await task).tokens) for task in (*admitted[:-1], again)} == {300}
    assert tokenizer.running_most == 2


@asynchronous
async def test_the_length_of_a_prompt_of_tokens_is_checked_first() -> None:
    async with running_node() as node:
        await node.hold(1, instance())
        [failed] = await read(node, generate(prompt=None, prompt_tokens=(99_999,) * 5000))
        assert isinstance(failed, Failed)
        assert (failed.code, failed.param) == ("context_length_exceeded", "prompt_tokens")


@asynchronous
async def test_a_model_with_a_parser_that_the_node_does_not_know_fails_to_load() -> None:
    async with running_node(settings(load_retry_s=60.0)) as node:
        node.agent.apply(desired(1, instance(tool_parser="bark")))
        await node.until(lambda: node.states() == {"i1": "failed"})
        [report] = node.agent.reports()
        assert "tool_parser must be one of hermes" in (report.error or "")
        await node.hold(3, instance("i2", tool_parser="hermes"))
        node.agent.apply(desired(4, instance("i2", tool_parser="mistral")))
        assert node.states() == {"i2": "ready"}, "another parser applies to the next request, without a load"
