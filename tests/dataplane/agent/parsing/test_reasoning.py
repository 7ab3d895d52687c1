"""Reasoning and the rest of an answer: opened by the model, by the prompt or by nobody; in pieces of any size."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.agent.parsing.families import REASONING_FORMATS
from dataplane.agent.parsing.reasoning import ReasoningParser


def parse(name: str, chunks: Sequence[str], *, opened: bool = False) -> tuple[str, str]:
    parser = ReasoningParser(REASONING_FORMATS[name], opened=opened)
    parts = [*(parser.feed(chunk) for chunk in chunks), parser.finish()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@pytest.mark.parametrize(
    ("name", "text", "opened", "expected"),
    [
        ("qwen3", "<think>\nLet me see.\n</think>\n\nYes.", False, ("Let me see.", "Yes.")),
        ("qwen3", "Let me see.\n</think>\n\nYes.", True, ("Let me see.", "Yes.")),
        ("qwen3", "<think>Twice.</think>Yes.", True, ("Twice.", "Yes.")),
        ("qwen3", "Yes.", False, ("", "Yes.")),
        ("qwen3", "  <b>Yes</b>", False, ("", "  <b>Yes</b>")),
        ("qwen3", "<think>\n\n</think>\n\nYes.", False, ("", "Yes.")),
        ("qwen3", "<think>a </ b </thin c", False, ("a </ b </thin c", "")),
        ("qwen3", "Yes. <think>no</think>", False, ("", "Yes. <think>no</think>")),
        ("qwen3", "<thi", False, ("", "<thi")),
        ("qwen3", "<think>a</think>b</think>", False, ("a", "b</think>")),
        ("deepseek_r1", "Let me see.</think>Yes.", False, ("Let me see.", "Yes.")),
        ("mistral", "[THINK]Let me see.[/THINK]Yes.", False, ("Let me see.", "Yes.")),
    ],
)
def test_text_is_divided_whole_and_letter_by_letter(
    name: str, text: str, opened: bool, expected: tuple[str, str]
) -> None:
    assert parse(name, [text], opened=opened) == expected
    assert parse(name, list(text), opened=opened) == expected


@given(
    parts=st.lists(st.sampled_from(["<think>", "</think>", "<", "/", "think>", " ", "\n", "a", "é"]), max_size=12),
    opened=st.booleans(),
    data=st.data(),
)
def test_no_chunking_changes_anything(parts: list[str], opened: bool, data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))) | {0, len(text)})
    chunks = [text[start:end] for start, end in pairwise(cuts)]
    assert parse("qwen3", chunks, opened=opened) == parse("qwen3", [text], opened=opened)
