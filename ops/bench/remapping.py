"""Four ways out when KV has no room, in the torch engine itself: layers given up, KV swapped, computed anew, refused.

A burst of requests overflows the KV of a slot that holds two models. *temporal*: all of the burst is the one model's,
and the other, which had given up its layers first, is asked once in the middle. *spatial*: both get half of the burst.

A CPU computes slowly and copies fast, so the wire is a slow one (`virtual_wire`): what counts is how long a layer's
load takes beside the computing of a layer. At a full batch a GPU reads as much KV as weights, so that this is about
half of its memory bandwidth over that of the wire; the three wires are those of `WIRES`. Prefills cost a CPU more,
beside decode steps, than they cost a GPU: computing anew looks worse here than there.
"""

import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

from dataplane.engine import EngineRequest
from dataplane.engines.pressure import KvPressure
from dataplane.engines.torch.engine import TorchEngine
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.remapping.settings import RemapSettings
from ops.bench.checkpoints import VOCABULARY, BenchModel, Shape, build_checkpoints
from ops.bench.virtual_wire import VirtualTime, VirtualWire
from ops.commands.screen import AsJson, Columns, notes, print_json, print_table

SHAPE = Shape(hidden=256, layers=20, head_dim=64)
SLAB_BYTES = 2**18
PROMPT_TOKENS = 16
WIRES = {"450 GB/s": 4.0e12 / 450e9 / 2, "PCIe 5": 3.35e12 / 55.6e9 / 2, "PCIe 4": 2.04e12 / 25e9 / 2}
"""Load over compute of a layer: GH200 (HBM of 4.0 TB/s), H100 (3.35 TB/s, 55.6 GB/s measured), A100 (2.04 TB/s)."""
WAYS: dict[str, tuple[KvPressure, RemapSettings]] = {
    "auto": ("auto", RemapSettings()),
    "remap": ("remap", RemapSettings()),
    "remap, uncapped": ("remap", RemapSettings(capped=False)),
    "m = alpha + 1": ("remap", RemapSettings(capped=False, frames_max=1)),
    "m = alpha + 2": ("remap", RemapSettings(capped=False, frames_min=2, frames_max=2)),
    "swap": ("swap", RemapSettings()),
    "recompute": ("recompute", RemapSettings()),
    "refuse": ("refuse", RemapSettings()),
}
SHARINGS = ("temporal", "spatial")


@dataclass(frozen=True, kw_only=True)
class Load:
    """`requests` at once, each of `PROMPT_TOKENS` and so many `tokens` more; `kv_requests` of them have room."""

    requests: int
    tokens: int
    kv_requests: int


@dataclass(frozen=True, kw_only=True)
class Served:
    """One run. `batch`: sequences with KV on the slot at most; the latencies are P99, in seconds; `other_ttft_s` that
    of the model that was asked in the middle, 0 in spatial sharing.
    """

    batch: float
    tokens_per_s: float
    tbt_s: float
    ttft_s: float
    other_ttft_s: float
    layers_lent: float
    swapped: float
    recomputed: float


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 1,
    requests: Annotated[int, typer.Option(min=2)] = 12,
    tokens: Annotated[int, typer.Option(min=2, help="Each answer's.")] = 16,
    kv_requests: Annotated[int, typer.Option(min=1, help="How many requests KV has room for.")] = 4,
    wire: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(WIRES)}; all if not given.")] = None,
    way: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(WAYS)}; all if not given.")] = None,
    sharing: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(SHARINGS)}.")] = None,
    threads: Annotated[int, typer.Option(min=1)] = 1,
    as_json: AsJson = False,
) -> None:
    """Measure the ways out of KV pressure; each figure is the median of its rounds.

    \b
    Examples:
      python -m ops.bench.remapping
      python -m ops.bench.remapping --wire "PCIe 5" --way remap --way swap --json
    """
    wires, ways, sharings = (
        _chosen(given, known, name)
        for given, known, name in ((wire, WIRES, "wire"), (way, WAYS, "way"), (sharing, SHARINGS, "sharing"))
    )
    torch.set_num_threads(threads)
    load = Load(requests=requests, tokens=tokens, kv_requests=kv_requests)
    with tempfile.TemporaryDirectory(prefix="tidepool-bench-") as folder:
        models = build_checkpoints(Path(folder), [SHAPE, SHAPE], "float32")
        rows = list(_measure(models, load, wires=wires, ways=ways, sharings=sharings, rounds=rounds))
    if as_json:
        print_json(rows)
        return
    columns: Columns = {
        "sharing": "sharing",
        "wire": "wire",
        "way": "way",
        "batch": lambda row: f"{row['batch']:.0f}",
        "tokens/s": lambda row: f"{row['tokens_per_s']:.0f}",
        "P99 TBT ms": lambda row: f"{row['tbt_s'] * 1000:.0f}",
        "P99 TTFT s": lambda row: f"{row['ttft_s']:.2f}",
        "other's TTFT s": lambda row: f"{row['other_ttft_s']:.2f}",
        "layers lent": lambda row: f"{row['layers_lent']:.0f}",
    }
    print_table(f"{requests} requests where {kv_requests} have room", columns, rows)


def _chosen(given: Sequence[str] | None, known: Sequence[str] | dict[str, Any], name: str) -> list[str]:
    unknown = [each for each in given or () if each not in known]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]}: must be one of {', '.join(known)}", param_hint=f"--{name}")
    return [each for each in known if not given or each in given]


def _measure(
    models: Sequence[BenchModel],
    load: Load,
    *,
    wires: Sequence[str],
    ways: Sequence[str],
    sharings: Sequence[str],
    rounds: int,
) -> Iterator[dict[str, Any]]:
    """A row for each sharing, wire and way. Ways take turns, so that all see the same noise."""
    layer_bytes, compute_s = _layer(models, load)
    notes().print(f"a layer computes for {compute_s * 1000:.2f} ms")
    for sharing in sharings:
        for wire in wires:
            bytes_per_s = layer_bytes / (WIRES[wire] * compute_s)
            found: dict[str, list[Served]] = {way: [] for way in ways}
            for number in range(rounds):
                for way in ways:
                    notes().print(f"{sharing}, {wire}, {way}, round {number + 1}")
                    found[way].append(_serve(models, load, way, bytes_per_s, spatial=sharing == "spatial"))
            for way in ways:
                named = {"sharing": sharing, "wire": wire, "load_over_compute": WIRES[wire], "way": way}
                yield named | _medians(found[way])


def _medians(rounds: Sequence[Served]) -> dict[str, float]:
    rows = [asdict(served) for served in rounds]
    return {name: median(row[name] for row in rows) for name in rows[0]}


def _engine(
    models: Sequence[BenchModel], load: Load, way: str, time: VirtualTime, bytes_per_s: float = 1e12
) -> TorchEngine:
    """A slot with both models' weights and little KV."""
    pressure, remap = WAYS[way]
    settings = TorchEngineSettings(
        weights_bytes=sum(model.weights_bytes for model in models) + 4 * SHAPE.layers * SLAB_BYTES,
        kv_bytes=_kv_bytes(load) * load.kv_requests,
        host_kv_bytes=_kv_bytes(load) * load.requests * 2,
        slab_bytes=SLAB_BYTES,
        batch_max=load.requests,
        kv_pressure=pressure,
        remap=replace(remap, settle_s=0.2),
    )
    engine = TorchEngine(settings, time.now_s, lambda _: VirtualWire(time, bytes_per_s))
    for model in models:
        engine.load(model.name, model.spec)
    return engine


def _warm_up(engine: TorchEngine, models: Sequence[BenchModel], bytes_per_s: float) -> None:
    """One request of each model. The rate of the wire is known then, as from many whole loads."""
    for model in models:
        engine.add(_request(model, f"first {model.name}", 4))
        while engine.has_work():
            engine.step()
    engine._weights._rate.s_per_byte = 1 / bytes_per_s  # noqa: SLF001


def _kv_bytes(load: Load) -> int:
    """KV of one request, in whole slabs."""
    per_token = 2 * SHAPE.layers * SHAPE.config["num_key_value_heads"] * SHAPE.head_dim * 4
    tokens = -(-(PROMPT_TOKENS + load.tokens) // 16) * 16
    return int(-(-per_token * tokens // SLAB_BYTES) * SLAB_BYTES)


def _layer(models: Sequence[BenchModel], load: Load) -> tuple[int, float]:
    """Its bytes, and how long it computes in a decode step of as many requests as have room, all weights there."""
    roomy = replace(load, requests=load.kv_requests, kv_requests=load.kv_requests + 1)
    with closing(_engine(models, roomy, "swap", VirtualTime())) as engine:
        for number in range(roomy.requests):
            engine.add(_request(models[0], str(number), load.tokens))
        while engine.has_work():
            engine.step()
        pooled = engine._models[models[0].name]  # noqa: SLF001
        ratio = pooled.decode_ratio
        assert ratio is not None, "it has decoded"
        context = roomy.requests * (PROMPT_TOKENS + load.tokens // 2)
        compute_s = ratio * pooled.estimate.latency.decode_s(context, roomy.requests) / SHAPE.layers
        return pooled.weights.skeleton.parts[1].size_bytes, compute_s


def _request(model: BenchModel, request_id: str, tokens: int) -> EngineRequest:
    prompt = tuple(random.Random(request_id).choices(range(VOCABULARY), k=PROMPT_TOKENS))
    return EngineRequest(
        request_id=request_id,
        instance_id=model.name,
        tier="IW-N",
        prompt=prompt,
        max_tokens=tokens,
        ignore_eos=True,
    )


def _serve(models: Sequence[BenchModel], load: Load, way: str, bytes_per_s: float, *, spatial: bool) -> Served:
    """One burst, after each model has served one request."""
    time = VirtualTime()
    with closing(_engine(models, load, way, time, bytes_per_s)) as engine:
        _warm_up(engine, models, bytes_per_s)
        asked = {str(number): time.now_s() for number in range(load.requests)}
        for number in asked:
            model = models[int(number) % 2 if spatial else 0]
            engine.add(_request(model, number, load.tokens))
        stamps: dict[str, list[float]] = {}
        batch = 0
        other = None if spatial else "other"
        half = load.requests * load.tokens // 2
        while engine.has_work():
            outputs = engine.step()
            now_s = time.now_s()
            for output in outputs:
                assert output.error is None, output.error
                stamps.setdefault(output.request_id, []).extend([now_s] * len(output.token_ids))
            batch = max(batch, sum(len(pooled.decoding_here) for pooled in engine._models.values()))  # noqa: SLF001
            if other is not None and sum(map(len, stamps.values())) >= half:
                asked[other] = now_s
                engine.add(_request(models[1], other, 4))
                other = None
        return _served(engine, asked, stamps, batch)


def _served(engine: TorchEngine, asked: dict[str, float], stamps: dict[str, list[float]], batch: int) -> Served:
    began_s, ended_s = min(asked.values()), max(times[-1] for times in stamps.values())
    gaps = [later - sooner for times in stamps.values() for sooner, later in pairwise(times)]
    firsts = [stamps[request_id][0] - asked_s for request_id, asked_s in asked.items() if request_id != "other"]
    stats = engine.stats()
    assert stats.pool is not None
    return Served(
        batch=batch,
        tokens_per_s=sum(map(len, stamps.values())) / (ended_s - began_s),
        tbt_s=_p99(gaps),
        ttft_s=_p99(firsts),
        other_ttft_s=stamps["other"][0] - asked["other"] if "other" in asked else 0.0,
        layers_lent=stats.pool.layers_moved.get("lent", 0),
        swapped=stats.extra["swapped_out"],
        recomputed=stats.extra["recomputed"],
    )


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


if __name__ == "__main__":
    typer.run(main)
