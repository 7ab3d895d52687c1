"""The answer of a stream that is cut after any token and continued on another node: each piece of it comes once."""

import sys
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import pytest

from dataplane.agent.answers import answer_text
from dataplane.agent.parsing.answer_text import Parsed
from dataplane.agent.parsing.families import families_of
from dataplane.agent.tokenization import WordTokenizer
from dataplane.protocol.messages import ChatMessage, Generate, Sampling, Tool, ToolCallDelta, ToolUse
from tests.dataplane.replay_node import generate, model

SPECIALS = {256: "[TOOL_CALLS]", 257: "[ARGS]", 258: "<|python_tag|>"}
ASKED = (ChatMessage(role="user", content="Is it raining?"),)
TOOLS = ToolUse(tools=(Tool(name="weather"), Tool(name="time")))
CALL = '{"name": "weather", "arguments": {"city": "Kyōto"}}'


class SpecialBytes(WordTokenizer):
    """One token a byte, and special tokens, which its text leaves out."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_id for token_id in token_ids if token_id < 256).decode(errors="replace")

    def piece(self, token_id: int) -> str | None:
        return chr(token_id) if token_id < 128 else None

    def special_id(self, token: str) -> int | None:
        return next((token_id for token_id, text in SPECIALS.items() if text == token), None)


def tokens(text: str) -> list[int]:
    for token_id, special in SPECIALS.items():
        text = text.replace(special, chr(0xE000 + token_id))
    return [t for char in text for t in ([ord(char) - 0xE000] if "\ue000" <= char < "\uf000" else char.encode())]


def request(*, stop: tuple[str, ...] = (), tools: ToolUse | None = TOOLS, sent_chars: int = 0) -> Generate:
    return generate(prompt=None, messages=ASKED, tools=tools, sampling=Sampling(stop=stop), sent_chars=sent_chars)


def pieces(family: str, text: str, cut: int | None = None, **changes: object) -> tuple[Parsed, int]:
    """The whole answer and its reasoning tokens, of one node or of two."""
    families = families_of(model(tool_parser=family, reasoning_parser="qwen3"), None)
    made = tokens(text)
    whole = Parsed()
    answer = answer_text(request(**changes), SpecialBytes(), families, "")  # type: ignore[arg-type]
    for at, token_id in enumerate(made):
        if at == cut:
            answer = answer_text(request(sent_chars=len(whole.content), **changes), SpecialBytes(), families, "")  # type: ignore[arg-type]
            assert not answer.resume(made[:cut]), "all of it had been sent"
        whole += answer.feed(token_id)
    return whole + answer.finish(), answer.reasoning_tokens


def merged(deltas: Sequence[ToolCallDelta]) -> list[tuple[str | None, str]]:
    calls: list[tuple[str | None, str]] = []
    for delta in deltas:
        if delta.name is not None:
            calls.append((delta.name, ""))
        calls[delta.index] = (calls[delta.index][0], calls[delta.index][1] + delta.arguments)
    return calls


ANSWERS = [
    ("hermes", f"<think>Let me\nsee.</think>\n\nI look.\n<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>"),
    ("hermes", "Tide 🌊 <tool_call>no</tool_call> <tool_"),
    ("mistral", f"Well. [TOOL_CALLS][{CALL}]"),
    ("mistral", 'Well.[TOOL_CALLS]weather[ARGS]{"city": "Kyōto"}[TOOL_CALLS]time[ARGS]{}'),
    ("llama3_json", f"<think>é</think><|python_tag|>{CALL.replace('arguments', 'parameters')}"),
    ("json", CALL),
]


@pytest.mark.parametrize(("family", "text"), ANSWERS)
def test_a_stream_cut_at_any_token_goes_on_as_if_it_had_not_been(family: str, text: str) -> None:
    whole, reasoning_tokens = pieces(family, text)
    for cut in range(len(tokens(text)) + 1):
        again, counted = pieces(family, text, cut)
        assert (again.content, again.reasoning, merged(again.tool_calls), counted) == (
            whole.content,
            whole.reasoning,
            merged(whole.tool_calls),
            reasoning_tokens,
        )


def test_what_is_found_in_an_answer() -> None:
    whole, reasoning_tokens = pieces(*ANSWERS[0])
    assert (whole.content, whole.reasoning) == ("I look.", "Let me\nsee.")
    assert merged(whole.tool_calls) == [("weather", '{"city": "Kyōto"}')] * 2
    assert reasoning_tokens == len("Let me\nsee.</think") + 1
    assert pieces(*ANSWERS[2])[0].content == "Well."


def test_tools_are_looked_for_only_where_they_may_be_called() -> None:
    for tools in (None, ToolUse(tools=TOOLS.tools, choice="none")):
        whole, _ = pieces("hermes", f"<think>a</think><tool_call>{CALL}</tool_call>", tools=tools)
        assert (whole.content, whole.reasoning) == (f"<tool_call>{CALL}</tool_call>", "a")


def test_a_plain_prompt_has_neither_reasoning_nor_calls() -> None:
    answer = answer_text(generate(), SpecialBytes(), families_of(model(reasoning_parser="deepseek_r1"), None), "")
    assert "".join(answer.feed(token_id).content for token_id in b"a</think>b") == "a</think>b"


def test_a_stop_string_ends_reasoning_and_calls_too() -> None:
    whole, _ = pieces("hermes", "<think>one END two</think>three", stop=("END",))
    assert (whole.content, whole.reasoning) == ("", "one ")
    whole, _ = pieces("hermes", f"a <tool_call>{CALL}</tool_call>", stop=("Ky",))
    assert (whole.content, merged(whole.tool_calls)) == ("a", [("weather", '{"city": "')])
    whole, _ = pieces("hermes", "a <tool_call>b END c", stop=("END",))
    assert whole.content == "a <tool_call>b "


def test_the_first_tokens_are_counted_from_the_beginning_of_the_answer() -> None:
    made, sampling = tokens("a END b END c END"), Sampling(stop=("END",), min_tokens=8)
    for cut in range(len(made)):  # continued on another node
        asked = msgspec.structs.replace(request(), sampling=sampling)
        answer = answer_text(asked, SpecialBytes(), families_of(model(), None), "")
        whole = answer.resume(made[:cut])
        whole += answer.feed_all(made[cut:])[0]
        assert (answer.stopped, whole.content) == (True, "a END b ")


def chars_looked_at(run: Callable[[], object]) -> int:
    """Characters of all texts of which methods are called while it runs."""
    count = 0

    def note(_frame: object, event: str, called: object) -> None:
        nonlocal count
        text = getattr(called, "__self__", None) if event == "c_call" else None
        count += len(text) if isinstance(text, str) else 0

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("family", ["hermes", "mistral", "json"])
@pytest.mark.parametrize("reasoning", ["none", "qwen3"])
@pytest.mark.parametrize(
    "begin", ["", "a", "<think>", "<think>a", "<think>a</think>", "<tool_call>", '<tool_call>{"id": "', "[TOOL_CALLS]"]
)
def test_many_blanks_are_looked_at_once(family: str, reasoning: str, begin: str) -> None:
    def answer(blanks: int) -> None:
        families = families_of(model(tool_parser=family, reasoning_parser=reasoning), None)
        text = answer_text(request(), SpecialBytes(), families, "")
        for token_id in tokens(begin + " \n" * blanks):
            text.feed(token_id)
        text.finish()

    few, many = (chars_looked_at(partial(answer, blanks)) for blanks in (500, 2000))
    assert 1500 < many < 5 * few


ONE_CALL = f"a <tool_call>{CALL}</tool_call>"


@pytest.mark.parametrize(
    ("family", "text", "stop", "reason"),
    [
        ("hermes", ONE_CALL, (), "tool_calls"),
        ("hermes", ONE_CALL, ("</tool_call>",), "tool_calls"),
        ("hermes", ONE_CALL, ("Ky",), "stop"),
        ("hermes", ONE_CALL.removesuffix("}}</tool_call>"), (), "stop"),
        ("hermes", ONE_CALL.removesuffix("}</tool_call>"), (), "tool_calls"),
        ("hermes", f"{ONE_CALL}<tool_call>{CALL.replace('Ky', 'Na')}", ("Na",), "stop"),
        ("hermes", f"{ONE_CALL} Na", (" Na",), "tool_calls"),
        ("hermes", f"{ONE_CALL} <tool_call>no", (), "tool_calls"),
        ("hermes", 'a <tool_call>{"name": "weather"', (), "stop"),
        ("mistral", 'a [TOOL_CALLS]weather[ARGS]{"city": "Ky', (), "stop"),
        ("mistral", 'a [TOOL_CALLS]weather[ARGS]{"city": "Ky"}', (), "tool_calls"),
    ],
)
def test_an_answer_ends_with_a_call_only_where_its_last_call_was_not_cut(
    family: str, text: str, stop: tuple[str, ...], reason: str
) -> None:
    made, families = tokens(text), families_of(model(tool_parser=family, reasoning_parser="none"), None)
    for cut in (0, len(made) // 2, len(made)):  # continued on another node
        answer = answer_text(request(stop=stop), SpecialBytes(), families, "")
        answer.resume(made[:cut])
        answer.feed_all(made[cut:])
        answer.finish()
        assert (answer.finish_reason("stop"), answer.finish_reason("length")) == (reason, "length")


def test_the_answer_of_one_call_stops_behind_it() -> None:
    families = families_of(model(tool_parser="hermes"), None)
    answer = answer_text(request(tools=ToolUse(tools=TOOLS.tools, parallel=False)), SpecialBytes(), families, "")
    fed = 0
    for token_id in tokens(f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>"):
        if answer.stopped:
            break
        answer.feed(token_id)
        fed += 1
    assert fed == len(f"<tool_call>{CALL}".encode())
    assert (answer.finish_reason("stop"), answer.finish_reason("length")) == ("tool_calls", "length")


def test_reasoning_that_the_prompt_opened() -> None:
    families = families_of(model(reasoning_parser="qwen3"), None)
    answer = answer_text(request(), SpecialBytes(), families, "<|im_start|>assistant\n<think>\n")
    parsed = Parsed()
    for token_id in b"Hm.\n</think>\n\nYes.":
        parsed += answer.feed(token_id)
    assert parsed + answer.finish() == Parsed("Yes.", "Hm.")
