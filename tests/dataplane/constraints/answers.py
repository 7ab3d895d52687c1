"""Answers of an engine under constraints, and what must hold for each: the same for every engine."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from dataplane.constraints.compiler import ConstraintCompiler
from dataplane.engines.interface import Engine, EngineRequest
from dataplane.protocol.errors import BadRequestError
from dataplane.protocol.messages import Constraint, ModelSpec
from tests.dataplane.constraints.schemas import Schema, violation
from tests.dataplane.engines.torch.drive import drain, request

TEMPERATURE = 1.5
PROMPT = [5, 6, 7]


@dataclass(frozen=True, kw_only=True)
class Answered:
    """One answer, as text with its special tokens."""

    tokens: tuple[int, ...]
    text: str
    finish: str | None
    error: str | None


def spec(folder: Path) -> ModelSpec:
    return ModelSpec(name="model", path=str(folder), weights_bytes=1, kv_bytes_per_token=1, context_tokens=2048)


def schema_constraint(schema: Schema) -> Constraint:
    return Constraint(kind="json_schema", definition=json.dumps(schema))


def asked(number: int, constraint: Constraint, **changes: Any) -> EngineRequest:
    fields = {"max_tokens": 120, "temperature": TEMPERATURE, "seed": number, "constraint": constraint, **changes}
    return request(str(number), PROMPT, **fields)


def answers(engine: Engine, folder: Path, requests: Sequence[EngineRequest]) -> list[Answered]:
    """The answers to requests, in their order; `generated` tokens are not repeated in `tokens`, but in `text`."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for one in requests:
        engine.add(one)
    made = drain(engine, steps_max=100_000)
    return [
        Answered(
            tokens=made.tokens.get(one.request_id, ()),
            text=tokenizer.decode([*one.generated, *made.tokens.get(one.request_id, ())], skip_special_tokens=False),
            finish=made.finished.get(one.request_id),
            error=made.errors.get(one.request_id),
        )
        for one in requests
    ]


def check_schemas(engine: Engine, folder: Path, schemas: Sequence[Schema], *, max_tokens: int) -> Counter[str]:
    """Assert that every answer matches its schema, or was cut and says so; a cut one that goes on does, too. Counts how
    the answers ended. Schemas that are refused are counted, not asked.
    """
    compiler = ConstraintCompiler(folder)
    counted: Counter[str] = Counter()
    wanted: list[tuple[Schema, EngineRequest]] = []
    for number, schema in enumerate(schemas):
        constraint = schema_constraint(schema)
        try:
            compiler.compile(constraint)
        except BadRequestError:
            counted["refused"] += 1
        else:
            wanted.append((schema, asked(number, constraint, max_tokens=max_tokens)))
    cut = []
    made = answers(engine, folder, [one for _, one in wanted])
    for (schema, one), answer in zip(wanted, made, strict=True):
        counted[answer.finish or "error"] += 1
        assert answer.error is None, (schema, answer)
        if answer.finish == "stop":
            assert violation(schema, answer.text) is None, (schema, answer.text, violation(schema, answer.text))
        else:
            assert answer.finish == "length"
            assert len(answer.tokens) == max_tokens
            cut.append(
                (
                    schema,
                    asked(int(one.request_id), one.constraint, generated=answer.tokens, max_tokens=max_tokens + 140),
                )
            )
    for (schema, _), answer in zip(cut, answers(engine, folder, [one for _, one in cut]), strict=True):
        assert answer.error is None, (schema, answer)
        if answer.finish == "stop":
            counted["stop after a cut"] += 1
            assert violation(schema, answer.text) is None, (schema, answer.text)
    return counted
