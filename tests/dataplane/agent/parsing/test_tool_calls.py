"""Tool calls in every family's text: whole, in pieces of any size, malformed, cut, one or several."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dataplane.agent.parsing import tool_calls
from dataplane.agent.parsing.calls import JsonCallReader, Piece
from dataplane.agent.parsing.families import TOOL_FAMILIES
from dataplane.agent.parsing.tool_calls import REREAD_CHARS_MAX, ToolCallParser
from dataplane.protocol.messages import ToolCallDelta

NAMES = frozenset({"weather", "time"})
ARGUMENTS = '{"city": "Kyōto \\"}{\\"", "days": [1, {"a": null}]}'

Parsed = tuple[str, list[tuple[str, str]]]
"""The content, and the name and arguments of each call."""


def pieces(text: str, cuts: Iterable[int]) -> list[str]:
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def parse(family: str, chunks: Sequence[str], *, parallel: bool = True, special: Sequence[str] = ()) -> Parsed:
    parser = ToolCallParser(TOOL_FAMILIES[family].form, NAMES, parallel=parallel, special=frozenset(special))
    content, deltas = "", list[ToolCallDelta]()
    for chunk in chunks:
        if parser.stopped:
            break
        new, calls = parser.feed(chunk)
        content, deltas = content + new, [*deltas, *calls]
    new, calls = parser.finish()
    return content + new, joined([*deltas, *calls])


def joined(deltas: Iterable[ToolCallDelta]) -> list[tuple[str, str]]:
    """The calls that deltas make; a name comes once, before its arguments, and calls one after the other."""
    calls: list[tuple[str, str]] = []
    for delta in deltas:
        if delta.name is not None:
            assert delta.index == len(calls)
            calls.append((delta.name, delta.arguments))
        else:
            assert delta.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    return calls


CALL = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
LLAMA_CALL = f'{{"name": "weather", "parameters": {ARGUMENTS}}}'
ONE, TWO = [("weather", ARGUMENTS)], [("weather", ARGUMENTS), ("time", "{}")]
SEP = "<\uff5ctool▁sep\uff5c>"
DEEPSEEK = f"<\uff5ctool▁call▁begin\uff5c>function{SEP}weather\n```json\n{ARGUMENTS}\n```<\uff5ctool▁call▁end\uff5c>"
DEEPSEEK_31 = f"<\uff5ctool▁call▁begin\uff5c>time{SEP}{{}}<\uff5ctool▁call▁end\uff5c>"

HALF_IN_NAME = r'<tool_call>{"name": "\ud83d", "arguments": {}}</tool_call>'
HALF_IN_ARGUMENTS = r'<tool_call>{"name": "weather", "arguments": "{\"city\": \"\ud83d\"}"}</tool_call>'
"""Half of a surrogate pair, where text is read as JSON and would be sent as it is read."""

CASES: list[tuple[str, str, Parsed]] = [
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", ("", ONE)),
    ("hermes", f"I look.\n\n<tool_call>{CALL}</tool_call>\n", ("I look.", ONE)),
    ("hermes", f'<tool_call>{CALL}</tool_call>\n<tool_call>\n{{"name": "time"}}</tool_call>', ("", TWO)),
    ("hermes", f'<tool_call>{{"arguments": {ARGUMENTS}, "name": "weather"}}</tool_call>', ("", ONE)),
    ("hermes", f'<tool_call>{{"name": "weather", "arguments": {json.dumps(ARGUMENTS)}}}</tool_call>', ("", ONE)),
    ("hermes", '<tool_call>{"name": "time", "arguments": null}</tool_call>', ("", [("time", "{}")])),
    ("hermes", f'<tool_call>{{"name": "weather", "arguments": {ARGUMENTS}</tool_call>', ("", ONE)),
    ("hermes", f"<tool_call>{CALL}}}</tool_call> Done.", ("Done.", ONE)),
    ("hermes", "a < b, <tool or <tool_calls>", ("a < b, <tool or <tool_calls>", [])),
    ("hermes", "<tool_call>weather()</tool_call>", ("<tool_call>weather()</tool_call>", [])),
    ("hermes", '<tool_call>{"name": 3}</tool_call>', ('<tool_call>{"name": 3}</tool_call>', [])),
    ("hermes", f"x <tool_call>{{]</tool_call>\n<tool_call>{CALL}</tool_call>", ("x <tool_call>{]</tool_call>", ONE)),
    ("hermes", '<tool_call>{"name": "weather", "arg', ('<tool_call>{"name": "weather", "arg', [])),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"c', ("", [("weather", '{"c')])),
    ("hermes", "  plain text \n", ("  plain text \n", [])),
    ("hermes", HALF_IN_NAME, (HALF_IN_NAME, [])),
    ("hermes", CALL.join(("<tool_call>", "</tool_call>")).replace("}}", '}, "\\ud83d": 1}'), ("", ONE)),
    ("hermes", HALF_IN_ARGUMENTS, (HALF_IN_ARGUMENTS, [])),
    ("hermes", f'<tool_call>{{"name": "weather", "arguments": {ARGUMENTS}, "parameters": {{"b": 2}}}}', ("", ONE)),
    ("hermes", f'<tool_call>{{"arguments": {ARGUMENTS}, "parameters": {{"b": 2}}, "name": "weather"}}', ("", ONE)),
    ("hermes", f'<tool_call>{{"id": [<tool_call>{CALL}]}}', ('<tool_call>{"id": []}', ONE)),
    ("llama3_json", LLAMA_CALL, ("", ONE)),
    ("llama3_json", f"<|python_tag|>{LLAMA_CALL}", ("", ONE)),
    ("llama3_json", f'<|python_tag|>{LLAMA_CALL}; {{"name": "time", "parameters": {{}}}}', ("", TWO)),
    ("llama3_json", f'[{LLAMA_CALL}, {{"name": "time", "parameters": {{}}}}]', ("", TWO)),
    ("llama3_json", f"\n {LLAMA_CALL}\n", ("", ONE)),
    ("llama3_json", '{"name": "Ada", "age": 36}', ('{"name": "Ada", "age": 36}', [])),
    ("llama3_json", '{"city": "Kyoto"}', ('{"city": "Kyoto"}', [])),
    ("llama3_json", "[1, 2]", ("[1, 2]", [])),
    ("llama3_json", '<|python_tag|>search.call(query="x")', ('search.call(query="x")', [])),
    ("llama3_json", f"Sure. {LLAMA_CALL}", (f"Sure. {LLAMA_CALL}", [])),
    ("mistral", f"[TOOL_CALLS][{CALL}]", ("", ONE)),
    ("mistral", f'[TOOL_CALLS] [{CALL}, {{"name": "time", "arguments": {{}}, "id": "Abc123xyz"}}]', ("", TWO)),
    ("mistral", f"Well. [TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]time{{}}", ("Well.", TWO)),
    ("mistral", f"[TOOL_CALLS]weather[CALL_ID]abc123XYZ[ARGS]{ARGUMENTS}", ("", ONE)),
    ("mistral", "[TOOL_CALLS]no call at all", ("no call at all", [])),
    ("mistral", "[TOOL_CALLS][oops]", ("[oops]", [])),
    ("phi4_mini_json", f"<|tool_call|>[{CALL}]<|/tool_call|>", ("", ONE)),
    ("deepseek_v3", f"<\uff5ctool▁calls▁begin\uff5c>{DEEPSEEK}\n{DEEPSEEK_31}<\uff5ctool▁calls▁end\uff5c>", ("", TWO)),
    ("json", CALL, ("", ONE)),
    ("json", f"```json\n{CALL}\n```", ("", ONE)),
    ("json", f'I call:\n```json\n[{CALL}, {{"name": "time", "arguments": {{}}}}]\n```', ("I call:", TWO)),
    ("json", '```json\n{"name": "Ada"}\n```', ('```json\n{"name": "Ada"}\n```', [])),
    ("json", "Plain.", ("Plain.", [])),
]
SPECIAL = ("<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")


@pytest.mark.parametrize(("family", "text", "expected"), CASES)
def test_a_text_gives_its_content_and_calls_whole_and_letter_by_letter(
    family: str, text: str, expected: Parsed
) -> None:
    assert parse(family, [text], special=SPECIAL) == expected
    assert parse(family, list(text), special=SPECIAL) == expected


@given(case=st.sampled_from(CASES), cuts=st.lists(st.integers(0, 150), max_size=12))
def test_no_chunking_changes_anything(case: tuple[str, str, Parsed], cuts: list[int]) -> None:
    family, text, expected = case
    assert parse(family, pieces(text, cuts), special=SPECIAL) == expected


@given(
    family=st.sampled_from(sorted(TOOL_FAMILIES)),
    parts=st.lists(
        st.one_of(
            st.sampled_from([
                "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|tool_call|>", "```json",
                '{"name": "weather", ', '"arguments": ', CALL, "{", "}", "[", "]", ", ", ";", "weather", '"', "\\",
                "\n",
            ]),
            st.text(max_size=4),
        ),
        max_size=12,
    ),
    cuts=st.lists(st.integers(0, 100), max_size=8),
    reread_max=st.sampled_from([0, 5, REREAD_CHARS_MAX]),
)  # fmt: skip
@example(family="mistral", parts=["[TOOL_CALLS]no call{", f"[TOOL_CALLS]weather{ARGUMENTS}"], cuts=[20], reread_max=0)
@example(
    family="mistral", parts=["[TOOL_CALLS]", "x" * 300, f"[TOOL_CALLS]weather{ARGUMENTS}"], cuts=[290], reread_max=0
)
def test_any_text_gives_the_same_whatever_its_pieces(
    family: str, parts: list[str], cuts: list[int], reread_max: int
) -> None:
    text = "".join(parts)
    with patch.object(tool_calls, "REREAD_CHARS_MAX", reread_max):
        whole = parse(family, [text])
        assert parse(family, pieces(text, cuts)) == whole
    if not whole[1]:
        assert whole[0] == text, "text without a call is content, all of it"


def test_arguments_come_as_they_are_written_and_only_after_the_name() -> None:
    parser = ToolCallParser(TOOL_FAMILIES["hermes"].form, NAMES, parallel=True)
    seen = [
        parser.feed(piece)[1] for piece in ('<tool_call>{"name": "wea', 'ther", "arguments"', ': {"ci', 'ty": 1', "}}")
    ]
    assert seen == [
        (),
        (),
        (ToolCallDelta(index=0, name="weather"), ToolCallDelta(index=0, arguments='{"ci')),
        (ToolCallDelta(index=0, arguments='ty": 1'),),
        (ToolCallDelta(index=0, arguments="}"),),
    ]


@pytest.mark.parametrize("family", sorted(TOOL_FAMILIES))
def test_a_family_reads_what_it_writes(family: str) -> None:
    text = TOOL_FAMILIES[family].syntax.text("weather", ARGUMENTS)
    assert parse(family, [text]) == ("", ONE)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", f"Look.<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>"),
        ("mistral", f"Look.[TOOL_CALLS][{CALL}, {CALL}]"),
    ],
)
def test_without_parallel_calls_the_answer_ends_with_the_first(family: str, text: str) -> None:
    assert parse(family, list(text), parallel=False) == ("Look.", ONE)


@pytest.mark.parametrize("family", ["hermes", "json"])
def test_calls_in_calls_are_not_all_read_to_their_ends(family: str) -> None:
    """A client can make a model write them. Each fails at its end, as it has no name."""
    (opening,) = TOOL_FAMILIES[family].form.openings
    count = 2_000
    text = f'{opening}{{"arguments":[' * count + "]}" * count
    read = 0

    class Counting(JsonCallReader):
        def feed(self, text: str) -> list[Piece]:
            nonlocal read
            pieces = super().feed(text)
            read += len(text) - len(self.rest)
            return pieces

    form = replace(TOOL_FAMILIES[family].form, reader=lambda accepts, _: Counting(accepts))
    parser = ToolCallParser(form, NAMES, parallel=True)
    content, calls = parser.feed(text)
    assert (content + parser.finish()[0], calls) == (text, ())
    assert read < len(text) + 2 * REREAD_CHARS_MAX
