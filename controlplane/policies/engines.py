"""Which engine an instance runs on, and which instances move to theirs now. Pure.

What an operator chose for the model is done. Where that is left open, the faster engine takes it if both were measured
on the GPU type, else what its node prefers: nothing is guessed. Pooled instances stay on the torch engine, which is
made to switch, and so do those that share the GPUs of their slot, since a slot runs one engine.

An instance that moves is away for as long as the model takes to load. So those of an endpoint move one at a time, and
only while all of them serve: where the first cannot run on its new engine, the others stay where they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from controlplane.policies.facts import Endpoint

Engine = Literal["torch", "vllm"]
TORCH: Engine = "torch"
VLLM: Engine = "vllm"


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """A running instance. `engine`: what it was told; "auto": its node decides, as it does for a new one. `asked`: what
    the operator chose for its model. `node_prefers`: what its node takes where that is left open; vLLM only if it is
    installed there. `whole_slot`: it has all GPUs of its slot. `ready`: it serves; `steady`: it has for a while, and is
    not about to move. `rates`: tokens/s that engines were measured to make of its model on its GPU type.
    """

    instance_id: str
    endpoint: Endpoint
    engine: Literal["auto", Engine]
    asked: Literal["auto", Engine]
    node_prefers: Literal["replay", Engine]
    pooled: bool
    whole_slot: bool
    ready: bool
    steady: bool
    rates: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class EngineDecision:
    """An engine, and why. "auto": its node has no choice to make."""

    engine: Literal["auto", Engine]
    reason: str


@dataclass(frozen=True, kw_only=True)
class EngineChange:
    """An instance that shall run on an engine from now on. `moves`: it has to leave another one for that."""

    instance_id: str
    decision: EngineDecision
    moves: bool


def choose_engine(facts: EngineFacts) -> EngineDecision:
    """The engine of one instance."""
    if facts.node_prefers == "replay":
        return EngineDecision(engine="auto", reason="its node replays a profile")
    if facts.pooled:
        return EngineDecision(engine=TORCH, reason="pooled: only the torch engine switches between many models")
    if facts.asked != "auto":
        return EngineDecision(engine=facts.asked, reason="chosen for the model")
    if not facts.whole_slot:
        return EngineDecision(engine=TORCH, reason="it shares its slot: only the torch engine runs several models")
    torch, vllm = facts.rates.get(TORCH), facts.rates.get(VLLM)
    if torch is None or vllm is None:
        return EngineDecision(
            engine=facts.node_prefers, reason="not measured on both engines: the one that its node prefers"
        )
    measured = f"measured: torch {torch:g}, vLLM {vllm:g} tokens/s"
    if vllm > torch and facts.node_prefers != VLLM:
        return EngineDecision(engine=TORCH, reason=f"{measured}; but its node keeps to the torch engine")
    return EngineDecision(engine=VLLM if vllm > torch else TORCH, reason=measured)


def choose_engine_changes(instances: Sequence[EngineFacts]) -> tuple[EngineChange, ...]:
    """What changes now: all that need not move, and of the others one for each endpoint whose instances all serve."""
    wanted = [(facts, choose_engine(facts)) for facts in instances]
    settled = [
        EngineChange(instance_id=facts.instance_id, decision=decision, moves=False)
        for facts, decision in wanted
        if decision.engine != facts.engine and not _moves(facts, decision)
    ]
    moving = {facts.endpoint: (facts, decision) for facts, decision in reversed(wanted) if _moves(facts, decision)}
    restless = {facts.endpoint for facts in instances if not facts.steady}
    moves = [
        EngineChange(instance_id=facts.instance_id, decision=decision, moves=True)
        for endpoint, (facts, decision) in sorted(moving.items())
        if endpoint not in restless
    ]
    return (*settled, *moves)


def _moves(facts: EngineFacts, decision: EngineDecision) -> bool:
    """Whether it serves on another engine. One that does not serve loses nothing."""
    present = facts.engine if facts.engine != "auto" else TORCH if facts.pooled else facts.node_prefers
    return facts.ready and decision.engine not in {"auto", present}
