"""The agent checks constraints in a process that hostile ones may kill, and goes on."""

import asyncio
import json
from typing import Any

import msgspec
import pytest

from dataplane.agent import constraints
from dataplane.agent.child_process import ChildProcess
from dataplane.agent.constraints import ConstraintChecker
from dataplane.protocol.errors import BadRequestError, DataplaneError, OverloadedError
from dataplane.protocol.messages import (
    Constraint,
    DesiredInstance,
    Failed,
    Finished,
    Generate,
    StreamEvent,
    Token,
    decode_lines,
)
from ops.local.tiny_models import build_tiny_models
from tests.dataplane.replay_node import Node, generate, model, running_node, settings
from tests.event_loop import PATIENCE_S

GOOD = Constraint(kind="choice", definition='["yes", "no"]')
_CHAIN = 9_000
HOSTILE = {
    "slow": Constraint(kind="json_schema", definition='{"type": "integer", "multipleOf": 999983}'),
    "deep": Constraint(
        kind="grammar",
        definition="\n".join([*(f"r{n}: r{n + 1}" for n in range(_CHAIN)), f'r{_CHAIN}: "a"', "start: r0"]),
    ),
    "large": Constraint(kind="regex", definition="a?" * 40_000 + "a" * 40_000),
    "product": Constraint(
        kind="json_schema",
        definition=json.dumps({"allOf": [{"type": "integer", "multipleOf": prime} for prime in (997, 991, 983)]}),
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_tiny_models(tmp_path_factory.mktemp("models"), ["tiny-llama"])[0].path)


def test_hostile_definitions_are_refused_and_the_next_is_checked(folder: str) -> None:
    async def scenario() -> None:
        checker = ConstraintChecker(settings(constraint_compile_max_s=0.5))
        for name, constraint in HOSTILE.items():
            with pytest.raises(
                BadRequestError, match=r"takes longer|too much memory|too deep|too big|too large|fuel|precomputation"
            ):
                await checker.check(constraint, folder)
            await checker.check(Constraint(kind="regex", definition=f"after {name}"), folder)
        with pytest.raises(BadRequestError) as refused:
            await checker.check(HOSTILE["slow"], folder)
        assert refused.value.param == "response_format"
        await checker.close()

    asyncio.run(scenario())


def test_what_takes_too_much_cpu_time_is_told_from_what_takes_too_much_memory(folder: str) -> None:
    async def scenario() -> None:
        checker = ConstraintChecker(settings(constraint_compile_max_s=0.05))
        with pytest.raises(BadRequestError, match=r"takes longer to compile than 0\.05 s"):
            await checker.check(HOSTILE["large"], folder)
        await checker.close()

    asyncio.run(scenario())


def test_a_busy_machine_is_waited_for_and_is_no_refusal(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is of CPU time. What is not answered in time by the clock is put off, and may be asked again."""
    waits_s = [0.0]
    read_line = constraints._line

    async def late_line(process: ChildProcess) -> bytes:
        await asyncio.sleep(waits_s.pop(0) if waits_s else 0.0)
        return await read_line(process)

    async def scenario() -> None:
        checker = ConstraintChecker(settings())
        await checker.check(GOOD, folder)
        checker._compile_max_s = 0.3
        waits_s[:] = [0.0, 1.0]
        await checker.check(Constraint(kind="regex", definition="[0-9]"), folder)
        monkeypatch.setattr(constraints, "_ANSWER_MAX_S", 0.1)
        waits_s[:] = [0.0, 60.0]
        asked = Constraint(kind="regex", definition="[a-z]")
        with pytest.raises(OverloadedError, match="too busy to compile"):
            await checker.check(asked, folder)
        monkeypatch.undo()
        checker._compile_max_s = PATIENCE_S
        await checker.check(asked, folder)
        await checker.close()

    monkeypatch.setattr(constraints, "_line", late_line)
    asyncio.run(scenario())


def test_many_at_once_are_checked_one_after_the_other_or_put_off(folder: str) -> None:
    async def scenario() -> None:
        checker = ConstraintChecker(settings())
        same = [checker.check(GOOD, folder) for _ in range(10)]
        assert await asyncio.gather(*same) == [None] * 10
        different = [
            checker.check(Constraint(kind="regex", definition=f"a{{{number}}}"), folder) for number in range(1, 40)
        ]
        ends = await asyncio.gather(*different, return_exceptions=True)
        assert None in ends
        assert {end.status for end in ends if isinstance(end, DataplaneError)} == {429}
        await checker.close()

    asyncio.run(scenario())


def test_a_node_answers_under_a_constraint_and_refuses_with_the_field(folder: str) -> None:
    """The replay engine follows a grammar where the model has a tokenizer."""
    at = model(path=folder, context_tokens=2048)
    loaded = DesiredInstance(instance_id="i1", slot=0, gpus=1, model=at)
    wordy = DesiredInstance(instance_id="i2", slot=0, gpus=1, model=model("words"))
    person = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}

    async def scenario() -> None:
        async with running_node(settings(constraint_chars_max=200)) as node:
            await node.hold(1, loaded, wordy)

            async def ask(**fields: Any) -> list[StreamEvent] | Failed:
                return await _events(node, generate(str(fields), max_tokens=400, **fields))

            chosen = await ask(constraint=GOOD)
            assert isinstance(chosen, list)
            assert "".join(event.text for event in chosen if isinstance(event, Token)) in {"yes", "no"}
            assert isinstance(chosen[-1], Finished)
            assert chosen[-1].finish_reason == "stop"

            exact = {**person, "additionalProperties": False}
            written = await ask(constraint=Constraint(kind="json_schema", definition=json.dumps(exact)))
            assert isinstance(written, list)
            text = "".join(event.text for event in written if isinstance(event, Token))
            assert isinstance(json.loads(text)["n"], int)

            bad = Constraint(kind="json_schema", definition='{"properties": {"a": {"not": {}}}}')
            for constraint, status, param, said in (
                (bad, 400, "response_format", "$.properties.a: "),
                (Constraint(kind="regex", definition="("), 400, "structured_outputs", "regex"),
                (Constraint(kind="regex", definition="a" * 201), 400, "structured_outputs", "200 is the limit"),
            ):
                refused = await ask(constraint=constraint)
                assert isinstance(refused, Failed)
                assert (refused.status, refused.param) == (status, param)
                assert said in refused.message
            no_tokenizer = await ask(constraint=GOOD, instance_id="i2", model="words")
            assert isinstance(no_tokenizer, Failed)
            assert "tokenizer.json" in no_tokenizer.message
            await node.until(node.idle)

    asyncio.run(scenario())


async def _events(node: Node, body: Generate) -> list[StreamEvent] | Failed:
    answer = await node.post(body)
    if answer.status_code != 200:
        return msgspec.json.decode(answer.content, type=Failed)
    return decode_lines(answer.content)
