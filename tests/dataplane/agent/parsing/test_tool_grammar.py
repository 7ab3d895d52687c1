"""Grammars of calls in every family's syntax: what they accept is a call by its schema."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dataplane.agent.parsing.families import TOOL_FAMILIES
from dataplane.agent.parsing.tool_calls import ToolCallParser
from dataplane.agent.parsing.tool_grammar import CallGrammar
from dataplane.protocol.messages import Constraint, Tool, ToolUse

pytest.importorskip("llguidance", reason="install the node extra")

from dataplane.constraints.compiler import compile_grammar
from dataplane.constraints.tokens import TokenTable

SPECIAL = ("<s>", "</s>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
"""As Qwen's tokenizers have them: added, and no special tokens."""
CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"type": "string"}},
}
TOOLS = (Tool(name="weather"), Tool(name="time"))
GOOD, BAD = '{"city": "Kyōto"}', '{"town": "Kyōto"}'

Accepts = Callable[..., bool]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, TokenTable]:
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens([AddedToken(marker, special=False) for marker in MARKERS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 257}))
    return tokenizer, TokenTable(folder)


@pytest.fixture
def accepts(tokenizer: tuple[Tokenizer, TokenTable]) -> Accepts:
    """Whether a text is an answer by a grammar, all of it."""
    tokens, table = tokenizer

    def accepts(grammar: str, text: str, **reasoning: str) -> bool:
        matcher = compile_grammar(Constraint(kind="grammar", definition=grammar, **reasoning), table).deep_copy()
        ids = tokens.encode(text, add_special_tokens=False).ids
        return all(matcher.consume_token(token_id) for token_id in ids) and bool(matcher.is_accepting())

    return accepts


def calls(family: str, table: TokenTable, *, parallel: bool = True) -> CallGrammar:
    return CallGrammar(
        syntax=TOOL_FAMILIES[family].syntax_for(table.added),
        tools=TOOLS,
        schemas=(CITY, {}),
        added=table.added,
        parallel=parallel,
    )


@pytest.mark.parametrize("family", sorted(TOOL_FAMILIES))
def test_calls_are_forced_and_hold_to_their_schemas(
    family: str, accepts: Accepts, tokenizer: tuple[Tokenizer, TokenTable]
) -> None:
    grammar = calls(family, tokenizer[1])
    syntax = grammar.syntax
    forced = grammar.forced()
    assert accepts(forced, syntax.text("weather", GOOD))
    assert accepts(forced, syntax.text("time", '{"zone": [1]}'))
    for wrong in (syntax.text("weather", BAD), syntax.text("rain", GOOD), syntax.text("time", "[]"), "Hello.", ""):
        assert not accepts(forced, wrong), wrong


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("family", sorted(TOOL_FAMILIES))
def test_several_calls_only_where_they_are_wanted(
    family: str, parallel: bool, accepts: Accepts, tokenizer: tuple[Tokenizer, TokenTable]
) -> None:
    grammar = calls(family, tokenizer[1], parallel=parallel)
    syntax = grammar.syntax
    one = syntax.text("weather", GOOD)
    if syntax.between is None:
        two = f"{one}\n{one}"
    else:
        call = one.removeprefix(syntax.opening + syntax.lead).removesuffix(syntax.closing)
        two = f"{syntax.opening}{syntax.lead}{call}{syntax.between}{call}{syntax.closing}"
    assert accepts(grammar.forced(), one)
    assert accepts(grammar.forced(), two) == parallel


@pytest.mark.parametrize("family", sorted(TOOL_FAMILIES))
def test_free_text_may_hold_calls_that_hold_to_their_schemas(
    family: str, accepts: Accepts, tokenizer: tuple[Tokenizer, TokenTable]
) -> None:
    grammar = calls(family, tokenizer[1])
    before = "Well. " if grammar.syntax.opening else ""
    free = grammar.free()
    assert accepts(free, "Hello, {you} [there].")
    assert accepts(free, "")
    assert accepts(free, before + grammar.syntax.text("weather", GOOD))
    assert not accepts(free, before + grammar.syntax.text("weather", BAD))


@pytest.mark.parametrize("marker", ["", "```json\n", "Look: ```json\n", "<|python_tag|>"])
@pytest.mark.parametrize("family", sorted(TOOL_FAMILIES))
def test_strict_calls_in_free_text_are_those_that_the_grammar_covers(
    family: str, marker: str, accepts: Accepts, tokenizer: tuple[Tokenizer, TokenTable]
) -> None:
    """Other text that looks like calls is content: nothing made it hold to the schemas."""
    uses = ToolUse(tools=tuple(Tool(name=tool.name, strict=True) for tool in TOOLS), choice="auto")
    text = f'{marker}{{"name": "weather", "arguments": {BAD}}}'
    parser = ToolCallParser(TOOL_FAMILIES[family].form_for(uses), frozenset({"weather"}), parallel=True)
    parser.feed(text)
    assert not parser.calls or not accepts(calls(family, tokenizer[1]).free(), text)


@pytest.mark.parametrize("family", sorted(name for name, one in TOOL_FAMILIES.items() if one.syntax.opening))
def test_an_answer_is_calls_or_json(family: str, accepts: Accepts, tokenizer: tuple[Tokenizer, TokenTable]) -> None:
    grammar = calls(family, tokenizer[1])
    either = grammar.or_json({"type": "object", "required": ["rain"], "properties": {"rain": {"type": "boolean"}}})
    assert accepts(either, '{"rain": true}')
    assert accepts(either, grammar.syntax.text("weather", GOOD))
    assert not accepts(either, "It rains.")
    assert not accepts(either, '{"rain": 1}')


def test_reasoning_comes_before_calls(accepts: Accepts, tokenizer: tuple[Tokenizer, TokenTable]) -> None:
    grammar = calls("hermes", tokenizer[1])
    call = grammar.syntax.text("weather", GOOD)
    opened = {"after": "</think>"}
    either = opened | {"opening": "<think>"}
    assert accepts(grammar.forced(), f"Hm, {{.</think>\n\n{call}", **opened)
    assert not accepts(grammar.forced(), call, **opened)
    assert accepts(grammar.forced(), f"<think>Hm.</think>\n\n{call}", **either)
    assert accepts(grammar.forced(), call, **either)
    assert not accepts(grammar.forced(), "<think>Hm.</think>No.", **either)
