"""Correct profiles by what instances do: observed each minute, decided each hour before the plan is made."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from controlplane.policies.assignment.facts import PlacedInstance
from controlplane.policies.facts import Endpoint, InstanceFacts, ModelGpu
from controlplane.policies.lifecycle import InstanceState
from controlplane.policies.objectives import choose_objective
from controlplane.policies.profile_correction import (
    CorrectionSettings,
    LoadWindow,
    ProfileFacts,
    choose_correction,
    load_sums,
)
from controlplane.policies.step_correction import StepFacts, choose_step_correction
from controlplane.settings import Settings
from controlplane.store.instances import running_instances
from controlplane.store.profile_corrections import (
    ProfileCorrection,
    corrections,
    observe_loads,
    put_correction,
    read_windows,
)
from controlplane.store.redis.live import LiveStore, instance_facts
from controlplane.store.session import Database
from controlplane.store.tables import Model, Profile
from dataplane.protocol.tiers import Objective, Tier

_MINUTE_S = 60
_NAMED_MAX = 3
"""Of profiles, or endpoints, the reason of a plan names so many."""


def observe(session: Session, live: LiveStore, settings: Settings, *, now_s: float) -> int:
    """Store what the ready instances with GPUs of their own do in this minute; returns for how many endpoints. Run
    twice in a minute, the second run changes nothing.
    """
    reports = {facts.instance_id: facts for facts in instance_facts(live.read_view())}
    instances = [
        PlacedInstance(
            instance_id=row.id,
            endpoint=Endpoint(model=row.model, region=row.region),
            gpu_type=row.gpu_type,
            node_id=row.node,
            slot=row.slot,
            report=reports[row.id],
        )
        for row in running_instances(session, observed=InstanceState.READY)
        if row.id in reports and not row.pooled
    ]
    sums = load_sums(instances, ttft_s=_objectives(session, instances, settings), stale_s=settings.heartbeat_stale_s)
    observe_loads(session, sums, minute_s=int(now_s) // _MINUTE_S * _MINUTE_S)
    return len(sums)


def correct(database: Database, live: LiveStore, settings: Settings, *, now_s: float) -> dict[ModelGpu, str]:
    """Decide about every profile of which something was observed, and store why; returns the reasons of those that
    were changed.
    """
    if not settings.profile_correction:
        return {}
    how, times = correction_settings(settings), _StepTimes.of(instance_facts(live.read_view()))
    changed: dict[ModelGpu, str] = {}
    with database.transaction() as session:
        known = corrections(session)
        windows = dict(read_windows(session, since_s=int(now_s - how.memory_s)))
        for pair in sorted(windows.keys() | times.pairs, key=lambda each: (each.model, each.gpu_type)):
            profile = session.get(Profile, (pair.model, pair.gpu_type))
            if profile is None:
                continue
            before = known.get(pair)
            rate = choose_correction(_rate_facts(profile, before, windows.get(pair, [])), now_s, how)
            steps = choose_step_correction(_step_facts(profile, before, times), now_s, how)
            if rate.factor != (1.0 if before is None else before.factor):
                changed[pair] = rate.reason
            put_correction(session, pair, rate, steps, stated_tokens_per_s=profile.tokens_per_s)
    return changed


@dataclass(frozen=True, kw_only=True)
class _StepTimes:
    """Times of the reference steps that instances report, by model and GPU type."""

    prefill_s: Mapping[ModelGpu, list[float]]
    decode_s: Mapping[ModelGpu, list[float]]

    @classmethod
    def of(cls, reports: Iterable[InstanceFacts]) -> "_StepTimes":
        prefill_s, decode_s = defaultdict[ModelGpu, list[float]](list), defaultdict[ModelGpu, list[float]](list)
        for report in reports:
            pair = ModelGpu(model=report.endpoint.model, gpu_type=report.gpu_type)
            for times, value in ((prefill_s, report.prefill_s), (decode_s, report.decode_s)):
                if value is not None and value > 0:
                    times[pair].append(value)
        return cls(prefill_s=prefill_s, decode_s=decode_s)

    @property
    def pairs(self) -> set[ModelGpu]:
        return {*self.prefill_s, *self.decode_s}


def _rate_facts(profile: Profile, before: ProfileCorrection | None, windows: Sequence[LoadWindow]) -> ProfileFacts:
    return ProfileFacts(
        tokens_per_s=profile.tokens_per_s,
        windows=windows,
        factor=1.0 if before is None else before.factor,
        moved_s=None if before is None else _seconds(before.moved_at),
    )


def _step_facts(profile: Profile, before: ProfileCorrection | None, times: _StepTimes) -> StepFacts:
    pair = ModelGpu(model=profile.model, gpu_type=profile.gpu_type)
    return StepFacts(
        latency=profile.latency,
        prefill_s=times.prefill_s.get(pair, ()),
        decode_s=times.decode_s.get(pair, ()),
        prefill_factor=1.0 if before is None else before.prefill_factor,
        decode_factor=1.0 if before is None else before.decode_factor,
        moved_s=None if before is None else _seconds(before.steps_moved_at),
    )


def _seconds(at: datetime | None) -> float | None:
    return None if at is None else at.timestamp()


def correction_settings(settings: Settings) -> CorrectionSettings:
    """How profiles are corrected, as the service is set."""
    return CorrectionSettings(utilization=settings.scale_out_above, factor_max=settings.profile_correction_max)


@dataclass(frozen=True, kw_only=True)
class ProfilesInForce:
    """The corrections that a plan or a scaling step counts with, by model and GPU type."""

    rows: Mapping[ModelGpu, ProfileCorrection]

    @property
    def factors(self) -> dict[ModelGpu, float]:
        """On the profiles' tokens/s."""
        return {pair: row.factor for pair, row in self.rows.items()}

    @property
    def steps(self) -> dict[ModelGpu, tuple[float, float]]:
        """On the times of prefills and of decode steps."""
        return {pair: (row.prefill_factor, row.decode_factor) for pair, row in self.rows.items()}

    def record(self) -> list[dict[str, Any]]:
        """As a plan stores them: those that change a profile."""
        return [
            {
                "model": row.model,
                "gpu_type": row.gpu_type,
                "stated_tokens_per_s": row.stated_tokens_per_s,
                "tokens_per_s": row.tokens_per_s,
                "reason": row.reason,
                "prefill_factor": row.prefill_factor,
                "decode_factor": row.decode_factor,
                "steps_reason": row.steps_reason,
            }
            for row in _changing(self.rows.values())
        ]

    def summary(self) -> str:
        """In short; empty where no profile is changed."""
        rows = _changing(self.rows.values())
        texts = [f"{row.model} on {row.gpu_type} to {row.tokens_per_s:,.0f} tokens/s" for row in rows]
        return f"profiles corrected by what instances do: {first_of(texts)}" if texts else ""


def first_of(texts: Sequence[str]) -> str:
    """The first texts, as the reason of a plan names them, and how many more there are."""
    more = f" and {len(texts) - _NAMED_MAX} more" if len(texts) > _NAMED_MAX else ""
    return ", ".join(texts[:_NAMED_MAX]) + more


def profiles_in_force(session: Session, settings: Settings) -> ProfilesInForce:
    """None where the setting says so."""
    return ProfilesInForce(rows=corrections(session) if settings.profile_correction else {})


def _changing(rows: Iterable[ProfileCorrection]) -> list[ProfileCorrection]:
    changing = (row for row in rows if (row.factor, row.prefill_factor, row.decode_factor) != (1.0, 1.0, 1.0))
    return sorted(changing, key=lambda row: (row.model, row.gpu_type))


def _objectives(session: Session, instances: Iterable[PlacedInstance], settings: Settings) -> dict[str, float]:
    """IW-F's objective for the first token, by model."""
    defaults = {Tier.IW_F: Objective(ttft_s=settings.slo_iw_f_ttft_s, tbt_s=settings.slo_iw_f_tbt_s)}
    found = {}
    for name in {each.endpoint.model for each in instances}:
        objective = choose_objective(Tier.IW_F, session.get_one(Model, name).slo, defaults)
        if objective is not None:
            found[name] = objective.ttft_s
    return found
