"""A replay engine on a clock that only sleeping moves."""

from dataplane.engines.interface import EngineOutput, EngineRequest
from dataplane.engines.replay.engine import ReplayEngine, ReplaySettings
from dataplane.protocol.messages import ModelSpec
from dataplane.protocol.tiers import Tier
from dataplane.scheduling.costs import LatencyModel
from dataplane.scheduling.profile import GpuProfile, ModelProfile

LATENCY = LatencyModel(
    prefill_base_s=0.01,
    prefill_per_token_s=0.001,
    prefill_per_token2_s=0.0,
    decode_base_s=0.02,
    decode_per_context_token_s=0.0001,
    decode_per_sequence_s=0.001,
)
PROFILE = GpuProfile(
    gpu_type="X",
    memory_bytes=10_000,
    pcie_bytes_per_s=1000.0,
    transfer_efficiency=0.5,
    cost_per_hour=1.0,
    models=(ModelProfile(name="m", source="made up", gpus=1, weights_bytes=500, latency=LATENCY),),
)
SETTINGS = ReplaySettings(profile=PROFILE, weights_bytes=1000, kv_bytes=1000)
"""Room for two models of 500 bytes and 100 tokens; 500 bytes move in a second."""


class FakeTime:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def clock(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        assert duration_s >= 0
        self.now_s += duration_s


def spec(name: str = "a", *, weights_bytes: int = 500, context_tokens: int = 200) -> ModelSpec:
    return ModelSpec(
        name=name, path="-", weights_bytes=weights_bytes, kv_bytes_per_token=10, context_tokens=context_tokens
    )


def request(
    request_id: str = "r", instance_id: str = "i", *, prompt: int = 10, max_tokens: int = 5, tier: Tier = "IW-F"
) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        instance_id=instance_id,
        tier=tier,
        prompt=tuple(range(prompt)),
        max_tokens=max_tokens,
    )


def engine_with(settings: ReplaySettings = SETTINGS, **models: ModelSpec) -> tuple[ReplayEngine, FakeTime]:
    time = FakeTime()
    engine = ReplayEngine(settings, time.clock, time.sleep)
    for instance_id, model in (models or {"i": spec()}).items():
        engine.load(instance_id, model)
    return engine, time


def drain(engine: ReplayEngine, steps_max: int = 2000) -> dict[str, list[EngineOutput]]:
    outputs: dict[str, list[EngineOutput]] = {}
    for _ in range(steps_max):
        if not engine.has_work():
            return outputs
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    raise AssertionError("the engine never came to an end")


def tokens(outputs: list[EngineOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def run_one(asked: EngineRequest, settings: ReplaySettings = SETTINGS, **models: ModelSpec) -> list[EngineOutput]:
    engine, _ = engine_with(settings, **models)
    engine.add(asked)
    return drain(engine)[asked.request_id]
