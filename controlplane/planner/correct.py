"""Correct profiles by what instances do: observed each minute, decided each hour before the plan is made."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy.orm import Session

from controlplane.policies.assignment.facts import PlacedInstance
from controlplane.policies.facts import Endpoint, ModelGpu
from controlplane.policies.lifecycle import InstanceState
from controlplane.policies.objectives import choose_objective
from controlplane.policies.profile_correction import CorrectionSettings, ProfileFacts, choose_correction, load_sums
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


def correct(database: Database, settings: Settings, *, now_s: float) -> dict[ModelGpu, str]:
    """Decide about every profile that was observed and store why; returns the reasons of those that were changed."""
    if not settings.profile_correction:
        return {}
    how = correction_settings(settings)
    changed = {}
    with database.transaction() as session:
        known = corrections(session)
        for pair, windows in read_windows(session, since_s=int(now_s - how.memory_s)):
            profile = session.get(Profile, (pair.model, pair.gpu_type))
            if profile is None:
                continue
            before = known.get(pair)
            moved_at = None if before is None else before.moved_at
            facts = ProfileFacts(
                tokens_per_s=profile.tokens_per_s,
                windows=windows,
                factor=1.0 if before is None else before.factor,
                moved_s=None if moved_at is None else moved_at.timestamp(),
            )
            correction = choose_correction(facts, now_s, how)
            if correction.factor != facts.factor:
                changed[pair] = correction.reason
            put_correction(session, pair, correction, stated_tokens_per_s=profile.tokens_per_s)
    return changed


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

    def record(self) -> list[dict[str, Any]]:
        """As a plan stores them: those that change a profile."""
        return [
            {
                "model": row.model,
                "gpu_type": row.gpu_type,
                "stated_tokens_per_s": row.stated_tokens_per_s,
                "tokens_per_s": row.tokens_per_s,
                "reason": row.reason,
            }
            for row in _changing(self.rows.values())
        ]

    def summary(self) -> str:
        """In short; empty where no profile is changed."""
        rows = _changing(self.rows.values())
        texts = [f"{row.model} on {row.gpu_type} {row.factor:.0%}" for row in rows[:_NAMED_MAX]]
        more = f" and {len(rows) - _NAMED_MAX} more" if len(rows) > _NAMED_MAX else ""
        return f"profiles corrected by what instances do: {', '.join(texts)}{more}" if texts else ""


_NAMED_MAX = 3


def profiles_in_force(session: Session, settings: Settings) -> ProfilesInForce:
    """None where the setting says so."""
    return ProfilesInForce(rows=corrections(session) if settings.profile_correction else {})


def _changing(rows: Iterable[ProfileCorrection]) -> list[ProfileCorrection]:
    return sorted((row for row in rows if row.factor != 1.0), key=lambda row: (row.model, row.gpu_type))


def _objectives(session: Session, instances: Iterable[PlacedInstance], settings: Settings) -> dict[str, float]:
    """IW-F's objective for the first token, by model."""
    defaults = {Tier.IW_F: Objective(ttft_s=settings.slo_iw_f_ttft_s, tbt_s=settings.slo_iw_f_tbt_s)}
    found = {}
    for name in {each.endpoint.model for each in instances}:
        objective = choose_objective(Tier.IW_F, session.get_one(Model, name).slo, defaults)
        if objective is not None:
            found[name] = objective.ttft_s
    return found
