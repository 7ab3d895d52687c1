"""Run an engine to the end and gather its outputs."""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dataplane.engines.interface import Engine, EngineOutput, EngineRequest, TokenScore


@dataclass
class Gathered:
    """All outputs of a run, by request."""

    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)
    scores: dict[str, tuple[TokenScore, ...]] = field(default_factory=dict)
    finished: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    values: dict[str, tuple[float, ...]] = field(default_factory=dict)

    def take(self, outputs: Sequence[EngineOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.finished, "an output after the last one"
            assert output.request_id not in self.errors, "an output after the last one"
            self.tokens[output.request_id] = self.tokens.get(output.request_id, ()) + output.token_ids
            self.scores[output.request_id] = self.scores.get(output.request_id, ()) + output.scores
            if output.values:
                self.values[output.request_id] = output.values
            if output.finish_reason is not None:
                self.finished[output.request_id] = output.finish_reason
            if output.error is not None:
                self.errors[output.request_id] = output.error


def request(request_id: str, prompt: Sequence[int], **fields: Any) -> EngineRequest:
    """A greedy request for 8 tokens of instance "a", by default."""
    given: dict[str, Any] = {"instance_id": "a", "tier": "IW-N", "max_tokens": 8, **fields}
    return EngineRequest(request_id=request_id, prompt=tuple(prompt), **given)


def stepped(engine: Engine) -> Sequence[EngineOutput]:
    """The outputs of a step. After one without any, threads that copy have the processor for a moment: with steps that
    only wait, a limit in steps would else be one in time, and a short one.
    """
    outputs = engine.step()
    if not outputs:
        time.sleep(1e-4)
    return outputs


def drain(
    engine: Engine, *, later: Mapping[int, Sequence[EngineRequest]] | None = None, steps_max: int = 5000
) -> Gathered:
    """Step until nothing is left; `later` requests join before the step of that number."""
    gathered = Gathered()
    pending = dict(later or {})
    for number in range(steps_max):
        for joining in pending.pop(number, ()):
            engine.add(joining)
        if not engine.has_work() and not pending:
            return gathered
        gathered.take(stepped(engine))
    raise AssertionError(f"not done after {steps_max} steps")


def interleave(engine: Engine, joining: list[EngineRequest]) -> Gathered:
    """Let requests join in any order, one every other step, and step until nothing is left. Those whose ids begin with
    `leaves-` are cancelled after their first tokens. No two models are on the slot at once.
    """
    random.Random(0).shuffle(joining)
    gathered, steps = Gathered(), 0
    while joining or engine.has_work():
        if joining and steps % 2 == 0:
            engine.add(joining.pop())
        outputs = engine.step()
        gathered.take(outputs)
        for output in outputs:
            if output.request_id.startswith("leaves-") and len(gathered.tokens[output.request_id]) >= 2:
                engine.cancel(output.request_id)
        assert len(engine.stats().resident_models) <= 1
        steps += 1
    return gathered
