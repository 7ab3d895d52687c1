"""Actions when KV memory runs out, in the torch engine itself: offloaded layers, swapped KV, recomputed KV, refusal.

A burst of requests overflows the KV of an engine that holds one, two or three models. A CPU computes slowly and copies
fast, so the interconnect is virtual (`ops.bench.engine.virtual_wire`).

What matters is the load time of a layer over its compute time. At a full batch a GPU reads as much KV as weights, so
that this is about half of its memory bandwidth over that of the interconnect. Compared with decode steps, prefills take
longer on a CPU than on a GPU, so recomputing looks worse here; and a step of more sequences takes longer, which on a
GPU it hardly does.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby, pairwise
from statistics import median
from typing import Annotated, Any, Literal

import torch
import typer

from dataplane.engines.core.pressure import KvPressure
from dataplane.engines.core.remapping.settings import RemapSettings
from dataplane.engines.interface import EngineRequest
from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.protocol.tiers import Tier
from ops.bench.engine.virtual_wire import VirtualTime, virtual_wires
from ops.bench.shared import chosen, work_folder
from ops.client.screen import AsJson, Columns, notes, print_json, print_table
from ops.faults.percentiles import percentile
from ops.profiling.checkpoints import VOCABULARY, BenchModel, Shape, build_checkpoints

WIRES = {"450 GB/s": 4.0e12 / 450e9 / 2, "PCIe 5": 3.35e12 / 55.6e9 / 2, "PCIe 4": 2.04e12 / 25e9 / 2}
"""Load over compute time of a layer: GH200 (HBM 4.0 TB/s), H100 (3.35 TB/s, 55.6 GB/s measured), A100 (2.04 TB/s)."""
BETWEEN = {f"{rate} GB/s": 4.0e12 / (rate * 1e9) / 2 for rate in (300, 200, 150, 100)}
"""Slower interconnects with the GPU of the first, among which the crossover lies."""
GRACE_HOPPER = "450 GB/s"
SETTLE_S = 0.2
CAPPED, UNCAPPED = RemapSettings(settle_s=SETTLE_S), RemapSettings(settle_s=SETTLE_S, capped=False)

Phase = Literal["burst", "other", "off peak"]
Sharing = Literal["alone", "off peak", "temporal", "spatial", "in turn"]


@dataclass(frozen=True, kw_only=True)
class Load:
    """`requests` at once, each of `tokens` output tokens; the KV cache has capacity for `kv_requests` of them."""

    requests: int
    tokens: int
    kv_requests: int


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request of a model, by number, sent once `after_tokens` tokens were made in all. `phase`: what it counts as."""

    model: int
    tokens: int
    after_tokens: int = 0
    phase: Phase = "burst"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run. `ratio`: load time over compute time of a layer; `way`: its name in the table; `asked`: its requests in
    the order in which they are sent, the first at once.
    """

    group: str
    sharing: Sharing
    wire: str
    ratio: float
    way: str
    pressure: KvPressure
    remap: RemapSettings
    asked: tuple[Asked, ...]

    @property
    def models(self) -> int:
        return 1 + max(each.model for each in self.asked)


def asked_of(load: Load, sharing: Sharing) -> tuple[Asked, ...]:
    """The requests of a burst that overflows KV.

    alone     of the only model, whose own layers are offloaded while it runs
    off peak  the same, and then one request at a time, as many as KV has capacity for
    temporal  of the first model; the other, whose layers are offloaded first, gets one request halfway
    spatial   half of them of each of two models, which are both active
    in turn   of the first of three; halfway the second, the least recently used, gets one request, and then the third
    """
    total = load.requests * load.tokens
    models = 2 if sharing == "spatial" else 1
    burst = [Asked(model=number % models, tokens=load.tokens) for number in range(load.requests)]
    later = {"temporal": 1, "in turn": 2}.get(sharing, 0)
    others = [
        Asked(model=1 + number, tokens=4, after_tokens=total * (2 + number) // 4, phase="other")
        for number in range(later)
    ]
    singles = [
        Asked(model=0, tokens=load.tokens, after_tokens=total + number * load.tokens, phase="off peak")
        for number in range(load.kv_requests if sharing == "off peak" else 0)
    ]
    return (*burst, *others, *singles)


def _case(
    group: str,
    load: Load,
    way: str,
    pressure: KvPressure,
    remap: RemapSettings = CAPPED,
    *,
    sharing: Sharing = "temporal",
    wire: str = GRACE_HOPPER,
) -> Case:
    return Case(
        group=group,
        sharing=sharing,
        wire=wire,
        ratio=(WIRES | BETWEEN)[wire],
        way=way,
        pressure=pressure,
        remap=remap,
        asked=asked_of(load, sharing),
    )


def _ways(load: Load) -> Iterator[Case]:
    """Every action, by sharing and interconnect. A forced action that is impossible is replaced by the cheapest."""
    ways: Mapping[str, tuple[KvPressure, RemapSettings]] = {
        "auto": ("auto", CAPPED),
        "remap": ("remap", CAPPED),
        "remap, not capped": ("remap", UNCAPPED),
        "swap": ("swap", CAPPED),
        "recompute": ("recompute", CAPPED),
        "refuse": ("refuse", CAPPED),
    }
    sharings: tuple[Sharing, ...] = ("temporal", "spatial")
    for sharing in sharings:
        for wire in WIRES:
            for way, (pressure, remap) in ways.items():
                yield _case("ways", load, way, pressure, remap, sharing=sharing, wire=wire)


def _crossover(load: Load) -> Iterator[Case]:
    """One model alone between the first interconnect and PCIe 5: down to which bandwidth its loads are hidden, and
    down to which offloading pays though they are not (figure 17).
    """
    for wire in (GRACE_HOPPER, *BETWEEN, "PCIe 5"):
        yield _case("crossover", load, "remap", "remap", sharing="alone", wire=wire)
        yield _case("crossover", load, "remap, not capped", "remap", UNCAPPED, sharing="alone", wire=wire)
        yield _case("crossover", load, "swap", "swap", sharing="alone", wire=wire)


def _frames(load: Load) -> Iterator[Case]:
    """M = alpha + 1 and alpha + 2 (section 7.5), of twice as many requests, so that alpha grows."""
    for wire in (GRACE_HOPPER, "200 GB/s"):
        for frames in (1, 2):
            remap = replace(UNCAPPED, frames_min=frames, frames_max=frames)
            yield _case("frames", _double(load), f"m = alpha + {frames}", "remap", remap, sharing="alone", wire=wire)


def _victims(load: Load) -> Iterator[Case]:
    """Whose layers are offloaded first (figure 11): as far as loads are hidden, and where the model waits for them."""
    for wire, capped in ((GRACE_HOPPER, CAPPED), ("PCIe 5", UNCAPPED)):
        for victims in ("mru", "lru"):
            way = victims if capped.capped else f"{victims}, not capped"
            yield _case("victims", load, way, "remap", replace(capped, victims=victims), sharing="in turn", wire=wire)


def _reversion(load: Load) -> Iterator[Case]:
    """A peak of twice as many requests, then one at a time (figure 16), which hides less."""
    for wire, capped in ((GRACE_HOPPER, CAPPED), ("200 GB/s", UNCAPPED)):
        for reverts in (True, False):
            way = ("reverts" if reverts else "never reverts") + ("" if capped.capped else ", not capped")
            remap = replace(capped, reverts=reverts)
            yield _case("reversion", _double(load), way, "remap", remap, sharing="off peak", wire=wire)


def _double(load: Load) -> Load:
    return replace(load, requests=2 * load.requests)


GROUPS: dict[str, Callable[[Load], Iterator[Case]]] = {
    "ways": _ways,
    "crossover": _crossover,
    "frames": _frames,
    "victims": _victims,
    "reversion": _reversion,
}


SHAPE = Shape(hidden=256, layers=20, head_dim=64)
PROMPT_TOKENS = 16
BLOCK_TOKENS = 4
"""A request starts with half of its final number of blocks, so that KV overflows while requests decode."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer of a model: its bytes, and its compute time in a decode step of as many requests as fit into KV."""

    size_bytes: float
    compute_s: float


@dataclass(frozen=True, kw_only=True)
class Served:
    """Figures of a run, in seconds. `batch`: the most sequences that one step decoded; `tbt_*`: inter-token latency of
    the burst; `step_p99_s`: duration of the decode step of each token, waits for loads included: the rest of
    `tbt_p99_s` is prefills, time slices of other models and time without KV. `wire_share`: the share of all steps spent
    waiting for loads. `other_ttft_s`: the longest of the models of later requests; `off_peak_tbt_s`: median step of the
    requests after the burst.
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
    """A request in flight: when it was sent, and when each token was made."""

    asked: Asked
    asked_s: float
    stamps_s: list[float] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)
    """Duration of the decode step of each token after the first."""


def measure_layer(models: Sequence[BenchModel], shape: Shape, load: Load) -> Layer:
    """Measure decode steps of the first model with all its weights resident."""
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
    """Serve the requests of a case, after each model has served one request, in order."""
    time = VirtualTime()
    bytes_per_s = layer.size_bytes / (case.ratio * layer.compute_s)
    with _open_engine(
        models[: case.models], shape, load, time, bytes_per_s=bytes_per_s, pressure=case.pressure, remap=case.remap
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
        layers_lent=stats.pool.layers_moved.get("offloaded", 0),
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
    """An engine with all the models' weights and little KV."""
    kv_bytes, slab_bytes = request_kv_bytes(shape, load), block_slab_bytes(shape)
    settings = TorchEngineSettings(
        weights_bytes=sum(model.weights_bytes for model in models) + 2 * len(models) * shape.layers * slab_bytes,
        kv_bytes=kv_bytes * load.kv_requests,
        host_kv_bytes=kv_bytes * load.requests * 4,
        slab_bytes=slab_bytes,
        block_tokens=BLOCK_TOKENS,
        batch_max=2 * load.requests,
        host_link_bytes_per_s=bytes_per_s,
        kv_pressure=pressure,
        remap=remap,
        prefix_cache=False,  # prompts repeat
    )
    with closing(TorchEngine(settings, time.now_s, virtual_wires(time, bytes_per_s))) as engine:
        for model in models:
            engine.load(model.name, model.spec)
        yield engine


def block_slab_bytes(shape: Shape) -> int:
    """The size of a slab that holds one block of KV."""
    block_bytes = 2 * shape.layers * shape.config["num_key_value_heads"] * shape.head_dim * 4 * BLOCK_TOKENS
    return int(2 ** (block_bytes - 1).bit_length())


def request_kv_bytes(shape: Shape, load: Load) -> int:
    """The KV of one request, in whole slabs."""
    return block_slab_bytes(shape) * -(-(PROMPT_TOKENS + load.tokens) // BLOCK_TOKENS)


def _serve(
    engine: TorchEngine, time: VirtualTime, models: Sequence[BenchModel], asked: Sequence[Asked]
) -> list[_Watched]:
    """Send each request once so many tokens were made, and step until all have ended."""
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
    phases: dict[Phase, list[_Watched]] = {"burst": [], "other": [], "off peak": []}
    for each in watched:
        phases[each.asked.phase].append(each)
    burst = phases["burst"]
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
        other_ttft_s=max((each.stamps_s[0] - each.asked_s for each in phases["other"]), default=0.0),
        off_peak_tbt_s=median([took_s for each in phases["off peak"] for took_s in each.steps_s] or [0.0]),
        **counts,
    )


def main(
    group: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(GROUPS)}; all if not given.")] = None,
    wire: Annotated[list[str] | None, typer.Option(help="Only these wires, e.g. 'PCIe 5'.")] = None,
    way: Annotated[list[str] | None, typer.Option(help="Only these ways, e.g. swap.")] = None,
    sharing: Annotated[list[str] | None, typer.Option(help="Only these sharings, e.g. spatial.")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    requests: Annotated[int, typer.Option(min=2)] = 12,
    tokens: Annotated[int, typer.Option(min=2, help="Each answer's.")] = 20,
    kv_requests: Annotated[int, typer.Option(min=1, help="How many requests KV has capacity for.")] = 4,
    threads: Annotated[int, typer.Option(min=1)] = 1,
    as_json: AsJson = False,
) -> None:
    """Measure the actions under KV pressure; each figure is the median of its rounds.

    \b
    Examples:
      python -m ops.bench.engine.remapping
      python -m ops.bench.engine.remapping --group ways --wire "PCIe 5" --way remap --way swap --rounds 1 --json
    """
    load = Load(requests=requests, tokens=tokens, kv_requests=kv_requests)
    cases = choose_cases(load, group, wire=wire, way=way, sharing=sharing)
    torch.set_num_threads(threads)
    with work_folder() as folder:
        models = build_checkpoints(folder, [SHAPE] * max(case.models for case in cases), "float32")
        layer = measure_layer(models, SHAPE, load)
        notes().print(f"a layer of {layer.size_bytes / 1e6:.1f} MB computes for {layer.compute_s * 1000:.2f} ms")
        rows = list(measure(models, load, cases, layer, rounds=rounds))
    if as_json:
        print_json({"layer": asdict(layer), "load": asdict(load), "rounds": rounds, "rows": rows})
        return
    for name, members in groupby(rows, key=lambda row: row["group"]):
        print_table(f"{name}: {requests} requests where KV holds {kv_requests}", COLUMNS, members)


def choose_cases(load: Load, groups: Sequence[str] | None, **only: Sequence[str] | None) -> list[Case]:
    """The cases of the groups, all if not given, that have one of each attribute's `only` values.

    Raises:
        typer.BadParameter: a group or a value that no case has.
    """
    cases = [case for name in chosen(groups, GROUPS, "--group") for case in GROUPS[name](load)]
    for attribute, values in only.items():
        wanted = chosen(values, dict.fromkeys(getattr(case, attribute) for case in cases), f"--{attribute}")
        cases = [case for case in cases if getattr(case, attribute) in wanted]
    if not cases:
        raise typer.BadParameter("no case has all of these values", param_hint="--group")
    return cases


def measure(
    models: Sequence[BenchModel], load: Load, cases: Sequence[Case], layer: Layer, *, rounds: int
) -> Iterator[dict[str, Any]]:
    """A row for each case. Rounds alternate between the cases of a group, so that noise affects all alike."""
    for name, members in groupby(cases, key=lambda case: case.group):
        of_group = list(members)
        found: list[list[Served]] = [[] for _ in of_group]
        for number in range(rounds):
            for case, served in zip(of_group, found, strict=True):
                notes().print(f"{name}, round {number + 1} of {rounds}: {case.sharing}, {case.wire}, {case.way}")
                served.append(serve_case(models, SHAPE, load, case, layer))
        for case, served in zip(of_group, found, strict=True):
            named = {"group": name, "sharing": case.sharing, "wire": case.wire, "ratio": case.ratio, "way": case.way}
            yield named | medians(served)


def medians(rounds: Sequence[Served]) -> dict[str, float]:
    """The median of each figure."""
    rows = [asdict(served) for served in rounds]
    return {name: median(row[name] for row in rows) for name in rows[0]}


COLUMNS: Columns = {
    "sharing": "sharing",
    "wire": "wire",
    "way": "way",
    "batch": lambda row: f"{row['batch']:.0f}",
    "tokens/s": lambda row: f"{row['tokens_per_s']:.0f}",
    "TBT p50/p99 ms": lambda row: f"{row['tbt_p50_s'] * 1000:.0f} / {row['tbt_p99_s'] * 1000:.0f}",
    "step p99 ms": lambda row: f"{row['step_p99_s'] * 1000:.0f}",
    "wire %": lambda row: f"{row['wire_share'] * 100:.0f}",
    "TTFT p99 s": lambda row: f"{row['ttft_p99_s']:.2f}",
    "other's s": lambda row: f"{row['other_ttft_s']:.2f}",
    "off peak ms": lambda row: f"{row['off_peak_tbt_s'] * 1000:.0f}",
    "lent/out/anew": lambda row: f"{row['layers_lent']:.0f}/{row['swapped']:.0f}/{row['recomputed']:.0f}",
}

if __name__ == "__main__":
    typer.run(main)
