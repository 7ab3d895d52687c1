"""The cases of `ops.bench.engine.remapping`, and one run of each: the torch engine over a virtual wire.

The wire has any rate, in time that a crowded machine does not disturb: the CPU time of the calling thread, and what it
has waited for the wire. Copies are made at once and cost nothing; their event passes when a wire of that rate would be
done. One thread calls everything.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Literal

from dataplane.engines.core.pressure import KvPressure
from dataplane.engines.core.remapping.settings import RemapSettings
from dataplane.engines.interface import EngineRequest
from dataplane.engines.torch.copies.base import Copy, flat_bytes
from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.memory.events import Event
from dataplane.protocol.tiers import Tier
from ops.faults.percentiles import percentile
from ops.profiling.checkpoints import VOCABULARY, BenchModel, Shape

POLL_S = 0.0002
"""What it costs to ask whether a copy is over that is not: the engine sleeps as long between two looks."""


class VirtualTime:
    """A clock that only its own thread's work and waits move. `waited_s`: the waits together."""

    def __init__(self) -> None:
        self._ahead_s = 0.0
        self.waited_s = 0.0

    def now_s(self) -> float:
        """Seconds since some moment."""
        return time.thread_time() + self._ahead_s

    def undo(self, began_s: float) -> None:
        """What was done since `began_s` cost nothing."""
        self._ahead_s -= self.now_s() - began_s

    def wait_until(self, due_s: float) -> None:
        """Let it be `due_s`, if it is not later already."""
        waits_s = max(0.0, due_s - self.now_s())
        self._ahead_s += waits_s
        self.waited_s += waits_s


@dataclass(eq=False, kw_only=True)
class Arrival:
    """The event of copies that are over at `due_s`."""

    time: VirtualTime
    due_s: float
    error: BaseException | None = None

    def done(self) -> bool:
        """Whether they are over; a look before costs `POLL_S`."""
        if self.time.now_s() < self.due_s:
            self.time.wait_until(self.time.now_s() + POLL_S)
        return self.time.now_s() >= self.due_s

    def wait(self) -> None:
        """Let it be `due_s`."""
        self.time.wait_until(self.due_s)


class VirtualWire:
    """A copy stream over a wire of `bytes_per_s`, one submission after another."""

    def __init__(self, time: VirtualTime, bytes_per_s: float) -> None:
        self._time = time
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    def submit(self, copies: Sequence[Copy], after: Sequence[Event] = ()) -> Event:
        """See `CopyStream`. What `after` names is over: copies are made at once, and one wire keeps their order."""
        began_s = self._time.now_s()
        for copy in copies:
            flat_bytes(copy.target).copy_(flat_bytes(copy.source))
        self._time.undo(began_s)
        size_bytes = sum(copy.source.nbytes for copy in copies)
        self._free_s = max(self._free_s, began_s) + size_bytes / self._bytes_per_s
        return Arrival(time=self._time, due_s=self._free_s)

    def close(self) -> None:
        """Nothing is open."""


def virtual_wires(time: VirtualTime, bytes_per_s: float) -> Callable[[str], VirtualWire]:
    """An engine's copy streams by name: what comes in shares one way of the wire, KV that goes out has the other."""
    into, out = VirtualWire(time, bytes_per_s), VirtualWire(time, bytes_per_s)
    return lambda name: out if name == "kv_out" else into


WIRES = {"450 GB/s": 4.0e12 / 450e9 / 2, "PCIe 5": 3.35e12 / 55.6e9 / 2, "PCIe 4": 2.04e12 / 25e9 / 2}
"""Load over compute of a layer: GH200 (HBM of 4.0 TB/s), H100 (3.35 TB/s, 55.6 GB/s measured), A100 (2.04 TB/s)."""
BETWEEN = {f"{rate} GB/s": 4.0e12 / (rate * 1e9) / 2 for rate in (300, 200, 150, 100)}
"""Slower wires beside the GPU of the first, where the crossover is looked for."""
GRACE_HOPPER = "450 GB/s"
SETTLE_S = 0.2
CAPPED, UNCAPPED = RemapSettings(settle_s=SETTLE_S), RemapSettings(settle_s=SETTLE_S, capped=False)

Part = Literal["burst", "other", "off peak"]
Sharing = Literal["alone", "off peak", "temporal", "spatial", "in turn"]


@dataclass(frozen=True, kw_only=True)
class Load:
    """`requests` at once, each of `tokens` to make; `kv_requests` of them have room."""

    requests: int
    tokens: int
    kv_requests: int


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request of a model, by number, once `after_tokens` tokens were made in all. `part`: what it is counted as."""

    model: int
    tokens: int
    after_tokens: int = 0
    part: Part = "burst"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run. `ratio`: load over compute of a layer; `way`: its name in the table. `asked`: in the order in which they
    are asked; the first is asked at once.
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
    """A burst that overflows KV.

    alone     of the only model, which gives up layers while it runs
    off peak  the same, and then one request at a time, as many as have room
    temporal  of the first model; the other, which gives up layers first, is asked once, halfway
    spatial   half of it of each of two models, which are active both
    in turn   of the first of three; then the second, which was used longest ago, is asked, halfway, and then the third
    """
    total = load.requests * load.tokens
    models = 2 if sharing == "spatial" else 1
    burst = [Asked(model=number % models, tokens=load.tokens) for number in range(load.requests)]
    later = {"temporal": 1, "in turn": 2}.get(sharing, 0)
    others = [
        Asked(model=1 + number, tokens=4, after_tokens=total * (2 + number) // 4, part="other")
        for number in range(later)
    ]
    singles = [
        Asked(model=0, tokens=load.tokens, after_tokens=total + number * load.tokens, part="off peak")
        for number in range(load.kv_requests if sharing == "off peak" else 0)
    ]
    return (*burst, *others, *singles)


def cases(group: str, load: Load) -> Iterator[Case]:
    """Those of a group."""
    yield from GROUPS[group](load)


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
    """Every way out, by sharing and wire. Whatever is forced is done where it can be, and else the cheapest."""
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
    """Between the first wire and PCIe 5, one model alone: up to which its layers are hidden, and up to which it pays
    to give them up though they are not (figure 17).
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
    """Whose layers go first (figure 11): as far as that is hidden, and where it is not and the model is waited for."""
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
