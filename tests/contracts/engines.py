"""The engines that the contract is tested against. A new engine is one more factory in `ENGINES`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dataplane.engine import Engine
from dataplane.engines.replay import ReplayEngine, ReplaySettings
from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.messages import ModelSpec
from dataplane.profile import load_gpu_profile
from tests.dataplane.engines.torch.tiny import save_tiny

CONTEXT_TOKENS = 160
KV_TOKENS = 96
PROFILE = Path(__file__).parents[2] / "ops" / "profiles" / "h800.toml"


class Clock:
    """Time that passes a little whenever it is read, and as much as is slept."""

    now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 0.01
        return self.now_s

    def sleep(self, time_s: float) -> None:
        self.now_s += time_s


@dataclass(frozen=True, kw_only=True)
class Subject:
    """An empty engine with room for any one of `models` at a time and `KV_TOKENS` an instance, and two models."""

    engine: Engine
    models: tuple[ModelSpec, ModelSpec]
    oversized: ModelSpec


def torch_subject(folder: Path) -> Subject:
    """Two tiny models of different architectures, of which the arena holds one, and one that is wider."""
    kv_bytes_per_token = 2 * 3 * 2 * 12 * 4
    wanted: tuple[tuple[str, str, dict[str, int]], ...] = (
        ("first", "llama", {}),
        ("second", "qwen3", {}),
        ("oversized", "mistral", {"intermediate_size": 2000}),
    )
    specs = []
    for name, architecture, changes in wanted:
        path = folder / name
        if not path.exists():
            save_tiny(architecture, path, **changes)
        spec = ModelSpec(
            name=name,
            path=str(path),
            weights_bytes=(path / "model.safetensors").stat().st_size,
            kv_bytes_per_token=kv_bytes_per_token,
            context_tokens=CONTEXT_TOKENS,
        )
        specs.append(spec)
    settings = TorchEngineSettings(
        weights_bytes=max(spec.weights_bytes for spec in specs[:2]) + 50 * 256,
        kv_bytes_per_gpu=KV_TOKENS * kv_bytes_per_token,
        block_tokens=8,
        prefill_tokens_per_step_max=32,
        batch_max=4,
    )
    return Subject(engine=TorchEngine(settings, Clock()), models=(specs[0], specs[1]), oversized=specs[2])


def replay_subject(_: Path) -> Subject:
    """A 7B and a 13B model, of which the slot's weights hold one."""

    def spec(name: str, weights_bytes: int) -> ModelSpec:
        return ModelSpec(
            name=name, path="", weights_bytes=weights_bytes, kv_bytes_per_token=2**19, context_tokens=CONTEXT_TOKENS
        )

    clock = Clock()
    settings = ReplaySettings(
        profile=load_gpu_profile(PROFILE),
        weights_bytes=30 * 10**9,
        kv_bytes_per_gpu=KV_TOKENS * 2**19,
        batch_max=4,
    )
    engine = ReplayEngine(settings, clock, clock.sleep)
    models = (spec("seven", 14 * 10**9), spec("thirteen", 26 * 10**9))
    return Subject(engine=engine, models=models, oversized=spec("seventy", 140 * 10**9))


ENGINES: list[Callable[[Path], Subject]] = [torch_subject, replay_subject]
