"""What `ops.bench.engine.remapping` runs: each group's cases, and what each case asks of which model, and when."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from dataplane.engines.core.pressure import KvPressure
from dataplane.engines.core.remapping.settings import RemapSettings

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
        """How many are on the slot."""
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
