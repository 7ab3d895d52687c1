"""A model's own objectives from the control plane's message to the schedule of a worker."""

import math
from typing import Any

import msgspec
import pytest

from dataplane.agent.answers import engine_request
from dataplane.dispatch.dispatcher import Dispatcher
from dataplane.engines.interface import EngineRequest
from dataplane.protocol.messages import Generate
from dataplane.protocol.tiers import Objective, Tier
from dataplane.scheduling.prefill import PrefillSettings
from dataplane.scheduling.tiers import TIER_OBJECTIVES
from tests.dataplane.engines.replay.replayed import engine_with, request, spec
from tests.dataplane.replay_node import generate, model

OWN = Objective(ttft_s=0.4, tbt_s=0.05)


def promised(request_id: str, instance_id: str, objective: Objective | None, **changes: Any) -> EngineRequest:
    return msgspec.structs.replace(request(request_id, instance_id, **changes), objective=objective)


def as_sent(**fields: float) -> bytes:
    body = msgspec.to_builtins(generate())
    return msgspec.json.encode(body | {"objective": fields})


def test_it_travels_with_the_request() -> None:
    sent = msgspec.json.decode(msgspec.json.encode(generate(objective=OWN)), type=Generate)
    taken = engine_request(sent, (1, 2, 3), model(), tokens_max=1000)
    assert taken.promise == OWN


@pytest.mark.parametrize("tier", ["IW-F", "IW-N", "NIW"])
def test_a_control_plane_that_sends_none_gets_the_tiers(tier: Tier) -> None:
    body = msgspec.to_builtins(generate(tier=tier))
    assert "objective" not in body
    taken = engine_request(msgspec.convert(body, Generate), (1, 2, 3), model(), tokens_max=1000)
    assert taken.promise == TIER_OBJECTIVES[tier]


@pytest.mark.parametrize(
    ("ttft_s", "tbt_s", "named"),
    [
        (0.0, 0.1, "ttft_s must be over 0 and at most 86400"),
        (86_400.1, 0.1, "ttft_s must be over 0 and at most 86400"),
        (1.0, -0.1, "tbt_s must be over 0 and at most 3600"),
        (1.0, 3600.1, "tbt_s must be over 0 and at most 3600"),
    ],
)
def test_no_turn_is_planned_by_nonsense(ttft_s: float, tbt_s: float, named: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=rf"{named}, .*`\$\.objective`"):
        msgspec.json.decode(as_sent(ttft_s=ttft_s, tbt_s=tbt_s), type=Generate)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_it_is_finite(value: float) -> None:
    with pytest.raises(ValueError, match="tbt_s must be over 0 and at most 3600"):
        Objective(ttft_s=1.0, tbt_s=value)


def test_a_slot_serves_the_tighter_objective_first() -> None:
    engine, _ = engine_with(a=spec("a"), b=spec("b"))
    engine.add(promised("default", "a", None))
    engine.add(promised("tight", "b", OWN))
    firsts = [output.request_id for _ in range(4) for output in engine.step()]
    assert firsts[0] == "tight"


def test_the_load_of_a_slot_is_by_its_models_own_objectives() -> None:
    """Tokens that are due twice as often are twice the load; of a batch the tightest counts."""
    loads = []
    for objectives in ([None, None], [None, OWN], [OWN, OWN]):
        engine, _ = engine_with()
        for number, objective in enumerate(objectives):
            engine.add(promised(f"r{number}", "i", objective))
        while not all(engine.load_alpha for _ in engine.step()):
            pass
        loads.append(engine.load_alpha)
    assert loads[1] == loads[2] == pytest.approx(2 * loads[0])


class Worker:
    """A worker that drops its requests."""

    index, kind = 0, "both"
    stats = engine_with()[0].stats()

    def is_ready(self, instance_id: str) -> bool:
        return True

    def add(self, request: EngineRequest) -> None:
        pass


def test_the_wait_that_a_node_reports_is_that_of_requests_promised_so() -> None:
    """A model with a tight objective overtakes; the next request of its own will too."""
    workers: Any = [Worker()]
    dispatcher = Dispatcher(workers, PrefillSettings(), losses_max=0, clock=lambda: 0.0)
    dispatcher.submit(promised("default", "a", None), "a")
    before = dispatcher.prefill_outlook("b", "b", "IW-F")
    dispatcher.submit(promised("tight", "b", OWN), "b")
    after, others = dispatcher.prefill_outlook("b", "b", "IW-F"), dispatcher.prefill_outlook("a", "a", "IW-F")
    assert before is not None
    assert after is not None
    assert others is not None
    assert after[0] == pytest.approx(before[0])
    assert others[0] == pytest.approx(2 * before[0])
