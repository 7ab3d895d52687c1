"""Constrained answers of the torch engine, with random weights and at a high temperature: the hardest case."""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.protocol.errors import BadRequestError
from dataplane.protocol.messages import Constraint
from tests.dataplane.constraints.answers import answers, asked, check_schemas, schema_constraint, spec
from tests.dataplane.constraints.schemas import SUITE, own_schemas, public_schemas, violation
from tests.dataplane.engines.torch.drive import drain, request
from tests.dataplane.engines.torch.tiny import save_tiny, spec_of

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture
def slot(folder: Path) -> Iterator[Callable[..., TorchEngine]]:
    """Engines with one instance "a" of the model; all are closed in the end."""
    made = []

    def make(**changes: Any) -> TorchEngine:
        given = {"weights_bytes": 2**24, "kv_bytes": 2**26, "batch_max": 64, **changes}
        engine = TorchEngine(TorchEngineSettings(**given), time.monotonic)
        engine.load("a", spec(folder))
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


def test_answers_match_schemas_of_our_own(slot: Callable[..., TorchEngine], folder: Path) -> None:
    counted = check_schemas(slot(), folder, own_schemas(24), max_tokens=60)
    assert counted["stop"] + counted["stop after a cut"] >= 12, counted
    assert counted["refused"] < 4, counted


@pytest.mark.slow
def test_answers_match_many_schemas_of_our_own(slot: Callable[..., TorchEngine], folder: Path) -> None:
    counted = check_schemas(slot(), folder, own_schemas(320), max_tokens=100)
    assert counted["stop"] + counted["stop after a cut"] > 200, counted
    assert counted["refused"] < 16, counted


@pytest.mark.slow
@pytest.mark.skipif(SUITE is None, reason="JSON_SCHEMA_TEST_SUITE names no checkout of the public suite")
def test_answers_match_the_public_test_suite(slot: Callable[..., TorchEngine], folder: Path) -> None:
    schemas = [schema for schema in public_schemas() if _is_usable(schema)]
    counted = check_schemas(slot(), folder, schemas, max_tokens=100)
    assert counted["stop"] + counted["stop after a cut"] > 120, counted


def _is_usable(schema: dict[str, Any]) -> bool:
    """Whether the oracle can judge by it: it refers to no file of the suite's own server."""
    return "localhost:1234" not in str(schema)


def test_choices_regular_expressions_and_grammars(slot: Callable[..., TorchEngine], folder: Path) -> None:
    arithmetic = 'start: sum\nsum: NUMBER ("+" NUMBER){1,3}\nNUMBER: /[1-9][0-9]{0,2}/'
    constraints = [
        Constraint(kind="choice", definition='["ja", "nein", "vielleicht / später", "q\\"x"]'),
        Constraint(kind="regex", definition=r"[A-Z]{2}/\d{3}(-[äöü])?"),
        Constraint(kind="grammar", definition=arithmetic),
        Constraint(kind="grammar", definition='root ::= "a" mid "c"\nmid ::= [0-9] | "b"'),
        Constraint(kind="json_object"),
    ]
    patterns = (r'ja|nein|vielleicht / später|q"x', r"[A-Z]{2}/[0-9]{3}(-[äöü])?", r"\d+(\+\d+){1,3}", r"a(\d|b)c")
    made = answers(slot(), folder, [asked(n, constraint) for n, constraint in enumerate(constraints)])
    for pattern, answer in zip(patterns, made, strict=False):
        assert answer.finish == "stop"
        assert re.fullmatch(pattern, answer.text), answer
    assert made[-1].finish == "length" or violation({"type": "object"}, made[-1].text) is None


def test_reasoning_is_free_and_what_follows_is_not(slot: Callable[..., TorchEngine], folder: Path) -> None:
    bias = {"logit_bias": ((_token(folder, "<|system|>"), 30.0),), "max_tokens": 200}
    open_already = Constraint(kind="choice", definition='["yes", "no"]', after="<|system|>")
    to_open = Constraint(kind="choice", definition='["yes", "no"]', after="<|system|>", opening="<|user|>")
    made = answers(slot(), folder, [asked(0, open_already, **bias), asked(1, to_open), asked(2, to_open, seed=4)])
    assert re.fullmatch(r"(?s)[^<|]*<\|system\|>\s*(yes|no)", made[0].text), made[0]
    for answer in made[1:]:
        assert answer.finish == "length" or re.fullmatch(r"(?s)(<\|user\|>.*<\|system\|>\s*)?(yes|no)", answer.text)


def _token(folder: Path, text: str) -> int:
    from tokenizers import Tokenizer  # noqa: PLC0415

    return int(Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(text))


def test_a_continued_answer_is_token_for_token_the_same(slot: Callable[..., TorchEngine], folder: Path) -> None:
    constraints = [schema_constraint(PERSON), Constraint(kind="regex", definition="([a-z]{3} ){5,9}")]
    penalised = {"frequency_penalty": 0.7, "logprobs": 2}
    whole = answers(slot(), folder, [asked(n, constraint, **penalised) for n, constraint in enumerate(constraints)])
    assert all(answer.finish == "stop" for answer in whole)
    other = slot(batch_max=2, block_tokens=4, prefill_tokens_per_step_max=8)
    for number, (constraint, answer) in enumerate(zip(constraints, whole, strict=True)):
        for made in (1, len(answer.tokens) // 2, len(answer.tokens)):
            begun = asked(number, constraint, generated=answer.tokens[:made], **penalised)
            [rest] = answers(other, folder, [begun])
            assert rest.tokens == answer.tokens[made:]
            assert rest.finish == "stop"
    foreign = asked(0, constraints[0], generated=(300, 301))
    [broken] = answers(other, folder, [foreign])
    assert broken.error is not None
    assert "does not match its constraint" in broken.error


def test_a_constraint_that_grows_beyond_the_limits_is_the_requests_fault(slot: Callable[..., TorchEngine]) -> None:
    wide = {f"p{n}": {"type": "string", "pattern": "^(a|b|ab)*c{1,500}$"} for n in range(700)}
    engine = slot()
    engine.add(asked(0, schema_constraint({"type": "object", "properties": wide})))
    [ended] = [output for _ in range(200) for output in engine.step() if output.error]
    assert ended.error is not None
    assert "too complex" in ended.error
    assert ended.invalid


def test_the_grammar_wins_over_ignored_ends_and_least_lengths(slot: Callable[..., TorchEngine], folder: Path) -> None:
    choice = Constraint(kind="choice", definition='["yes", "no"]')
    digits = Constraint(kind="regex", definition="[0-9]+")
    requests = [
        asked(0, choice, ignore_eos=True),
        asked(1, choice, min_tokens=50),
        asked(2, digits, min_tokens=9, max_tokens=200),
        asked(3, digits, ignore_eos=True, max_tokens=30),
    ]
    first, second, third, fourth = answers(slot(), folder, requests)
    assert {first.text, second.text} <= {"yes", "no"}
    assert (first.finish, second.finish) == ("stop", "stop")
    assert len(third.tokens) >= 9
    assert third.text.isdecimal()
    assert (len(fourth.tokens), fourth.finish) == (30, "length")


def test_constrained_and_free_requests_share_a_batch(slot: Callable[..., TorchEngine], folder: Path) -> None:
    free = [request(f"f{n}", [5, 6, n], max_tokens=30, temperature=0.9, seed=n) for n in range(3)]
    alone = slot()
    for one in free:
        alone.add(one)
    expected = drain(alone).tokens
    together = slot()
    for one in (*free, *(asked(n, schema_constraint(PERSON)) for n in range(3))):
        together.add(one)
    made = drain(together)
    assert {name: made.tokens[name] for name in expected} == expected
    assert all(made.finished[str(n)] == "stop" for n in range(3))


def test_models_without_tokenizer_refuse(tmp_path: Path) -> None:
    engine = TorchEngine(TorchEngineSettings(weights_bytes=2**22, kv_bytes=2**20), time.monotonic)
    engine.load("a", spec_of("model", save_tiny("llama", tmp_path / "plain")))
    with pytest.raises(BadRequestError, match=r"tokenizer\.json"):
        engine.add(asked(0, Constraint(kind="json_object")))
    engine.close()
