"""How fast the simulator is, and how much memory it takes: `python -m ops.bench.papers.simulator --help`.

Made-up traffic (Poisson, prompts around 400 tokens, answers around 120) on eight GPUs that it keeps busy: dedicated
instances of four models, or a pool of three slots that prefill and five that decode. Each run has a process of its own.
Beside: splitwise-sim about 2,300 requests/s, the Aegaeon artifact's simulator 10 to 60/s, on such a machine. Goal:
25,000/s for dedicated instances, 5,000/s for pools, memory that does not grow with the requests. A Python built
without profile-guided optimization takes about 1.3 times as long.
"""

import multiprocessing
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Annotated, Literal, cast, get_args

import typer

from ops.client.screen import AsJson, Columns, notes, print_json, print_table
from ops.simulator.run import simulate
from ops.simulator.scenario.scenario import PROFILES, Scenario

Serving = Literal["dedicated", "prefill-first", "pooled"]
"""`prefill-first`: dedicated instances as other engines run them, which ask the turn policy nothing."""

RATE_PER_S = 30.0
MODELS = "abcd"
COLUMNS: Columns = {
    "serving": "serving",
    "requests": lambda row: f"{row['requests']:,}",
    "requests/CPU s": lambda row: f"{row['requests_per_cpu_s']:,.0f}",
    "events/request": lambda row: f"{row['events_per_request']:.1f}",
    "peak memory MB": lambda row: f"{row['peak_mb']:.0f}",
    "GPUs busy": lambda row: f"{row['busy_share']:.0%}",
    "attainment": lambda row: f"{row['service_attainment']:.1%}",
}


@dataclass(frozen=True, kw_only=True)
class Speed:
    """One run. `cpu_s` leaves out the start of the process. `events_per_request`: what the event loop ran; what a
    dedicated instance lives through by its own clock is none.
    """

    serving: Serving
    requests: int
    cpu_s: float
    requests_per_cpu_s: float
    events_per_request: float
    peak_mb: float
    busy_share: float
    service_attainment: float


def scenario_of(serving: Serving, requests: int) -> Scenario:
    """Traffic of about so many requests."""
    fleet = {"instances": [{"model": name, "region": "one", "count": 2} for name in MODELS]}
    pool = {"prefill_slots": 3, "decode_slots": 5, "weights_bytes": 36 * 10**9}
    return Scenario.model_validate(
        {
            "name": f"speed, {serving}",
            "regions": ["one"],
            "traffic": {
                "kind": "generated",
                "rate_per_s": RATE_PER_S,
                "duration_s": requests / RATE_PER_S,
                "origins": {"one": 1},
                "tiers": {"IW-F": 1},
                "prompt_tokens": {"median": 400, "most": 4000},
                "output_tokens": {"median": 120, "spread": 0.8, "most": 1000},
            },
            "models": [{"name": m, "weights_bytes": 15 * 10**9, "kv_bytes_per_token": 57_344} for m in MODELS],
            "fleet": {
                "serving": "pooled" if serving == "pooled" else "dedicated",
                "profile": str(PROFILES / "h800.toml"),
                "kv_bytes": 40 * 10**9,
                **(pool if serving == "pooled" else fleet),
            },
            "policy": {"batching": "prefill-first" if serving == "prefill-first" else "turns"},
        }
    )


def measure_speed(serving: Serving, requests: int) -> Speed:
    """Simulate in this process. Its peak memory counts whatever it did before."""
    began_s = time.process_time()
    outcome = simulate(scenario_of(serving, requests))
    cpu_s = time.process_time() - began_s
    result = outcome.result
    return Speed(
        serving=serving,
        requests=result.requests,
        cpu_s=cpu_s,
        requests_per_cpu_s=result.requests / cpu_s,
        events_per_request=result.events / result.requests,
        peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        busy_share=result.busy_share,
        service_attainment=result.service_attainment,
    )


def main(
    requests: Annotated[list[int] | None, typer.Option(min=100, help="About so many; 10,000 if not given.")] = None,
    serving: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(get_args(Serving))}; all if none.")] = None,
    as_json: AsJson = False,
) -> None:
    """Requests simulated per second of CPU time, and peak memory.

    \b
    Example:
      python -m ops.bench.papers.simulator --requests 10000 --requests 1000000 --serving dedicated
    """
    for name in serving or ():
        if name not in get_args(Serving):
            raise typer.BadParameter(f"{name}: must be one of {', '.join(get_args(Serving))}", param_hint="--serving")
    rows = []
    for name in serving or get_args(Serving):
        for count in requests or [10_000]:
            notes().print(f"{name}, {count:,} requests")
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                rows.append(asdict(pool.submit(measure_speed, cast("Serving", name), count).result()))
    if as_json:
        print_json(rows)
    else:
        print_table("Simulator", COLUMNS, rows)


if __name__ == "__main__":
    typer.run(main)
