"""Corrections of profiles are listed, and reset by operators; latency is listed beside what profiles predict."""

import math
from collections.abc import Callable
from typing import Any

from controlplane.policies.facts import EndpointGpu, ModelGpu
from controlplane.policies.latency_comparison import LatencyComparison, PredictedLatency
from controlplane.policies.profile_correction import Correction
from controlplane.policies.step_correction import StepCorrection
from controlplane.store.latency_comparisons import put_comparisons
from controlplane.store.profile_corrections import put_correction
from tests.controlplane.planner.test_compare import a_measurement
from tests.controlplane.world import World

Ask = Callable[..., Any]
STEPS = StepCorrection(prefill_factor=1.1, decode_factor=1.0, reason="prefills take longer")
PATH = "/admin/profile-corrections"


def corrected(world: World) -> None:
    correction = Correction(factor=0.85, reason="it does less", estimate=600.0, windows=72, moved_s=1_000_000_000.0)
    with world.database.transaction() as session:
        put_correction(session, ModelGpu(model="tide", gpu_type="H800"), correction, STEPS, stated_tokens_per_s=1000.0)


def test_a_correction_is_listed_and_reset(ask: Ask, world: World) -> None:
    assert ask("GET", PATH, role="viewer")["data"] == []
    corrected(world)
    [row] = ask("GET", PATH, role="viewer", params={"model": "tide"})["data"]
    known = {"model": "tide", "gpu_type": "H800", "stated_tokens_per_s": 1000, "tokens_per_s": 850, "factor": 0.85}
    assert row.items() >= (known | {"estimate": 600, "windows": 72, "reason": "it does less"}).items()
    assert row["moved_at"].startswith("2001-09-09T01:46:40")
    assert ask("GET", PATH, params={"model": "ebb"})["data"] == []
    where = {"model": "tide", "gpu_type": "H800"}
    ask("DELETE", PATH, role="viewer", params=where, status=403)
    assert ask("DELETE", PATH, params=where)["factor"] == 0.85
    assert ask("DELETE", PATH, params=where, status=404)["param"] == "profile correction"
    [event] = [one for one in ask("GET", "/admin/audit")["data"] if one["action"] == "profile_correction.delete"]
    assert (event["subject"], event["before"]["factor"]) == ("tide|H800", 0.85)


def test_latency_is_listed_beside_what_profiles_predict(ask: Ask, world: World) -> None:
    predicted = PredictedLatency(ttft_s=math.inf, tbt_s=0.02, batch=2.5, prefill_share=1.1, prefill_share_max=1.1)
    known = LatencyComparison(predicted=predicted, differs=True, reason="decode is slower")
    unknown = LatencyComparison(predicted=None, differs=False, reason="the profile states no step times")
    places = [EndpointGpu(model="tide", region="us-east", gpu_type=name) for name in ("H20", "H800")]
    other = EndpointGpu(model="ebb", region="us-east", gpu_type="H800")
    with world.database.transaction() as session:
        put_comparisons(
            session, {key: (a_measurement(), known) for key in places} | {other: (a_measurement(), unknown)}
        )
    path = "/admin/latency-comparisons"
    first = ask("GET", path, role="viewer", params={"model": "tide", "limit": 1})
    assert first["next"] == "tide|us-east|H20"
    [row] = ask("GET", path, params={"model": "tide", "after": first["next"]})["data"]
    assert (row["gpu_type"], row["requests"], row["differs"], row["reason"]) == ("H800", 500, True, "decode is slower")
    assert (row["ttft_s"], row["predicted_ttft_s"], row["tbt_s"], row["predicted_tbt_s"]) == (0.12, None, 0.04, 0.02)
    assert row["tiers"] == {"IW-F": {"requests": 500, "ttft_p50_s": 0.1, "ttft_p95_s": 0.3}}
    [row] = ask("GET", path, params={"model": "ebb"})["data"]
    assert (row["predicted_tbt_s"], row["batch"]) == (None, None)
    assert ask("GET", path, params={"after": "tide|us-east"}, status=400)["param"] == "after"
