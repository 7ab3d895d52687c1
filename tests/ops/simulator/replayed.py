"""The live slot's engine in simulated time, step by step: what the simulator is checked against."""

from collections import deque
from collections.abc import Sequence

from dataplane.engines.interface import EngineRequest, KvHandle
from dataplane.engines.replay.engine import ReplayEngine, ReplaySettings
from dataplane.engines.replay.kv import REPLAY_KV_FILE
from dataplane.protocol.messages import ModelSpec
from dataplane.protocol.tiers import Objective
from dataplane.scheduling.costs import LatencyModel
from dataplane.scheduling.profile import GpuProfile, ModelProfile
from dataplane.worker.main import STATS_EVERY_S
from ops.simulator.kernel.requests import Request

LATENCY = LatencyModel(
    prefill_base_s=6e-3,
    prefill_per_token_s=2.2e-5,
    prefill_per_token2_s=2e-10,
    decode_base_s=9e-3,
    decode_per_context_token_s=5e-8,
    decode_per_sequence_s=1e-4,
)
KV_BYTES_PER_TOKEN = 1000


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, time_s: float) -> None:
        self.now_s += time_s


def profile_of(latency: LatencyModel, weights_bytes: int = 1, bytes_per_s: float = 1e12) -> GpuProfile:
    model = ModelProfile(name="m", source="-", gpus=1, weights_bytes=weights_bytes, latency=latency)
    return GpuProfile(
        gpu_type="g",
        memory_bytes=10**12,
        pcie_bytes_per_s=bytes_per_s,
        transfer_efficiency=1.0,
        cost_per_hour=1.0,
        models=(model,),
    )


def replay(
    requests: Sequence[Request],
    settings: ReplaySettings,
    models: Sequence[ModelSpec],
    *,
    prefilled: bool = False,
    objective: Objective | None = None,
    gpus: int = 1,
) -> dict[int, list[float]]:
    """By the request's number, when its tokens were out. `objective`: what all are promised, if not what a tier is."""
    clock = Clock()
    engine = ReplayEngine(settings, clock, clock.sleep)
    for model in models:
        engine.load(model.name, model, gpus=gpus)
    arrivals = deque(requests)
    times_s: dict[int, list[float]] = {request.number: [] for request in requests}
    while arrivals or engine.has_work():
        if not engine.has_work():
            if clock.now_s + STATS_EVERY_S <= arrivals[0].arrived_s:
                engine.step()  # as a worker does that no command has come for
            clock.now_s = max(clock.now_s, arrivals[0].arrived_s)
        while arrivals and arrivals[0].arrived_s <= clock.now_s:
            request = arrivals.popleft()
            engine.add(engine_request(request, prefilled=prefilled, objective=objective))
        for output in engine.step():
            times_s[int(output.request_id)] += [clock.now_s] * len(output.token_ids)
    return times_s


def engine_request(request: Request, *, prefilled: bool = False, objective: Objective | None = None) -> EngineRequest:
    """`prefilled`: it has its first token, and comes with its KV."""
    kv = KvHandle(file=REPLAY_KV_FILE, slab_bytes=0, shape=(0, 0, 0, 0, 0), blocks=(), tokens=request.prompt_tokens)
    return EngineRequest(
        request_id=str(request.number),
        instance_id=request.model,
        tier=request.tier,
        objective=objective,
        prompt=(0,) * request.prompt_tokens,
        generated=(0,) if prefilled else (),
        max_tokens=request.output_tokens,
        kv=kv if prefilled else None,
    )


def spec_of(name: str, weights_bytes: int = 1) -> ModelSpec:
    return ModelSpec(
        name=name,
        path="-",
        weights_bytes=weights_bytes,
        kv_bytes_per_token=KV_BYTES_PER_TOKEN,
        context_tokens=10**6,
    )
