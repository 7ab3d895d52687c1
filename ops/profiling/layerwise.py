"""Time to first token after a model switch: running layer by layer while weights load, against loading all first.

At most the shorter of load and prefill can be hidden. A CPU computes slowly and copies fast, so that little can be;
`balanced` slows the copies down until the load takes as long as the prefill, where half of the time can be saved.
"""

import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from itertools import count

import torch

from dataplane.engines.interface import EngineRequest
from dataplane.engines.torch.copies.base import Copy, CopyStream, Line
from dataplane.engines.torch.copies.open import make_stream
from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.memory.events import Event
from dataplane.protocol.tiers import Tier
from ops.profiling.checkpoints import VOCABULARY, BenchModel, DtypeName
from ops.profiling.figures import Figure, interleaved, medians

SOONER_MIN = 0.25
PROMPT_TOKENS = 512
ARENA_MODELS = 1.2
"""Size of the arena in sizes of the larger model: two never fit."""


class PacedStream:
    """A copy stream limited to `bytes_per_s`: no event is done before a link of that rate would complete the copy."""

    def __init__(self, inner: CopyStream, bytes_per_s: float) -> None:
        self._inner = inner
        self._bytes_per_s = bytes_per_s
        self._line = Line("paced")

    def submit(self, copies: Sequence[Copy], after: Sequence[Event] = ()) -> Event:
        def run() -> None:
            began_s = time.perf_counter()
            self._inner.submit(copies, after).wait()
            due_s = began_s + sum(copy.source.nbytes for copy in copies) / self._bytes_per_s
            time.sleep(max(0.0, due_s - time.perf_counter()))

        return self._line.submit(run)

    def close(self) -> None:
        self._line.close()
        self._inner.close()


class FirstTokens:
    """Times the first token of a random prompt."""

    def __init__(self, prompt_tokens: int) -> None:
        self._numbers = count()
        self._prompt = tuple(random.Random(0).choices(range(VOCABULARY), k=prompt_tokens))

    def token_s(self, engine: TorchEngine, model: BenchModel) -> float:
        """Seconds to the model's first token, whether its weights are resident or not."""
        request_id = str(next(self._numbers))
        began_s = time.perf_counter()
        engine.add(
            EngineRequest(
                request_id=request_id, instance_id=model.name, tier=Tier.IW_F, prompt=self._prompt, max_tokens=1
            )
        )
        while engine.has_work():
            for output in engine.step():
                assert output.error is None, output.error
        return time.perf_counter() - began_s

    def token_after_switch_s(self, engine: TorchEngine, model: BenchModel, other: BenchModel) -> float:
        """The same after the other model has evicted it."""
        self.token_s(engine, other)
        return self.token_s(engine, model)


def measure_layerwise(
    models: list[BenchModel],
    *,
    device: str,
    dtype: DtypeName,
    rounds: int,
    balanced: bool = False,
    prompt_tokens: int = PROMPT_TOKENS,
    step_tokens: int = PROMPT_TOKENS,
) -> Figure:
    """The share of time saved: 1 - layer-wise / load-then-run. Detail `most`: its upper bound."""
    model, other = models[:2]
    first_tokens = FirstTokens(prompt_tokens)
    with ExitStack() as opened:

        def engine(*, layerwise: bool, bytes_per_s: float | None = None) -> TorchEngine:
            opened_engine = _engine([model, other], device, dtype, layerwise, bytes_per_s, step_tokens)
            return opened.enter_context(closing(opened_engine))

        def run_s() -> float:
            first_tokens.token_s(whole, model)
            return first_tokens.token_s(whole, model)

        whole = engine(layerwise=False)
        bytes_per_s = None
        if balanced:
            bytes_per_s = model.weights_bytes / medians(interleaved({"run": run_s}, rounds=1))["run"]
            whole = engine(layerwise=False, bytes_per_s=bytes_per_s)
        layerwise = engine(layerwise=True, bytes_per_s=bytes_per_s)
        times_s = medians(
            interleaved(
                {
                    "layerwise": lambda: first_tokens.token_after_switch_s(layerwise, model, other),
                    "whole": lambda: first_tokens.token_after_switch_s(whole, model, other),
                    "run": lambda: first_tokens.token_s(whole, model),
                },
                rounds=rounds,
            )
        )
    load_s = max(0.0, times_s["whole"] - times_s["run"])
    return Figure(
        name=f"first token of {prompt_tokens} layer-wise, sooner by" + (", loading as long as running" * balanced),
        value=1 - times_s["layerwise"] / times_s["whole"],
        unit="",
        bound="at least",
        target=SOONER_MIN,
        details={
            "layerwise_s": times_s["layerwise"],
            "load_then_run_s": times_s["whole"],
            "run_s": times_s["run"],
            "most": min(times_s["run"], load_s) / times_s["whole"],
        },
    )


def _engine(
    models: list[BenchModel],
    device: str,
    dtype: DtypeName,
    layerwise: bool,
    bytes_per_s: float | None,
    step_tokens: int,
) -> TorchEngine:
    largest_bytes = max(model.weights_bytes for model in models)
    settings = TorchEngineSettings(
        device=device,
        dtype=dtype,
        weights_bytes=int(ARENA_MODELS * largest_bytes),
        kv_bytes=largest_bytes // 2,
        prefill_tokens_per_step_max=step_tokens,
        prefetch=False,
        prefix_cache=False,
        layerwise=layerwise,
    )
    engine = TorchEngine(settings, time.monotonic, _paced(device, bytes_per_s) if bytes_per_s else None)
    for model in models:
        engine.load(model.name, model.spec)
    return engine


def _paced(device: str, bytes_per_s: float) -> Callable[[str], CopyStream]:
    return lambda name: PacedStream(make_stream(torch.device(device), name), bytes_per_s)
