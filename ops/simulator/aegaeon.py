"""Models at 90 % service attainment on 16 GPUs: `python -m ops.simulator.aegaeon WORKLOADS`.

Aegaeon's Figure 11, on the workloads of its artifact (ShareGPT lengths, Poisson arrivals, 120 s at rate 0.1).
Published: 70 models (paper, H800), 72 (the artifact's simulator, H100), 44 for request-level switching
(ServerlessLLM). In all of them six GPUs prefill and ten decode, unless asked for otherwise.
Token k is due 10 s + k * 0.1 s after its request came. Step times: the artifact's H100 profiles, a switch takes
bytes / 16 GB/s, as its simulator assumes; or any other profile.
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, cast, get_args

import typer

from forecasts.importers.lines import DemandFileError, open_csv
from ops.simulator.run import attainment, simulate
from ops.simulator.scenario import AegaeonPart, DecodeSlot, FleetPart, ModelPart, PolicyPart, Scenario, TargetPart

REGION = "one"
ARTIFACT_PROFILE = Path(__file__).parents[1] / "scenarios" / "h100-artifact.toml"
GPUS = 16
MODELS = (
    [ModelPart(name=f"7B-{n}", weights_bytes=15_231_233_024, kv_bytes_per_token=57_344) for n in range(6)]
    + [ModelPart(name=f"9B-{n}", weights_bytes=17_658_814_464, kv_bytes_per_token=98_304) for n in range(2)]
    + [ModelPart(name=f"13B-{n}", weights_bytes=26_031_728_640, kv_bytes_per_token=819_200) for n in range(2)]
)
"""Model i of a workload is the one at place i modulo 10: Qwen2.5-7B, Yi-1.5-9B, Llama-2-13B, two bytes a parameter."""
SLOT_WEIGHTS_BYTES = 53 * 10**9
"""Two of the largest, so that one can come while the other runs."""
GPU_BYTES = 76 * 10**9
"""Of 80 GiB; the rest is the engine's."""

Serving = Literal["pooled", "request-level"]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the 16 GPUs are and how they are used. `slo_scale`: of both targets (Figure 13)."""

    workloads: Path
    profile: Path = ARTIFACT_PROFILE
    prefill_slots: int = 6
    decode_slot: DecodeSlot = "live"
    slo_scale: float = 1.0


def scenario_of(setup: Setup, workload: str, serving: Serving) -> Scenario:
    """One workload. Where requests switch, a GPU has one model, and its KV the rest of its memory."""
    kv_bytes = GPU_BYTES - (SLOT_WEIGHTS_BYTES if serving == "pooled" else MODELS[-1].weights_bytes)
    return Scenario(
        name=f"{workload}, {serving}",
        regions=[REGION],
        targets={"IW-F": TargetPart(ttft_s=10.0 * setup.slo_scale, tbt_s=0.1 * setup.slo_scale)},
        traffic=AegaeonPart(kind="aegaeon", path=setup.workloads, workload=workload, origin=REGION),
        models=MODELS,
        fleet=FleetPart(
            serving=serving,
            profile=str(setup.profile),
            kv_bytes=kv_bytes,
            weights_bytes=SLOT_WEIGHTS_BYTES,
            prefill_slots=setup.prefill_slots,
            decode_slots=GPUS - setup.prefill_slots,
        ),
        policy=PolicyPart(decode_slot=setup.decode_slot),
    )


def sizes_at(workloads: Path, rate: str) -> list[tuple[int, str]]:
    """Numbers of models and names of the workloads at a rate with unscaled lengths, in order of size."""
    pattern = re.compile(rf"synth-(\d+)-{re.escape(rate)}-1\.0-1\.0")
    with open_csv(workloads) as file:
        names = {line.word("workload") for line in file.lines(("workload",))}
    return sorted((int(found[1]), name) for name in names if (found := pattern.fullmatch(name)))


def sweep(setup: Setup, sizes: list[tuple[int, str]], serving: Serving) -> Iterator[dict[str, float | int | str]]:
    """A row for each workload."""
    for models, workload in sizes:
        outcome = simulate(scenario_of(setup, workload, serving))
        service, token = attainment(outcome.world)
        yield {
            "models": models,
            "serving": serving,
            "requests": outcome.world.arrived,
            "service_attainment": service,
            "token_attainment": token,
            "switches": sum(server.switches for server in outcome.world.servers),
            "seconds": outcome.seconds,
            "event_log_hash": outcome.world.log.digest,
        }


def main(
    workloads: Annotated[Path, typer.Argument(help="Aegaeon's workloads: workloads.csv.gz.", dir_okay=False)],
    rate: Annotated[str, typer.Option(help="Requests per second and model, as in the workloads' names.")] = "0.1",
    least: Annotated[int, typer.Option(min=1, help="Models at least.")] = 36,
    most: Annotated[int, typer.Option(min=1, help="Models at most.")] = 80,
    every: Annotated[int, typer.Option(min=1, help="Take only every so many workloads.")] = 1,
    serving: Annotated[str, typer.Option(help="pooled, request-level, or both.")] = "both",
    prefill_slots: Annotated[int, typer.Option(min=1, max=GPUS - 1, help="Of the 16; the others decode.")] = 6,
    profile: Annotated[Path, typer.Option(help="A GPU profile.", dir_okay=False)] = ARTIFACT_PROFILE,
    decode_slot: Annotated[str, typer.Option(help="live, or join: our change of policy on trial.")] = "live",
    slo_scale: Annotated[float, typer.Option(min=0.01, help="Of both targets, 10 s and 0.1 s.")] = 1.0,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write all rows here.", dir_okay=False)] = None,
) -> None:
    """Service and token attainment by the number of models on 16 GPUs, pooled and switched by requests.

    \b
    Example:
      python -m ops.simulator.aegaeon workloads.csv.gz --every 4 --json table.json
    """
    kinds: list[Serving] = ["pooled", "request-level"]
    chosen = [kind for kind in kinds if serving in ("both", kind)]
    if not chosen:
        raise typer.BadParameter("pooled, request-level, or both", param_hint="--serving")
    try:
        sizes = [size for size in sizes_at(workloads, rate) if least <= size[0] <= most][::every]
    except DemandFileError as error:
        raise typer.BadParameter(str(error), param_hint="WORKLOADS") from error
    if not sizes:
        raise typer.BadParameter(f"{workloads} has no workload of {least} to {most} models at rate {rate}")
    if decode_slot not in get_args(DecodeSlot):
        raise typer.BadParameter("live or join", param_hint="--decode-slot")
    setup = Setup(
        workloads=workloads,
        profile=profile,
        prefill_slots=prefill_slots,
        decode_slot=cast("DecodeSlot", decode_slot),
        slo_scale=slo_scale,
    )
    rows = []
    for kind in chosen:
        best = 0
        for row in sweep(setup, sizes, kind):
            rows.append(row)
            line = f"{row['serving']:>14} {row['models']:>3} models: service {row['service_attainment']:.2%}"
            print(f"{line}, token {row['token_attainment']:.2%}, {row['switches']} switches")
            sys.stderr.write(f"{row['requests']} requests in {row['seconds']:.1f} s\n")
            if float(row["service_attainment"]) >= 0.9:
                best = max(best, int(row["models"]))
        print(f"{kind:>14}: {best} models at 90 % service attainment")
    if json_out:
        json_out.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
