"""llm-d-batch-gateway's benchmark (issue 491) in the simulator: the same load, replicas and policies, in seconds."""

from collections.abc import Iterator

from msgspec.structs import replace

from dataplane.protocol.tiers import Tier
from ops.bench.queue.beside_interactive_load import (
    BATCH_MAX,
    KV_TOKENS,
    PROMPT_WORDS,
    REPLICAS,
    WINDOWS_MIN,
    Arm,
    Load,
    Round,
    interactive,
    is_burst,
    line_tokens,
)
from ops.simulator.kernel.requests import Request
from ops.simulator.run import simulate
from ops.simulator.scenario.scenario import PROFILES, Scenario
from ops.simulator.world.measures import Tally

MODEL, REGION = "gpt-oss-120b", "here"
KV_BYTES_PER_TOKEN = 256


def simulated(load: Load, number: int) -> Iterator[Round]:
    """The interactive requests alone, and with all lines waiting from the beginning."""
    load = Load(phase_s=load.phase_s, cycles=load.cycles, lines=load.lines, speed=1.0)
    asked = _interactive(load)
    lines = [_request(0.0, Tier.NIW, tokens) for tokens in line_tokens(len(WINDOWS_MIN) * load.lines, seed=number)]
    arms: tuple[tuple[Arm, list[Request]], ...] = (("alone", asked), ("gated", [*lines, *asked]))
    for arm, requests in arms:
        world = simulate(_scenario(load), traffic=(replace(each, number=n) for n, each in enumerate(requests))).world
        bursts, idle, batch = (world.tallies.get((MODEL, tier), Tally()) for tier in (Tier.IW_F, Tier.IW_N, Tier.NIW))
        yield Round(
            arm=arm,
            number=number,
            requests=len(asked),
            unanswered=bursts.failed + idle.failed,
            burst_p50_s=bursts.ttft.quantile(0.5),
            burst_p95_s=bursts.ttft.quantile(0.95),
            idle_p95_s=idle.ttft.quantile(0.95),
            done=_share_within(batch, load.seconds, len(lines)) if arm == "gated" else None,
            took_s=batch.service.max_s if batch.ended == len(lines) else None,
            failed=batch.failed,
        )


def _share_within(batch: Tally, seconds: float, lines: int) -> float:
    """The share of the lines, all of which came at 0 s, that ended by then, to 1 %."""
    return sum(batch.service.quantile((n + 1) / 100) <= seconds for n in range(100)) / 100 * batch.ended / lines


def _interactive(load: Load) -> list[Request]:
    """Those of bursts as IW-F, others as IW-N: results are by tier."""
    return [
        _request(each.at_s, Tier.IW_F if is_burst(each, load) else Tier.IW_N, each.tokens or 1)
        for each in interactive(load)
    ]


def _request(at_s: float, tier: Tier, tokens: int) -> Request:
    return Request(
        number=0,
        arrived_s=at_s,
        model=MODEL,
        origin=REGION,
        tier=tier,
        prompt_tokens=PROMPT_WORDS,
        output_tokens=tokens,
    )


def _scenario(load: Load) -> Scenario:
    return Scenario.model_validate(
        {
            "name": "batches beside interactive bursts",
            "regions": [REGION],
            "traffic": {  # in whose place the load is given
                "kind": "generated",
                "rate_per_s": 1.0,
                "duration_s": load.seconds,
                "origins": {REGION: 1},
                "tiers": {Tier.IW_F: 1},
                "prompt_tokens": {"median": PROMPT_WORDS, "spread": 0.0, "most": PROMPT_WORDS},
                "output_tokens": {"median": PROMPT_WORDS, "spread": 0.0, "most": PROMPT_WORDS},
            },
            "models": [{"name": MODEL, "weights_bytes": 65 * 10**9, "kv_bytes_per_token": KV_BYTES_PER_TOKEN}],
            "fleet": {
                "serving": "dedicated",
                "profile": str(PROFILES / "a100-gpt-oss.toml"),
                "kv_bytes": KV_TOKENS * KV_BYTES_PER_TOKEN,
                "instances": [{"model": MODEL, "region": REGION, "count": REPLICAS}],
            },
            "policy": {"order": "dpa", "batch_max": BATCH_MAX},
        }
    )
