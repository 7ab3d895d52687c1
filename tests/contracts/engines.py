"""The engines that the contract is tested against. A new engine is one more factory in `ENGINES`."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from dataplane.engines.interface import Engine, EngineRequest
from dataplane.engines.replay.engine import ReplayEngine, ReplaySettings
from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.protocol.messages import ModelSpec
from dataplane.scheduling.deadlines import TimeSlices
from dataplane.scheduling.profile import load_gpu_profile
from dataplane.scheduling.schedule import TurnSettings
from tests.dataplane.engines.torch.drive import request
from tests.dataplane.engines.torch.rank_threads import start_threads
from tests.dataplane.engines.torch.tiny import save_tiny

CONTEXT_TOKENS = 160
KV_TOKENS = 96
PREFILL_TOKENS_PER_STEP_MAX = 32
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
    """An empty engine with room for the weights of any one of `models` at a time and the KV of `KV_TOKENS` tokens; a
    prefill slot's engine like it, which hands requests over; and two models. `close` ends both engines.
    """

    engine: Engine
    prefiller: Engine
    models: tuple[ModelSpec, ModelSpec]
    oversized: ModelSpec
    close: Callable[[], None] = lambda: None


_kv_files = count()


def torch_subject(folder: Path, *, host_kv_tokens: int = KV_TOKENS, mixed: bool = False, ranks: int = 1) -> Subject:
    """Two tiny models of different architectures, of which the arena holds one, and one that is wider. `mixed`: whether
    steps prefill beside the batch. Sizes are those of a rank.
    """
    kv_bytes_per_token = 2 * 3 * 2 * 12 * 4 // ranks
    block_tokens = 8
    slab_bytes = block_tokens * kv_bytes_per_token
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
            kv_bytes_per_token=ranks * kv_bytes_per_token,
            context_tokens=CONTEXT_TOKENS,
        )
        specs.append(spec)
    settings = TorchEngineSettings(
        weights_bytes=max(spec.weights_bytes for spec in specs[:2]) // ranks + 8 * slab_bytes,  # each begins a slab
        kv_bytes=KV_TOKENS * kv_bytes_per_token,
        kv_pressure="swap",
        host_kv_bytes=host_kv_tokens * kv_bytes_per_token,
        slab_bytes=slab_bytes,
        block_tokens=block_tokens,
        prefill_tokens_per_step_max=PREFILL_TOKENS_PER_STEP_MAX,
        batch_max=4,
        turns=TurnSettings(mixed_batches=mixed, time_slices="deadlines" if mixed else "rounds"),
        ranks=ranks,
        cache_folder=None if ranks == 1 else folder / "models",
    )
    handing_over = replace(settings, prefill_only=True, host_kv_file=folder / f"kv-{next(_kv_files)}")
    engine = TorchEngine(settings, time.monotonic, other_ranks=start_threads(ranks - 1))
    prefiller = TorchEngine(handing_over, time.monotonic, other_ranks=start_threads(ranks - 1))

    def close() -> None:
        engine.close()
        prefiller.close()

    return Subject(engine=engine, prefiller=prefiller, models=(specs[0], specs[1]), oversized=specs[2], close=close)


def two_ranks_subject(folder: Path, *, host_kv_tokens: int = KV_TOKENS) -> Subject:
    """As `torch_subject`, on slots of two GPUs."""
    return torch_subject(folder, host_kv_tokens=host_kv_tokens, ranks=2)


def replay_subject(
    _: Path, *, host_kv_tokens: int = KV_TOKENS, mixed: bool = False, time_slices: TimeSlices = "rounds"
) -> Subject:
    """A 7B and a 13B model, of which the slot's weights hold one. `mixed`: whether steps prefill beside the batch."""

    def spec(name: str, weights_bytes: int) -> ModelSpec:
        return ModelSpec(
            name=name, path="", weights_bytes=weights_bytes, kv_bytes_per_token=2**19, context_tokens=CONTEXT_TOKENS
        )

    clock = Clock()
    settings = ReplaySettings(
        profile=load_gpu_profile(PROFILE),
        weights_bytes=30 * 10**9,
        kv_bytes=KV_TOKENS * 2**19,
        host_kv_bytes=host_kv_tokens * 2**19,
        prefill_tokens_per_step_max=PREFILL_TOKENS_PER_STEP_MAX,
        batch_max=4,
        turns=TurnSettings(mixed_batches=mixed, time_slices=time_slices),
    )
    return Subject(
        engine=ReplayEngine(settings, clock, clock.sleep),
        prefiller=ReplayEngine(replace(settings, prefill_only=True), clock, clock.sleep),
        models=(spec("seven", 14 * 10**9), spec("thirteen", 26 * 10**9)),
        oversized=spec("seventy", 140 * 10**9),
    )


def torch_mixed_subject(folder: Path, *, host_kv_tokens: int = KV_TOKENS) -> Subject:
    """The same with steps that prefill beside the batch."""
    return torch_subject(folder, host_kv_tokens=host_kv_tokens, mixed=True)


def replay_mixed_subject(folder: Path, *, host_kv_tokens: int = KV_TOKENS) -> Subject:
    """The same with steps that prefill beside the batch, and slices by deadlines."""
    return replay_subject(folder, host_kv_tokens=host_kv_tokens, mixed=True, time_slices="deadlines")


def replay_deadlines_subject(folder: Path, *, host_kv_tokens: int = KV_TOKENS) -> Subject:
    """The same with slices by deadlines."""
    return replay_subject(folder, host_kv_tokens=host_kv_tokens, time_slices="deadlines")


ENGINES: list[Callable[..., Subject]] = [
    torch_subject,
    torch_mixed_subject,
    two_ranks_subject,
    replay_subject,
    replay_mixed_subject,
    replay_deadlines_subject,
]
"""Each takes a folder for checkpoints, and `host_kv_tokens`: of how many tokens KV fits in host memory."""


def ask(name: str, prompt_tokens: int = 9, **fields: Any) -> EngineRequest:
    """A request that runs to its 10 tokens; its name decides its prompt."""
    start = sum(name.encode())
    prompt = [(start + 7 * n) % 90 + 4 for n in range(prompt_tokens)]
    return request(name, prompt, **{"max_tokens": 10, "ignore_eos": True, **fields})
