"""The first token after a switch: starting while layers arrive, against loading everything first."""

import random
import time
from contextlib import ExitStack, closing
from itertools import count

from dataplane.engine import EngineRequest
from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.settings import TorchEngineSettings
from ops.bench.checkpoints import VOCABULARY, BenchModel, DtypeName
from ops.bench.figures import Figure, interleaved, medians

SOONER_MIN = 0.25
PROMPT_TOKENS = 512
ROOM = 1.2
"""The arena, in sizes of the larger model: two never fit."""


def measure_layerwise(models: list[BenchModel], *, device: str, dtype: DtypeName, rounds: int) -> Figure:
    """By how much sooner the token comes: 1 - layer-wise / load-then-run. `most` is what hiding the shorter of load
    and run behind the longer would give.
    """
    first, second = models[:2]
    numbers = count()
    prompt = tuple(random.Random(0).choices(range(VOCABULARY), k=PROMPT_TOKENS))

    def first_token_s(engine: TorchEngine, model: BenchModel) -> float:
        request_id = str(next(numbers))
        began_s = time.perf_counter()
        engine.add(
            EngineRequest(request_id=request_id, instance_id=model.name, tier="IW-F", prompt=prompt, max_tokens=1)
        )
        while not engine.step():
            pass
        return time.perf_counter() - began_s

    with ExitStack() as opened:
        engines = [
            opened.enter_context(closing(_engine([first, second], device, dtype, layerwise=layerwise)))
            for layerwise in (True, False)
        ]

        def switched_s(engine: TorchEngine) -> float:
            first_token_s(engine, second)
            return first_token_s(engine, first)

        times_s = medians(
            interleaved(
                {
                    "layerwise": lambda: switched_s(engines[0]),
                    "load first": lambda: switched_s(engines[1]),
                    "there": lambda: first_token_s(engines[1], first),
                },
                rounds=rounds,
            )
        )
    whole_s, run_s = times_s["load first"], times_s["there"]
    return Figure(
        name=f"first token of {PROMPT_TOKENS} after a switch, layer-wise sooner by",
        value=1 - times_s["layerwise"] / whole_s,
        unit="",
        bound="at least",
        target=SOONER_MIN,
        details={
            "layerwise_s": times_s["layerwise"],
            "load_then_run_s": whole_s,
            "run_s": run_s,
            "most": min(run_s, max(0.0, whole_s - run_s)) / whole_s,
        },
    )


def _engine(models: list[BenchModel], device: str, dtype: DtypeName, *, layerwise: bool) -> TorchEngine:
    largest_bytes = max(model.weights_bytes for model in models)
    settings = TorchEngineSettings(
        device=device,
        dtype=dtype,
        weights_bytes=int(ROOM * largest_bytes),
        kv_bytes=largest_bytes // 2,
        prefill_tokens_per_step_max=PROMPT_TOKENS,
        prefetch=False,
        layerwise=layerwise,
    )
    engine = TorchEngine(settings, time.monotonic)
    for model in models:
        engine.load(model.name, model.spec)
    return engine
