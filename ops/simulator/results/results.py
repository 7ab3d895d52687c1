"""What a run amounts to: the document of `--json`, from which reports are drawn and two runs are compared.

Rates are tokens per second, shares are of 1, times are seconds of simulated time from the scenario's beginning. A list
of a series has one value for each step of `step_s` seconds, from `start_s` on; None: not known.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

State = Literal["serving", "pooled", "warming", "draining", "spot"]
"""What an instance does; `pooled`: it serves, and shares its slot. GPUs of the slots of pools are `pooled` too."""
Start = Literal["present", "revived", "spot_same", "spot_other", "host", "local", "remote"]
"""From what an instance started: `present` at the beginning, `revived` while it drained; a pooled one from `host`
memory where its node has the model loaded already.
"""


class ResultError(ValueError):
    """A file that is no result of a run; the message names the file and the key."""


class Part(BaseModel):
    """A table of the document."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Quantiles(Part):
    """Of times in seconds, each to 1 %."""

    p50: float
    p95: float
    p99: float


class Row(Part):
    """The requests of a model and tier. `model` None: of all models. Attainment: see `tidepool simulate --help`.

    Attributes:
        failed: ended without an answer; refused ones, and deferred ones that expired, among them.
        ttft_violations: share of those that ended whose first token was late.
        ttft_s, tbt_mean_s, service_s: None where none ended.
    """

    model: str | None
    tier: str
    requests: int
    failed: int
    service_attainment: float
    token_attainment: float
    ttft_violations: float
    input_tokens: int
    output_tokens: int
    ttft_s: Quantiles | None
    tbt_mean_s: Quantiles | None
    service_s: Quantiles | None


class EndpointSeries(Part):
    """A model in a region, step by step.

    Attributes:
        demand: interactive input tokens/s from there.
        forecast: what the plan of the hour counts on, at its peak; None: no plan.
        planned: instances that the plan wants; None: no plan.
        serving: mean count of serving instances with GPUs of their own, by kind (mixed, IW, NIW).
        pooled: the same of pooled ones.
        warming, draining, spot: mean counts of the others.
        utilization: effective memory utilization at the step's end; None: nothing serves.
    """

    model: str
    region: str
    demand: list[float]
    forecast: list[float | None]
    planned: list[int | None]
    serving: dict[str, list[float]]
    pooled: list[float]
    warming: list[float]
    draining: list[float]
    spot: list[float]
    utilization: list[float | None]


class PoolSeries(Part):
    """GPUs of a type in a region that are a pool's, and how many the plan wants there; None: no plan, or no pool.
    `worker_gpus`: of each worker of its slots.
    """

    region: str
    gpu_type: str
    gpus: list[float]
    planned: list[int | None]
    worker_gpus: int = 1


class QueueSeries(Part):
    """Deferred requests of a model that wait at the step's end, and the age of the oldest; 0 where none waits."""

    model: str
    waiting: list[int]
    age_s: list[float]


class TierSeries(Part):
    """Requests of a tier that ended with an answer in the step, and the 95th percentile of their TTFT; None: none."""

    tier: str
    ended: list[int]
    ttft_p95_s: list[float | None]


class Series(Part):
    """All series; their lists have one length. `gpus`: mean count of GPUs in use, by state; empty if nothing is scaled.
    `switches`: of models, on all slots.
    """

    start_s: float
    step_s: float
    gpus: dict[State, list[float]]
    switches: list[int]
    endpoints: list[EndpointSeries]
    pools: list[PoolSeries]
    queues: list[QueueSeries]
    tiers: list[TierSeries]


def held_hours(hours: Mapping[State, float]) -> float:
    """All GPU hours but those lent out as spot."""
    return sum(held for state, held in hours.items() if state != "spot")


class GpuTotals(Part):
    """GPU hours and cost of a GPU type; see `Totals`."""

    gpu_hours: dict[State, float]
    cost: float


class Totals(Part):
    """Sums over the run.

    Attributes:
        gpu_hours: by state of the instance that held them, or of a pool's slots; warming ones are what provisioning
            wastes.
        instance_hours: the same in instances, by model and state.
        cost: US dollars, of all GPU hours but those lent out as spot.
        gpu_types: both by GPU type; one that nothing held is there too.
        starts: instances that were started, by what they started from.
        scale_outs, scale_ins: instances that were asked for, and let go.
        switches: how often a slot changed its model.
        node_failures: nodes that failed.
        interrupted: requests that were on a node when it failed, and began anew elsewhere.
        unplaced: instances that were asked for and found no room, counted at each try.
    """

    gpu_hours: dict[State, float]
    instance_hours: dict[str, dict[State, float]]
    cost: float
    gpu_types: dict[str, GpuTotals]
    starts: dict[Start, int]
    scale_outs: int
    scale_ins: int
    switches: int
    node_failures: int
    interrupted: int
    unplaced: int


class Result(Part):
    """A whole run. `strategy` None: nothing was scaled. `seconds`: by the wall clock; only it and what is made of it
    differ between two runs of one scenario and seed.
    """

    version: Literal[3] = 3
    scenario: str
    seed: int
    strategy: str | None
    event_log_hash: str
    events: int
    requests: int
    failures: dict[str, int]
    simulated_s: float
    seconds: float
    requests_per_s: float
    requests_in_system_mean: float
    slots: int
    slot_hours: float
    busy_share: float
    service_attainment: float
    token_attainment: float
    rows: list[Row]
    tiers: list[Row]
    totals: Totals
    series: Series


def read_result(path: Path) -> Result:
    """A document that `--json` wrote.

    Raises:
        ResultError: the file cannot be read, or is none.
    """
    try:
        return Result.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ResultError(f"{path}: cannot be read: {error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ResultError(f"{path}: {key + ': ' if key else ''}{first['msg']}") from error
