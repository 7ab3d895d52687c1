"""Which engine an instance runs on, and which instances move to theirs now. Pure.

What an operator chose for the model is done. Where that is left open, the faster engine takes it if both were measured
on the GPU type, else what its node prefers: nothing is guessed. Pooled instances stay on the torch engine, which is
made to switch, and so do those that share the GPUs of their slot, since a slot runs one engine; one of several workers
always has torch's, which alone can serve with others. A base and its LoRA adapters are one model to vLLM: where they
are all that a pooled slot has, and vLLM was chosen for each of them, it runs them.

An instance that moves is away for as long as the model takes to load. So those of an endpoint move one at a time, and
only while all of them serve: where the first cannot run on its new engine, the others stay where they are, and it goes
back. That engine is then left alone for the model on that GPU type, longer each time that it fails; whoever serves on
it stays. The pooled instances of a slot move together or not at all, since its agent refuses those whose engine is not
the slot's.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from controlplane.policies.assignment.facts import SlotRef
from controlplane.policies.facts import Endpoint

Engine = Literal["torch", "vllm"]
TORCH: Engine = "torch"
VLLM: Engine = "vllm"


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """An engine on which a model failed is left alone for `retry_s`, twice as long each time, `retry_max_s` at most."""

    retry_s: float = 600.0
    retry_max_s: float = 86_400.0


@dataclass(frozen=True, kw_only=True)
class EngineFailure:
    """A model could not run on an engine: so many times, the last at `failed_s`, when its node reported `error`."""

    times: int
    failed_s: float
    error: str

    def over_s(self, settings: EngineSettings) -> float:
        """When the engine may be tried again."""
        return self.failed_s + min(settings.retry_s * 2.0 ** min(self.times - 1, 30), settings.retry_max_s)


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """A running instance. `engine`: the one it is assigned; "auto": its node decides, as for a new instance.
    `came_from`: the engine it left last, on which it served. `asked`: what the operator chose for its model.
    `node_prefers`: what its node takes where that is left open; vLLM only if it is installed there. `slot`: where it
    is; `gpus`: its own; `whole_slot`: they are all of its slot; `workers`: of its slot. `family`: its slot has LoRA
    adapters of one base and perhaps that base, nobody else, and vLLM was chosen for all of them. `ready`: it serves;
    `steady`: it has for a while, is not about to move, and shares its slot with none that drains. `rates`: tokens/s
    that engines were measured to make of its model on its GPU type; `failures`: on which its model could not run there.
    """

    instance_id: str
    endpoint: Endpoint
    engine: Literal["auto", Engine]
    came_from: Engine | None
    asked: Literal["auto", Engine]
    node_prefers: Literal["replay", Engine]
    slot: SlotRef
    pooled: bool
    gpus: int
    whole_slot: bool
    workers: int
    family: bool = False
    ready: bool
    steady: bool
    rates: Mapping[str, float]
    failures: Mapping[Engine, EngineFailure]

    @property
    def present(self) -> Literal["replay", Engine]:
        """What it runs on, if it runs."""
        return self.engine if self.engine != "auto" else TORCH if self.pooled else self.node_prefers


@dataclass(frozen=True, kw_only=True)
class EngineDecision:
    """An engine, and why. "auto": its node has no choice to make."""

    engine: Literal["auto", Engine]
    reason: str


Wanted = tuple[EngineFacts, EngineDecision]
"""A running instance, and the engine that it shall run on."""


@dataclass(frozen=True, kw_only=True)
class EngineChange:
    """An instance that shall run on an engine from now on. `moves`: it has to leave another one for that."""

    instance_id: str
    decision: EngineDecision
    moves: bool


def choose_engine(facts: EngineFacts, now_s: float, settings: EngineSettings) -> EngineDecision:
    """The engine of one instance: the one that is best for it, unless its model failed on that a short while ago."""
    best = _best(facts)
    left_alone = {name: each for name, each in facts.failures.items() if now_s < each.over_s(settings)}
    no_choice = best.engine == "auto" or _why_torch(facts) is not None
    if no_choice or best.engine not in left_alone or (facts.ready and facts.present == best.engine):
        return best
    failure = left_alone[best.engine]
    said = f"{best.reason}, but {best.engine} failed {failure.times} x here, the last time on {failure.error}"
    other = TORCH if best.engine == VLLM else VLLM
    served_there = other == TORCH or VLLM in {facts.came_from, facts.engine}
    if other in left_alone or not served_there:
        return EngineDecision(engine=best.engine, reason=said)
    again_at = datetime.fromtimestamp(failure.over_s(settings), UTC)
    return EngineDecision(engine=other, reason=f"{said}; tried again after {again_at:%Y-%m-%d %H:%M} UTC")


def is_engines_fault(engine: Literal["auto", Engine], came_from: Engine | None) -> bool:
    """Whether an instance that fails on an engine fails for it, for all that is known: that is vLLM, or it served on
    vLLM before.
    """
    return engine == VLLM or (engine == TORCH and came_from == VLLM)


def _best(facts: EngineFacts) -> EngineDecision:
    if facts.node_prefers == "replay":
        return EngineDecision(engine="auto", reason="its node replays a profile")
    if (why_torch := _why_torch(facts)) is not None:
        return EngineDecision(engine=TORCH, reason=why_torch)
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


def _why_torch(facts: EngineFacts) -> str | None:
    """Why vLLM cannot run it, whoever asks for that; None if it can."""
    if facts.pooled and not facts.family:
        return "pooled: only the torch engine switches between many models"
    if facts.gpus > 1 and not facts.whole_slot:
        return f"it takes {facts.gpus} GPUs of a larger slot: vLLM takes all of one"
    if facts.workers > 1:
        return f"{facts.workers} workers of its slot serve together: only the torch engine does that"
    return None


def choose_engine_changes(wanted: Sequence[Wanted]) -> tuple[EngineChange, ...]:
    """What changes now: all that need not move, and of the others one for each endpoint whose instances all serve; of a
    pooled slot all that serve there, or none. `wanted`: every running instance.
    """
    settled = [
        EngineChange(instance_id=facts.instance_id, decision=decision, moves=False)
        for facts, decision in wanted
        if decision.engine != facts.engine and not _moves(facts, decision)
    ]
    waiting = {facts.endpoint for facts, _ in wanted if not facts.steady}
    moving: list[Wanted] = []
    for together in _together(wanted):
        endpoints = {facts.endpoint for facts, _ in together}
        if not waiting & endpoints:
            waiting |= endpoints
            moving += together
    moves = [
        EngineChange(instance_id=facts.instance_id, decision=decision, moves=True)
        for facts, decision in sorted(moving, key=lambda each: each[0].endpoint)
    ]
    return (*settled, *moves)


def _together(wanted: Sequence[Wanted]) -> list[list[Wanted]]:
    """The instances that can move, in groups that move together; no pooled one whose slot would have two engines."""
    groups: dict[str | SlotRef, list[Wanted]] = defaultdict(list)
    engines: dict[str | SlotRef, set[str]] = defaultdict(set)
    for facts, decision in wanted:
        if not facts.ready:
            continue
        group = facts.slot if facts.pooled else facts.instance_id
        moves = _moves(facts, decision)
        engines[group].add(decision.engine if moves else facts.present)
        if moves:
            groups[group].append((facts, decision))
    return [together for group, together in groups.items() if len(engines[group]) == 1]


def _moves(facts: EngineFacts, decision: EngineDecision) -> bool:
    """Whether it serves on another engine. One that does not serve loses nothing."""
    return facts.ready and decision.engine not in {"auto", facts.present}
