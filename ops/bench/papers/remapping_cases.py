"""What the paper on remapping (Oneiros) compares, as runs of the simulator: its models, arrivals and rivals, and ours.

The rates of its figures are not in its text but for OPT-13b's, 1 and 10 a second; here they are those at which the
least of the rivals begins to lack memory, and twice that.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dataplane.engines.core.remapping.settings import RemapSettings
from ops.bench.papers.remapping_engine import SharedSettings, Sharing, Way
from ops.bench.papers.remapping_load import COMBINATIONS, GRACE_HOPPER, WIRES, Lengths, SharedLoad, Wire

VLLM, PIE, ONEIROS, TIDEPOOL = "vLLM", "Pie", "Oneiros", "Tidepool"
SWEEP_BYTES_PER_S = (10e9, 25e9, 55.6e9, 100e9, 200e9, 427e9, 900e9)
BOTH_WAYS = 1.8
"""Both ways together, of one way: an assumption."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run. `rival`: who serves. `off_peak_rate`: as many requests again follow, at this rate; these are counted."""

    group: str
    combination: str
    load: SharedLoad
    rival: str
    settings: SharedSettings
    off_peak_rate: float | None = None

    @property
    def title(self) -> str:
        """The load, in a word."""
        rates = self.load.rates
        rate = f"{sum(rates):g}" if len(set(rates)) == 1 else "+".join(f"{rate:g}" for rate in rates)
        return f"{self.combination} {'/'.join(dict.fromkeys(self.load.lengths))} {rate}/s"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """How much to run: requests of each run, and the seed of their lengths."""

    requests: int = 200
    seed: int = 0

    def load(self, combination: str, rates: Sequence[float], lengths: Sequence[Lengths]) -> SharedLoad:
        """For a combination of models: one rate is that of all together, one kind of lengths is every model's."""
        models = len(COMBINATIONS[combination])
        return SharedLoad(
            rates=rates if len(rates) == models else [rates[0] / models] * models,
            lengths=lengths if len(lengths) == models else [lengths[0]] * models,
            requests=self.requests,
            seed=self.seed,
        )


def rivals(wire: Wire, sharing: Sharing) -> dict[str, SharedSettings]:
    """Who serves: the three of the paper; and this project's, which has one KV memory for all models in any case."""

    def settings(way: Way, *, shared: bool) -> SharedSettings:
        return SharedSettings(way=way, wire=wire, sharing=sharing, shared_kv=shared)

    return {
        VLLM: settings("recompute", shared=False),
        PIE: settings("pie", shared=False),
        ONEIROS: settings("remap", shared=True),
        "recompute, one KV": settings("recompute", shared=True),
        "swap, one KV": settings("swap", shared=True),
        "pie, one KV": settings("pie", shared=True),
        TIDEPOOL: settings("auto", shared=True),
    }


def beside_rivals(
    group: str, combination: str, load: SharedLoad, *, sharing: Sharing = "temporal", wire: Wire = GRACE_HOPPER
) -> Iterator[Case]:
    """All that serve, with one load."""
    for rival, settings in rivals(wire, sharing).items():
        yield Case(group=group, combination=combination, load=load, rival=rival, settings=settings)


def with_settings(
    group: str,
    combination: str,
    load: SharedLoad,
    choices: Mapping[str, RemapSettings],
    off_peak_rate: float | None = None,
) -> Iterator[Case]:
    """vLLM, and Oneiros with different settings."""
    plain = rivals(GRACE_HOPPER, "temporal")
    changed = {name: replace(plain[ONEIROS], remap=remap) for name, remap in choices.items()}
    for rival, settings in {VLLM: plain[VLLM], **changed}.items():
        yield Case(
            group=group,
            combination=combination,
            load=load,
            rival=rival,
            settings=settings,
            off_peak_rate=off_peak_rate,
        )


def temporal(asked: Asked) -> Iterator[Case]:
    """Section 7.2, figure 8. Alpaca's short requests never fill the KV of C1, whatever their rate."""
    for rate in (3.0, 6.0):
        yield from beside_rivals("temporal", "C1", asked.load("C1", [rate], ["sharegpt"]))
    for rate in (8.0, 16.0):
        yield from beside_rivals("temporal", "C2", asked.load("C2", [rate], ["alpaca"]))
    for rate in (1.0, 2.0):
        yield from beside_rivals("temporal", "C2", asked.load("C2", [rate], ["sharegpt"]))


def uneven(asked: Asked) -> Iterator[Case]:
    """Section 7.2, figure 9: different rates."""
    for rates in ((0.5, 1.5), (1.5, 0.5)):
        yield from beside_rivals("uneven", "C2", asked.load("C2", rates, ["sharegpt"]))


def inputs(asked: Asked) -> Iterator[Case]:
    """Section 7.2, figure 10: long requests for one model, short ones for the other."""
    both: tuple[tuple[Lengths, Lengths], ...] = (("long", "short"), ("short", "long"))
    for lengths in both:
        yield from beside_rivals("inputs", "C2", asked.load("C2", [1.0], lengths))


def spatial(asked: Asked) -> Iterator[Case]:
    """Section 7.3, figure 12."""
    for rate in (2.0, 4.0):
        yield from beside_rivals("spatial", "C1", asked.load("C1", [rate], ["sharegpt"]), sharing="spatial")


def single(asked: Asked) -> Iterator[Case]:
    """Section 7.4, figure 14: one model, against Pie; and 7.3's strict isolation, which is one model, too."""
    for rate in (10.0, 60.0):
        yield from beside_rivals("single", "OPT-13b", asked.load("OPT-13b", [rate], ["alpaca"]))
    yield from beside_rivals("single", "OPT-13b", asked.load("OPT-13b", [2.0], ["sharegpt"]))


def victims(asked: Asked) -> Iterator[Case]:
    """Section 7.2, figure 11: whose layers go first. Without caps a model that lost many is waited for."""
    choices = {
        "mru": RemapSettings(victims="mru"),
        "lru": RemapSettings(victims="lru"),
        "mru, not capped": RemapSettings(victims="mru", capped=False),
        "lru, not capped": RemapSettings(victims="lru", capped=False),
    }
    for rate in (1.5, 3.0):
        yield from with_settings("victims", "C1", asked.load("C1", [rate], ["sharegpt"]), choices)


def frames(asked: Asked) -> Iterator[Case]:
    """Section 7.5, figure 15: m. Capped by its own inequality, or (alpha up to 10) the same alpha for each m."""
    ten = RemapSettings(capped=False, share_max=0.25)
    choices = {
        "m = alpha + 1": RemapSettings(frames_max=1),
        "m = alpha + 2": RemapSettings(frames_min=2, frames_max=2),
        "least m": RemapSettings(),
        "m = alpha + 1, alpha to 10": replace(ten, frames_max=1),
        "m = alpha + 2, alpha to 10": replace(ten, frames_min=2, frames_max=2),
        "least m, alpha to 10": ten,
    }
    for rate in (2.0, 4.0):
        yield from with_settings("frames", "OPT-13b", asked.load("OPT-13b", [rate], ["sharegpt"]), choices)


def reversion(asked: Asked) -> Iterator[Case]:
    """Section 7.6.1, figure 16: a peak, then one request a second (Alpaca) or one in ten (ShareGPT)."""
    half = RemapSettings(capped=False, share_max=0.5)
    choices = {
        "reverts": RemapSettings(),
        "never reverts": RemapSettings(reverts=False),
        "reverts, alpha to 20": half,
        "never reverts, alpha to 20": replace(half, reverts=False),
    }
    alpaca, sharegpt = (
        asked.load("OPT-13b", [60.0], ["alpaca"]),
        asked.load("OPT-13b", [4.0], ["sharegpt"]),
    )
    yield from with_settings("reversion", "OPT-13b", alpaca, choices, off_peak_rate=1.0)
    yield from with_settings("reversion", "OPT-13b", sharegpt, choices, off_peak_rate=0.1)


def caps(asked: Asked) -> Iterator[Case]:
    """Section 7.6.2, figure 17: whether what is not hidden is given up, too."""
    choices = {"capped": RemapSettings(), "not capped": RemapSettings(capped=False)}
    for rate in (1.0, 2.0):
        yield from with_settings("caps", "OPT-13b", asked.load("OPT-13b", [rate], ["sharegpt"]), choices)


def wires(asked: Asked) -> Iterator[Case]:
    """The paper's wire, PCIe 5 and PCIe 4."""
    for wire in WIRES:
        yield from beside_rivals("wires", "C1", asked.load("C1", [6.0], ["sharegpt"]), wire=wire)
        yield from beside_rivals("wires", "OPT-13b", asked.load("OPT-13b", [2.0], ["sharegpt"]), wire=wire)


def crossover(asked: Asked) -> Iterator[Case]:
    """One model on wires from slow to fast."""
    for bytes_per_s in SWEEP_BYTES_PER_S:
        both_bytes_per_s = BOTH_WAYS * bytes_per_s
        wire = Wire(name=f"{bytes_per_s / 1e9:g} GB/s", bytes_per_s=bytes_per_s, both_bytes_per_s=both_bytes_per_s)
        yield from beside_rivals("crossover", "OPT-13b", asked.load("OPT-13b", [2.0], ["sharegpt"]), wire=wire)


GROUPS = {
    each.__name__: each
    for each in (temporal, uneven, inputs, spatial, single, victims, frames, reversion, caps, wires, crossover)
}
