"""Batches whose windows are short, beside interactive requests."""

from msgspec.structs import replace

from dataplane.protocol.tiers import Tier
from ops.simulator.kernel.requests import Request
from ops.simulator.run import simulate
from ops.simulator.scenario.scenario import PROFILES, Scenario

MODEL, REGION = "tide", "here"
LINES, WINDOW_S, SECONDS, PER_S = 1000, 360.0, 480.0, 8.0
LENGTHS = {"median": 100, "spread": 0.0, "most": 100}


def _request(at_s: float, tier: Tier, prompt_tokens: int, output_tokens: int) -> Request:
    return Request(
        number=0,
        arrived_s=at_s,
        model=MODEL,
        origin=REGION,
        tier=tier,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
    )


def _scenario() -> Scenario:
    return Scenario.model_validate(
        {
            "name": "a short window",
            "regions": [REGION],
            "traffic": {  # in whose place the load is given
                "kind": "generated",
                "rate_per_s": 1.0,
                "duration_s": SECONDS,
                "origins": {REGION: 1},
                "tiers": {Tier.IW_F: 1},
                "prompt_tokens": LENGTHS,
                "output_tokens": LENGTHS,
            },
            "models": [{"name": MODEL, "weights_bytes": 65 * 10**9, "kv_bytes_per_token": 256}],
            "fleet": {
                "serving": "dedicated",
                "profile": str(PROFILES / "a100-gpt-oss.toml"),
                "kv_bytes": 131_072 * 256,
                "instances": [{"model": MODEL, "region": REGION, "count": 2}],
            },
            "policy": {"order": "dpa", "batch_max": 1024},
            "targets": {Tier.NIW: {"ttft_s": WINDOW_S, "tbt_s": 1.0}},
        }
    )


def test_a_batch_that_would_be_late_is_sped_up_early_and_no_first_token_is_late() -> None:
    """At 5 % of the time for its prefills, two thirds of it are left when it becomes urgent: then requests of 4,000
    tokens go at once, first tokens are late, and lines expire nevertheless.
    """
    asked = [
        *(_request(0.0, Tier.NIW, 4000, 500) for _ in range(LINES)),
        *(_request((n + 0.5) / PER_S, Tier.IW_F, 512, 128) for n in range(int(SECONDS * PER_S))),
    ]
    numbered = (replace(each, number=n) for n, each in enumerate(asked))
    tallies = simulate(_scenario(), traffic=numbered).world.tallies
    batch, interactive = tallies[MODEL, Tier.NIW], tallies[MODEL, Tier.IW_F]
    assert (batch.ended, batch.failed) == (LINES, 0)
    assert interactive.ended == SECONDS * PER_S
    assert interactive.ttft_violations == 0
