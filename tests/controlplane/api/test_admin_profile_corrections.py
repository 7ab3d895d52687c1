"""Corrections of profiles are listed, and reset by operators."""

from collections.abc import Callable
from typing import Any

from controlplane.policies.facts import ModelGpu
from controlplane.policies.profile_correction import Correction
from controlplane.policies.step_correction import StepCorrection
from controlplane.store.profile_corrections import put_correction
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
