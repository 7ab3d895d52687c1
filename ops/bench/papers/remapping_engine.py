"""A worker whose models share its memory, when KV runs out: the replay engine in simulated time, with one action each.

    recompute  preempt the last request of the batch, and prefill it again once KV memory is free (vLLM)
    swap       swap its KV to host memory and back, request by request
    pie        KV beyond the worker's memory is in host memory, transferred out and in again in every step, as much as
               the step hides (Pie); beyond that, recompute
    remap      offload weight layers (Oneiros); beyond that, recompute
    auto       the cheapest of remap, swap, recompute and keeping a prompt waiting

Time slices, victims, layers and all actions but Pie's are the engine's own. Temporal sharing: models have time slices
as on a live node. Spatial sharing: all models decode at once, approximated by time slices of one step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from dataplane.engines.core.kv_allocator import choose_victim
from dataplane.engines.core.pressure import KvPressure, Shortage
from dataplane.engines.core.remapping.actions import Action
from dataplane.engines.core.remapping.settings import RemapSettings
from dataplane.engines.core.slot_engine import Made
from dataplane.engines.interface import EngineRequest
from dataplane.engines.replay.engine import ReplayEngine, ReplaySettings
from dataplane.engines.replay.kv import KvShare, SequenceKv
from dataplane.engines.replay.models import ReplayModel
from dataplane.protocol.messages import ModelSpec
from dataplane.protocol.tiers import Tier
from dataplane.scheduling.decode import DecodeSettings
from dataplane.scheduling.prefill import PrefillSettings
from dataplane.scheduling.profile import GpuProfile, ModelProfile
from dataplane.scheduling.schedule import Turn, TurnSettings
from ops.bench.papers.remapping_load import CONTEXT_TOKENS, Ask, SharedModel, Wire
from ops.bench.shared import SimulatedClock, serve
from ops.faults.percentiles import percentile

Way = Literal["recompute", "swap", "pie", "remap", "auto"]
Sharing = Literal["temporal", "spatial"]
SPATIAL = DecodeSettings(quota_min_s=1e-6, quota_max_s=1e-6)
_PRESSURE: dict[Way, KvPressure] = {
    "recompute": "recompute",
    "swap": "swap",
    "pie": "recompute",
    "remap": "remap",
    "auto": "auto",
}


@dataclass(frozen=True, kw_only=True)
class SharedSettings:
    """`shared_kv`: one KV memory for all models, else one each; with remapping it is always shared.
    `prefill_tokens_max`: tokens that a step prefills at most. `mixed`: beside the batch that decodes, as far as the
    objectives allow; else a step prefills or decodes. `step_by_step`: with mixed steps, models take turns so, and share
    the tokens that one step may prefill; else turns have their usual minimum.
    """

    way: Way
    wire: Wire
    sharing: Sharing = "temporal"
    shared_kv: bool = False
    batch_max: int = 256
    prefill_tokens_max: int = 2048
    mixed: bool = False
    step_by_step: bool = True
    remap: RemapSettings = field(default_factory=RemapSettings)

    @property
    def remaps(self) -> bool:
        return self.way in {"remap", "auto"}


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Layers offloaded and reclaimed, allocations that offloading could not cover, requests preempted for recomputing
    and swapped out, and the most bytes of weights offloaded at a time.
    """

    deepened: int
    reverted: int
    not_covered: int
    recomputed: int
    swapped: int
    given_bytes_max: int


@dataclass(frozen=True, kw_only=True)
class SharedFigures:
    """Figures of a run.

    Attributes:
        tokens_per_s: output tokens, from time 0 to the last one.
        tbt_p50_s, tbt_p99_s: inter-token latency of all tokens.
        step_p99_s: duration of decode steps, mixed ones included, weighted by their tokens; the rest of `tbt_p99_s` is
            prefills, time slices of other models and time without KV.
        tpot_p50_s, tpot_p99_s: each request's mean inter-token latency.
        normalized_p50_s, normalized_p99_s: each request's time from arrival to its last token, over its tokens.
        batch_mean: mean batch over the time of decode steps.
    """

    tokens_per_s: float
    tbt_p50_s: float
    tbt_p99_s: float
    step_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    normalized_p50_s: float
    normalized_p99_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    batch_mean: float
    batch_peak: int
    counts: Counts


class SharedEngine(ReplayEngine):
    """The replay engine with all models resident, whose KV may be limited to `shares` by model, and with Pie's action.
    `decoded`: whether its last step decoded.
    """

    def __init__(self, models: Sequence[SharedModel], settings: SharedSettings, clock: SimulatedClock) -> None:
        self.decoded = False
        self.given_bytes_max = 0
        self._served = {model.name: model for model in models}
        self._both_bytes_per_s = settings.wire.both_bytes_per_s if settings.way == "pie" else 0.0
        self.shares = _shares_of(models, settings)
        self._share_bytes = {name: share.capacity_bytes for name, share in self.shares.items()}
        self._pass_time = clock.sleep
        super().__init__(_replay_settings(models, settings), clock, clock.sleep)
        before_s = -2 * sum(model.layers_bytes for model in models) / settings.wire.bytes_per_s
        for model in models:
            self.load(model.name, _spec_of(model))
            self.weights.load(self.models[model.name].weights, before_s)

    def _new_model(self, spec: ModelSpec, gpus: int) -> ReplayModel:
        model = super()._new_model(spec, gpus)
        model.weights = replace(model.weights, layers=self._served[spec.name].layers)
        model.share = self.shares.get(spec.name)
        return model

    def _on_shortage(self, shortage: Shortage) -> Action | None:
        """Preempt a sequence of the same share where the engine would choose another share's, which frees nothing."""
        asking = shortage.sequence
        if shortage.victim is None or shortage.victim.kv.share is asking.kv.share:
            return super()._on_shortage(shortage)
        own = [one for one in self.models[asking.model].decoding_here if not one.just_resumed]
        victim = choose_victim(own, asking)
        if victim is None:
            return "refuse"
        self._allocator.recomputed_total += 1
        self.requests.queue(victim)
        return "remap"  # there is more room now

    def _run(self, turn: Turn, model: ReplayModel, now_s: float) -> Made[SequenceKv] | None:
        share = self.shares.get(turn.model)
        if self._both_bytes_per_s and share is not None:
            context = sum(sequence.cached for sequence in model.decoding)
            step_s = model.latency.decode_s(context, max(len(model.decoding), 1))
            outside_bytes = round(step_s * self._both_bytes_per_s / 2)
            share.capacity_bytes = self._share_bytes[turn.model] + outside_bytes
        made = super()._run(turn, model, now_s)
        if self._both_bytes_per_s and share is not None and made is not None:
            moved_s = 2 * max(share.used_bytes - self._share_bytes[turn.model], 0) / self._both_bytes_per_s
            self._pass_time(max(moved_s - (self._clock() - now_s), 0.0))
        self.decoded = turn.kind == "decode"
        self.given_bytes_max = max(self.given_bytes_max, self.weights.offloaded_bytes)
        return made

    @property
    def counts(self) -> Counts:
        return Counts(
            deepened=self.pressure.layers_moved["offloaded"],
            reverted=self.pressure.layers_moved["reclaimed"],
            not_covered=self.pressure.declined.total(),
            recomputed=self._allocator.recomputed_total,
            swapped=self.kv.swapped_out_total,
            given_bytes_max=self.given_bytes_max,
        )


class SharedSlot:
    """`gaps_s`: all inter-token latencies. `steps_s`: duration, waits included, and tokens of each decode step."""

    def __init__(self, models: Sequence[SharedModel], settings: SharedSettings) -> None:
        self._clock = SimulatedClock()
        self.engine = SharedEngine(models, settings, self._clock)
        self.gaps_s: list[float] = []
        self.steps_s: list[tuple[float, int]] = []

    @property
    def now_s(self) -> float:
        return self._clock.now_s

    def serve(self, asks: Sequence[Ask]) -> None:
        """Serve requests, ordered by arrival, until all have ended."""
        arrived = {str(ask.number): ask for ask in asks}
        clock = self._clock
        for began_s, outputs in serve(self.engine, clock, ((ask.arrived_s, _request_of(ask)) for ask in asks)):
            made = 0
            for output in outputs:
                assert output.error is None, output.error
                ask = arrived[output.request_id]
                made += len(output.token_ids)
                if output.token_ids and ask.made:
                    self.gaps_s.append(clock.now_s - ask.last_s)
                elif output.token_ids:
                    ask.first_s = clock.now_s
                ask.made += len(output.token_ids)
                ask.last_s = clock.now_s
            if made and self.engine.decoded:
                self.steps_s.append((clock.now_s - began_s, made))


def measure(
    models: Sequence[SharedModel], asks: Sequence[Ask], settings: SharedSettings, *, skip: int = 0
) -> SharedFigures:
    """Serve requests to the end, which changes them. TPOT and TTFT leave out the first `skip`."""
    slot = SharedSlot(models, settings)
    slot.serve(asks)
    counted = asks[skip:]
    tpots_s = [(ask.last_s - ask.first_s) / (ask.output_tokens - 1) for ask in counted if ask.output_tokens > 1]
    normalized_s = [(ask.last_s - ask.arrived_s) / ask.output_tokens for ask in counted]
    ttfts_s = [ask.first_s - ask.arrived_s for ask in counted]
    decode_s = sum(took_s for took_s, _ in slot.steps_s)
    steps_s = [took_s for took_s, batch in slot.steps_s for _ in range(batch)]
    return SharedFigures(
        tokens_per_s=sum(ask.output_tokens for ask in asks) / slot.now_s,
        tbt_p50_s=_percentile(slot.gaps_s, 0.5),
        tbt_p99_s=_percentile(slot.gaps_s, 0.99),
        step_p99_s=_percentile(steps_s, 0.99),
        tpot_p50_s=_percentile(tpots_s, 0.5),
        tpot_p99_s=_percentile(tpots_s, 0.99),
        normalized_p50_s=_percentile(normalized_s, 0.5),
        normalized_p99_s=_percentile(normalized_s, 0.99),
        ttft_p50_s=_percentile(ttfts_s, 0.5),
        ttft_p99_s=_percentile(ttfts_s, 0.99),
        batch_mean=sum(took_s * batch for took_s, batch in slot.steps_s) / decode_s if decode_s else 0.0,
        batch_peak=max((batch for _, batch in slot.steps_s), default=0),
        counts=slot.engine.counts,
    )


def _percentile(times_s: Sequence[float], share: float) -> float:
    """A percentile; 0 without values, where every answer has one token."""
    return percentile(times_s, share) if times_s else 0.0


def _shares_of(models: Sequence[SharedModel], settings: SharedSettings) -> dict[str, KvShare]:
    """The KV limit of each model: one each, or one for all with Pie, which needs a limit to exceed."""
    if settings.remaps or (settings.shared_kv and settings.way != "pie"):
        return {}
    if settings.shared_kv:
        return dict.fromkeys((model.name for model in models), KvShare(capacity_bytes=_kv_bytes(models)))
    return {model.name: KvShare(capacity_bytes=model.kv_bytes) for model in models}


def _kv_bytes(models: Sequence[SharedModel]) -> int:
    return sum(model.kv_bytes for model in models)


def _replay_settings(models: Sequence[SharedModel], settings: SharedSettings) -> ReplaySettings:
    """Settings of a worker with memory for all weights; it has host memory for KV only where it swaps."""
    outside_bytes = round(settings.wire.both_bytes_per_s) if settings.way == "pie" else 0
    return ReplaySettings(
        profile=GpuProfile(
            gpu_type=settings.wire.name,
            memory_bytes=0,
            pcie_bytes_per_s=settings.wire.bytes_per_s,
            transfer_efficiency=1.0,
            cost_per_hour=0.0,
            models=tuple(
                ModelProfile(name=m.name, source="", gpus=1, weights_bytes=m.layers_bytes, latency=m.latency)
                for m in models
            ),
        ),
        weights_bytes=sum(model.layers_bytes for model in models),
        kv_bytes=_kv_bytes(models) + outside_bytes,
        host_kv_bytes=2**40 if settings.way in {"swap", "auto"} else 0,
        batch_max=settings.batch_max,
        prefill_tokens_per_step_max=settings.prefill_tokens_max,
        kv_pressure=_PRESSURE[settings.way],
        remap=settings.remap,
        turns=TurnSettings(
            prefill=PrefillSettings(order="fcfs"),
            decode=DecodeSettings() if settings.sharing == "temporal" else SPATIAL,
            mixed_batches=settings.mixed,
            step_by_step=settings.step_by_step,
        ),
    )


def _spec_of(model: SharedModel) -> ModelSpec:
    return ModelSpec(
        name=model.name,
        path="",
        weights_bytes=model.layers_bytes,
        kv_bytes_per_token=model.kv_bytes_per_token,
        context_tokens=CONTEXT_TOKENS,
    )


def _request_of(ask: Ask) -> EngineRequest:
    return EngineRequest(
        request_id=str(ask.number),
        instance_id=ask.model,
        tier=Tier.IW_N,
        prompt=(0,) * ask.prompt_tokens,
        max_tokens=ask.output_tokens,
        ignore_eos=True,
    )
