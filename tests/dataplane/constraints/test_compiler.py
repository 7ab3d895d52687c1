"""Definitions that are refused, and by what name; tokenizers of several kinds."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from dataplane.constraints.checker import refusal_of
from dataplane.constraints.compiler import COMPILED_MAX, ConstraintCompiler, compile_text
from dataplane.constraints.grammars import free_text_with, json_piece
from dataplane.constraints.tokens import TokenTable
from dataplane.protocol.errors import BadRequestError
from dataplane.protocol.messages import Constraint


def schema(definition: Any) -> Constraint:
    return Constraint(kind="json_schema", definition=json.dumps(definition))


def matches(compiler: ConstraintCompiler, tokens: TokenTable, constraint: Constraint, text: str) -> bool:
    """Whether an answer may be exactly this text."""
    matcher = compiler.matcher(constraint, prompt_tokens=0)
    matcher.mask(tokens.table.tokenize_str(text))
    return matcher.error is None and matcher.may_end


@pytest.mark.parametrize(
    ("definition", "path", "said"),
    [
        ({"not": {"type": "null"}}, "$", "not"),
        ({"type": "array", "uniqueItems": True}, "$", "uniqueItems"),
        (
            {"properties": {"a": {"items": {"anyOf": [{}, {"if": {"const": 1}}]}}}},
            "$.properties.a.items.anyOf[1]",
            "if",
        ),
        ({"properties": {"a": {"format": "zip"}}}, "$.properties.a", "Unknown format: zip"),
        ({"$defs": {"a": {"type": "text"}}, "items": {"$ref": "#/$defs/a"}}, "$.$defs.a", "text"),
        ({"properties": {"b": {"type": "string", "pattern": "(?=x)y"}}}, "$.properties.b", "look-around"),
        ({"properties": {"m": {"minProperties": 2}}}, "$.properties.m", "minProperties"),
        ({"items": {"const": 2**60}}, "$.items", "integers beyond"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "$", "oneOf"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "$", "x-guidance"),
        ({"$ref": "http://127.0.0.1/x.json"}, "$", "127.0.0.1"),
        ({"$ref": "#"}, "$", "no text matches"),
        ({"type": "object", "required": ["a"], "properties": {"a": False}}, "$", ""),
    ],
)
def test_what_is_wrong_with_a_schema_is_named_with_its_path(
    folder: Path, definition: Any, path: str, said: str
) -> None:
    refusal = refusal_of(schema(definition), TokenTable(folder))
    assert refusal is not None
    assert refusal.startswith(f"{path}: ")
    assert said in refusal


@pytest.mark.parametrize(
    ("constraint", "said"),
    [
        (Constraint(kind="json_schema", definition="{"), "no JSON"),
        (Constraint(kind="json_schema", definition='{"const": NaN}'), "NaN"),
        (Constraint(kind="json_schema", definition="[" * 100_000), "no JSON"),
        (Constraint(kind="json_schema", definition="3"), "must be an object"),
        (Constraint(kind="json_schema", definition="false"), "Unsatisfiable"),
        (Constraint(kind="regex", definition="[0-9"), "unclosed"),
        (Constraint(kind="regex", definition=""), "empty"),
        (Constraint(kind="choice", definition="[]"), "at least one"),
        (Constraint(kind="choice", definition='["a", 1]'), "list of at least one string"),
        (Constraint(kind="choice", definition='["a", ""]'), "must not be empty"),
        (Constraint(kind="grammar", definition="start: missing"), "missing"),
        (Constraint(kind="grammar", definition='start: %json {"not": {}}'), "not"),
        (Constraint(kind="grammar", definition='root ::= "a" ('), ""),
    ],
)
def test_definitions_that_cannot_be_compiled(folder: Path, constraint: Constraint, said: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        ConstraintCompiler(folder).compile(constraint)
    assert said in refused.value.message


def test_texts_between_the_slashes_of_a_grammar(folder: Path) -> None:
    compiler, tokens = ConstraintCompiler(folder), TokenTable(folder)
    for regex, text in (
        ("a/b", "a/b"),
        (r"a\/b", "a/b"),
        (r"\\/", "\\/"),
        ("^x|y$", "y"),
        ("a\nb", "a\nb"),
        ("é+", "éé"),
    ):
        assert matches(compiler, tokens, Constraint(kind="regex", definition=regex), text), regex
    hard = ["a", "/", "\\", '"', "\n", "\x01", "😀", "<|end|>x", "é"]
    choice = Constraint(kind="choice", definition=json.dumps(hard))
    assert [text for text in hard if not matches(compiler, tokens, choice, text)] == ["<|end|>x"]
    assert not matches(compiler, tokens, choice, "b")


@pytest.mark.parametrize("further", [{}, {"additionalProperties": True}, {"additionalProperties": {}}])
@pytest.mark.parametrize("inside", [False, True])
def test_a_listed_property_written_with_escapes_is_no_further_one(
    folder: Path, further: dict[str, Any], inside: bool
) -> None:
    tokens, compiler = TokenTable(folder), ConstraintCompiler(folder)
    listed = {"type": "object", "properties": {"admin": {"const": False}, "é": {"type": "integer"}}, **further}
    constraint = schema({"type": "array", "items": {"allOf": [listed]}} if inside else listed)

    def fits(text: str) -> bool:
        return matches(compiler, tokens, constraint, f"[{text}]" if inside else text)

    for text in ("{}", '{"admin":false}', '{"é":1}', '{"other":[true]}', '{"admin":false,"a\\nb":1}'):
        assert fits(text), text
    for text in (
        r'{"admin":false,"\u0061dmin":true}',
        r'{"\u0061dmin":true}',
        r'{"\u00e9":"x"}',
        '{"admin":false,"admin":true}',
    ):
        assert not fits(text), text


def test_names_of_listed_properties_are_compiled_beside_patterns_of_names(folder: Path) -> None:
    parts = [{"properties": {"a": {}}}, {"patternProperties": {"^x": {"type": "integer"}}}]
    named = {"components": {"X": parts[1]}, "allOf": [parts[0], {"$ref": "#/components/X"}]}
    for listed in ({"allOf": parts}, named):
        assert refusal_of(schema({"type": "object", **listed}), TokenTable(folder)) is None


def test_only_so_many_definitions_stay_compiled_and_each_matcher_is_its_own(folder: Path) -> None:
    compiler = ConstraintCompiler(folder)
    first = Constraint(kind="choice", definition='["one", "two"]')
    one, two = (compiler.matcher(first, prompt_tokens=0) for _ in range(2))
    tokens = TokenTable(folder).table.tokenize_str("one")
    one.mask(tokens)
    assert one.may_end
    assert not two.may_end
    assert two.mask([]) != one.mask(tokens)
    for number in range(COMPILED_MAX + 1):
        compiler.compile(Constraint(kind="regex", definition=f"a{{{number}}}b"))
    assert compiler.matcher(first, prompt_tokens=0).mask([]) == two.mask([])


def test_free_text_with_calls(folder: Path) -> None:
    tokens = TokenTable(folder)
    number = json_piece({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    for begin, added in (("CALL:", {}), ("<|user|>", tokens.added)):
        opened = [added[begin]] if added else tokens.table.tokenize_str(begin)
        for parallel in (True, False):
            grammar = free_text_with(f'{number} ";"', begin, added, parallel=parallel)
            for text, right in (("{}", False), ('{"n": 1};', True), ('{"n": "x"};', False)):
                compiled = compile_text(grammar, tokens)
                given = [*tokens.table.tokenize_str("so: "), *opened, *tokens.table.tokenize_str(text)]
                assert (compiled.try_consume_tokens(given) == len(given) and compiled.is_accepting()) is right


def sentencepiece(folder: Path) -> Path:
    """A tokenizer as Llama 2 and Mistral have it: blanks as a letter, and bytes for what is no token."""
    texts = ["▁", "{", "}", '"', "a", "b", ":", "▁a", "▁{", "ab", "1", ",", "▁1"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *texts]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fallback = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(fallback)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in names[:3]])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"eos_token_id": [2]}')
    return folder


def test_a_sentencepiece_tokenizer_writes_letters_byte_by_byte(tmp_path: Path) -> None:
    folder = sentencepiece(tmp_path / "sp")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    matcher = ConstraintCompiler(folder).matcher(Constraint(kind="regex", definition="[äö]+[1a]"), prompt_tokens=0)
    made: list[int] = []
    while not matcher.must_end:
        mask = matcher.mask(made)
        if not matcher.must_end:
            made.append(max(token for token in range(len(mask)) if mask[token] and (token != 269 or len(made) > 6)))
    assert tokenizer.decode(made).rstrip("1a").strip("äö") == ""
    assert len(made) > 2


def test_ids_beyond_the_tokenizer_and_every_end_of_sequence(folder: Path) -> None:
    """Models pad their vocabulary, and some end answers with one of several tokens."""
    ends = (0, 2)
    matcher = ConstraintCompiler(folder, size=600, eos_ids=ends).matcher(
        Constraint(kind="grammar", definition="start: /(.|\\n)*/"), prompt_tokens=0
    )
    mask = matcher.mask([])
    assert len(mask) == 600
    assert not any(mask[512:])
    assert all(mask[end] for end in ends)
    assert not mask[1], "another special token is no text"


@pytest.mark.parametrize(
    ("missing", "said"),
    [("tokenizer.json", r"tokenizer\.json"), ("config.json", "end-of-sequence"), ("decoder", "tokenizer allows no")],
)
def test_models_that_follow_no_constraint(folder: Path, tmp_path: Path, missing: str, said: str) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    if missing == "decoder":
        described = json.loads((other / "tokenizer.json").read_text())
        (other / "tokenizer.json").write_text(json.dumps({**described, "decoder": None}))
    else:
        (other / missing).unlink()
        (other / "generation_config.json").unlink()
    with pytest.raises(BadRequestError, match=said):
        ConstraintCompiler(other).compile(Constraint(kind="json_object"))
