"""One run of the torch engine whose KV overflows, over a virtual wire, and what came of it."""

import random
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from dataplane.engines.core.pressure import KvPressure
from dataplane.engines.core.remapping.settings import RemapSettings
from dataplane.engines.interface import EngineRequest
from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.protocol.tiers import Tier
from ops.bench.engine.remapping_groups import CAPPED, Asked, Case, Load, Part, asked_of
from ops.bench.engine.virtual_wire import VirtualTime, virtual_wires
from ops.faults.percentiles import percentile
from ops.profiling.checkpoints import VOCABULARY, BenchModel, Shape

SHAPE = Shape(hidden=256, layers=20, head_dim=64)
PROMPT_TOKENS = 16
BLOCK_TOKENS = 4
"""A request begins with half of the blocks that it ends with, so that KV overflows while requests decode."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Of a model: its bytes, and how long it computes in a decode step of as many requests as have room."""

    size_bytes: float
    compute_s: float


@dataclass(frozen=True, kw_only=True)
class Served:
    """What came of a run, in seconds. `batch`: sequences that one step decoded at most; `tbt_*`: between two tokens of
    the burst; `step_p99_s`: of the decode step that made each, its waits for loads included: what `tbt_p99_s` has more
    is prefills, turns of others and the time without KV. `wire_share`: of the time of all steps, waited for the wire.
    `other_ttft_s`: the longest of the models asked later; `off_peak_tbt_s`: median of the requests after the burst.
    """

    batch: float
    tokens_per_s: float
    tbt_p50_s: float
    tbt_p99_s: float
    step_p99_s: float
    ttft_p99_s: float
    other_ttft_s: float
    off_peak_tbt_s: float
    wire_share: float
    layers_lent: float
    swapped: float
    recomputed: float


@dataclass(kw_only=True)
class _Watched:
    """A request on its way: when it was asked, and when each token came."""

    asked: Asked
    asked_s: float
    stamps_s: list[float] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)
    """How long the decode step took that made each token after the first."""


def measure_layer(models: Sequence[BenchModel], shape: Shape, load: Load) -> Layer:
    """By decode steps of the first model with all its weights there."""
    roomy = Load(requests=load.kv_requests, tokens=load.tokens, kv_requests=load.kv_requests + 1)
    embedding_bytes = 2 * VOCABULARY * shape.hidden * 4
    layers_bytes = models[0].weights_bytes - embedding_bytes
    time = VirtualTime()
    with _open_engine(models[:1], shape, roomy, time, pressure="swap") as engine:
        watched = _serve(engine, time, models, asked_of(roomy, "alone"))
    step_s = median(took_s for each in watched for took_s in each.steps_s)
    share = layers_bytes / models[0].weights_bytes
    return Layer(size_bytes=layers_bytes / shape.layers, compute_s=share * step_s / shape.layers)


def serve_case(models: Sequence[BenchModel], shape: Shape, load: Load, case: Case, layer: Layer) -> Served:
    """Serve what a case asks, after each model has served one request, in order."""
    time = VirtualTime()
    there = models[: case.models]
    bytes_per_s = layer.size_bytes / (case.ratio * layer.compute_s)
    with _open_engine(
        there, shape, load, time, bytes_per_s=bytes_per_s, pressure=case.pressure, remap=case.remap
    ) as engine:
        for number in range(case.models):
            _serve(engine, time, models, [Asked(model=number, tokens=4)])
        began_s, waited_s = time.now_s(), time.waited_s
        watched = _serve(engine, time, models, case.asked)
        share = (time.waited_s - waited_s) / (time.now_s() - began_s)
        stats = engine.stats()
    assert stats.pool is not None
    return _served(
        watched,
        wire_share=share,
        layers_lent=stats.pool.layers_moved.get("lent", 0),
        swapped=stats.extra["swapped_out"],
        recomputed=stats.extra["recomputed"],
    )


@contextmanager
def _open_engine(
    models: Sequence[BenchModel],
    shape: Shape,
    load: Load,
    time: VirtualTime,
    *,
    bytes_per_s: float = 1e12,
    pressure: KvPressure,
    remap: RemapSettings = CAPPED,
) -> Iterator[TorchEngine]:
    """A slot with all the models' weights and little KV."""
    kv_bytes, slab_bytes = request_kv_bytes(shape, load), block_slab_bytes(shape)
    settings = TorchEngineSettings(
        weights_bytes=sum(model.weights_bytes for model in models) + 2 * len(models) * shape.layers * slab_bytes,
        kv_bytes=kv_bytes * load.kv_requests,
        host_kv_bytes=kv_bytes * load.requests * 4,
        slab_bytes=slab_bytes,
        block_tokens=BLOCK_TOKENS,
        batch_max=2 * load.requests,
        wire_bytes_per_s=bytes_per_s,
        kv_pressure=pressure,
        remap=remap,
    )
    with closing(TorchEngine(settings, time.now_s, virtual_wires(time, bytes_per_s))) as engine:
        for model in models:
            engine.load(model.name, model.spec)
        yield engine


def block_slab_bytes(shape: Shape) -> int:
    """A slab that has room for one block of KV."""
    block_bytes = 2 * shape.layers * shape.config["num_key_value_heads"] * shape.head_dim * 4 * BLOCK_TOKENS
    return int(2 ** (block_bytes - 1).bit_length())


def request_kv_bytes(shape: Shape, load: Load) -> int:
    """KV of one request, in whole slabs."""
    return block_slab_bytes(shape) * -(-(PROMPT_TOKENS + load.tokens) // BLOCK_TOKENS)


def _serve(
    engine: TorchEngine, time: VirtualTime, models: Sequence[BenchModel], asked: Sequence[Asked]
) -> list[_Watched]:
    """Ask each once so many tokens were made, and step to the end."""
    coming = list(enumerate(asked))
    watched: dict[str, _Watched] = {}
    made = 0
    while coming or engine.has_work():
        while coming and coming[0][1].after_tokens <= made:
            number, each = coming.pop(0)
            engine.add(_request(models[each.model], str(number), each.tokens))
            watched[str(number)] = _Watched(asked=each, asked_s=time.now_s())
        began_s = time.now_s()
        outputs = engine.step()
        now_s = time.now_s()
        for output in outputs:
            assert output.error is None, output.error
            request = watched[output.request_id]
            for _ in output.token_ids:
                if request.stamps_s:
                    request.steps_s.append(now_s - began_s)
                request.stamps_s.append(now_s)
                made += 1
    return list(watched.values())


def _request(model: BenchModel, request_id: str, tokens: int) -> EngineRequest:
    prompt = tuple(random.Random(request_id).choices(range(VOCABULARY), k=PROMPT_TOKENS))
    return EngineRequest(
        request_id=request_id,
        instance_id=model.name,
        tier=Tier.IW_N,
        prompt=prompt,
        max_tokens=tokens,
        ignore_eos=True,
    )


def _served(watched: Sequence[_Watched], **counts: float) -> Served:
    parts: dict[Part, list[_Watched]] = {"burst": [], "other": [], "off peak": []}
    for each in watched:
        parts[each.asked.part].append(each)
    burst = parts["burst"]
    began_s, ended_s = min(each.asked_s for each in burst), max(each.stamps_s[-1] for each in burst)
    gaps_s = [later - sooner for each in burst for sooner, later in pairwise(each.stamps_s)]
    in_step: dict[float, int] = {}
    for each in burst:
        for stamp_s in each.stamps_s[1:]:
            in_step[stamp_s] = in_step.get(stamp_s, 0) + 1
    return Served(
        batch=max(in_step.values()),
        tokens_per_s=sum(len(each.stamps_s) for each in burst) / (ended_s - began_s),
        tbt_p50_s=median(gaps_s),
        tbt_p99_s=percentile(gaps_s, 0.99),
        step_p99_s=percentile([took_s for each in burst for took_s in each.steps_s], 0.99),
        ttft_p99_s=percentile([each.stamps_s[0] - each.asked_s for each in burst], 0.99),
        other_ttft_s=max((each.stamps_s[0] - each.asked_s for each in parts["other"]), default=0.0),
        off_peak_tbt_s=median([took_s for each in parts["off peak"] for took_s in each.steps_s] or [0.0]),
        **counts,
    )
