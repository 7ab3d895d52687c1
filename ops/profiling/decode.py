"""Decode tokens per second of one model, against transformers' continuous batching and, if installed, vLLM's.

All run the same prompts greedily to the same number of tokens, with the same dtype and threads, in alternation. Only
the time in which all sequences decode counts.
"""

import random
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import count
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from dataplane.engines.interface import Engine, EngineRequest
from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.protocol.tiers import Tier
from ops.profiling.checkpoints import VOCABULARY, BenchModel, DtypeName
from ops.profiling.figures import Figure, interleaved, medians

RATIO_MIN = 1.0
SEQUENCES = 16
PROMPT_TOKENS = 128
TOKENS = 48
PAGE_TOKENS = 256
STEP_TOKENS_MAX = 512

Stamps = list[list[float]]
"""Time of each token of each sequence, in seconds."""


def measure_decode(models: list[BenchModel], *, device: str, dtype: DtypeName, rounds: int) -> Figure:
    """Tokens per second of this engine over those of transformers, for the first model."""
    chance = random.Random(0)
    prompts = [tuple(chance.choices(range(VOCABULARY), k=PROMPT_TOKENS)) for _ in range(SEQUENCES)]
    with closing(_engine(models[0], device, dtype)) as engine:
        rates = medians(
            interleaved(
                {
                    "tidepool": _rate_of(engine_run(engine, models[0], prompts)),
                    "transformers": _rate_of(_transformers_run(models[0], device, dtype, prompts)),
                },
                rounds=rounds,
            )
        )
    return Figure(
        name=f"decode, {SEQUENCES} sequences, against transformers",
        value=rates["tidepool"] / rates["transformers"],
        unit="x",
        bound="at least",
        target=RATIO_MIN,
        details={
            "tidepool_tokens_per_s": rates["tidepool"],
            "transformers_tokens_per_s": rates["transformers"],
        },
    )


def decode_rate(stamps: Stamps) -> float:
    """Tokens per second while all sequences decode: from the last first token to the first last one."""
    began_s = max(times_s[0] for times_s in stamps)
    ended_s = min(times_s[-1] for times_s in stamps)
    return sum(began_s < time_s <= ended_s for times_s in stamps for time_s in times_s) / (ended_s - began_s)


def _rate_of(run: Callable[[], Stamps]) -> Callable[[], float]:
    return lambda: decode_rate(run())


def _engine(model: BenchModel, device: str, dtype: DtypeName) -> TorchEngine:
    settings = TorchEngineSettings(
        device=device,
        dtype=dtype,
        weights_bytes=model.weights_bytes + model.weights_bytes // 4,
        kv_bytes=model.weights_bytes,
        prefill_tokens_per_step_max=STEP_TOKENS_MAX,
        prefix_cache=False,
    )
    engine = TorchEngine(settings, time.monotonic)
    engine.load(model.name, model.spec)
    return engine


def engine_run(
    engine: Engine,
    model: BenchModel,
    prompts: Sequence[tuple[int, ...]],
    tokens: int = TOKENS,
    clock: Callable[[], float] = time.perf_counter,
) -> Callable[[], Stamps]:
    """A run of all prompts at once, to so many tokens each, on an engine that has loaded the model as instance
    `model.name`. Times are those of `clock`.
    """
    numbers = count()

    def run() -> Stamps:
        stamps: dict[str, list[float]] = {}
        for prompt in prompts:
            request_id = str(next(numbers))
            stamps[request_id] = []
            engine.add(
                EngineRequest(
                    request_id=request_id,
                    instance_id=model.name,
                    tier=Tier.IW_F,
                    prompt=prompt,
                    max_tokens=tokens,
                    ignore_eos=True,
                )
            )
        while engine.has_work():
            outputs = engine.step()
            now_s = clock()
            for output in outputs:
                assert output.error is None, output.error
                stamps[output.request_id] += [now_s] * len(output.token_ids)
        return list(stamps.values())

    return run


def _transformers_run(
    model: BenchModel, device: str, dtype: DtypeName, prompts: Sequence[tuple[int, ...]]
) -> Callable[[], Stamps]:
    load: Any = AutoModelForCausalLM.from_pretrained
    peer = load(model.folder, dtype=getattr(torch, dtype), local_files_only=True).to(device).eval()
    generation = GenerationConfig(do_sample=False, max_new_tokens=TOKENS, eos_token_id=-1, pad_token_id=0)  # type: ignore[no-untyped-call]
    pages = -(-(PROMPT_TOKENS + TOKENS) // PAGE_TOKENS) * len(prompts)
    batching = ContinuousBatchingConfig(
        page_size=PAGE_TOKENS, num_blocks=2 * pages, max_batch_tokens=STEP_TOKENS_MAX, allow_block_sharing=False
    )

    def run() -> Stamps:
        outputs = peer.generate_batch(
            [list(prompt) for prompt in prompts],
            generation_config=generation,
            continuous_batching_config=batching,
            record_timestamps=True,
        )
        assert all(len(output.generated_tokens) == TOKENS for output in outputs.values()), "transformers stopped early"
        return [output.timestamps for output in outputs.values()]

    return run
