"""State that changes by the second, for `tidepool top` and dashboards: endpoints, objectives, the batch queue."""

from collections import Counter
from typing import Annotated

from fastapi import APIRouter, Depends
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel, Field

from controlplane.api.admin.fields import Answer
from controlplane.api.auth import Viewer
from controlplane.api.health import group_metrics
from controlplane.api.state import SessionDep, StateDep
from controlplane.policies.facts import Backlog
from controlplane.store.endpoint_summary import backlogs, read_endpoints

router = APIRouter(tags=["admin: fleet"])
COUNT_MAX = 1000


class EndpointStatus(Answer):
    """A model in a region."""

    model: str
    region: str
    instances: dict[str, int] = Field(description="live ones by state", examples=[{"ready": 2, "loading": 1}])
    utilization: float | None = Field(description="effective memory utilization, 0 to 1; null: nothing is usable")
    remaining_tokens: int | None = Field(description="tokens still to prefill or to make, over its usable instances")
    load: float | None = Field(description="of its busiest node; above 1 that cannot keep up with its decodes")


class QueueStatus(BaseModel):
    """What waits of a model in the NIW queue."""

    model: str
    tokens: float = Field(description=f"about so many input tokens; of each batch at most {COUNT_MAX} requests count")
    at_least: bool = Field(description="a batch has that many waiting: there may be more tokens than are said")
    due_s: float = Field(description="Unix time of the nearest deadline")

    @classmethod
    def of(cls, model: str, backlog: Backlog) -> "QueueStatus":
        """What waits of one model."""
        return cls(model=model, tokens=backlog.tokens, due_s=backlog.due_s, at_least=backlog.at_least)


class ObjectiveStatus(BaseModel):
    """How a tier's objectives were kept by the answers of this gateway's processes since their start."""

    tier: str = Field(examples=["IW-F"])
    answers: int
    kept: int
    tokens: int
    tokens_in_time: int


class LiveStatus(BaseModel):
    """The whole fleet at one moment, as this gateway sees it."""

    view_fresh: bool = Field(description="false: Redis is away, and the live view is its last copy")
    endpoints: list[EndpointStatus]
    queues: list[QueueStatus]
    objectives: list[ObjectiveStatus]


async def read_objectives(state: StateDep) -> list[ObjectiveStatus]:
    """By tier, over all models and all processes that share the port."""
    return _objectives((await group_metrics(state)).decode())


ObjectivesDep = Annotated[list[ObjectiveStatus], Depends(read_objectives)]


@router.get("/status/live", summary="How busy the fleet is")
def get_live_status(session: SessionDep, state: StateDep, _: Viewer, objectives: ObjectivesDep) -> LiveStatus:
    """Endpoints with their load, queues with their deadlines, and how the tiers' objectives were kept."""
    fleet = state.fleet
    endpoints = read_endpoints(session, fleet.instances(), stale_s=state.settings.heartbeat_stale_s)
    return LiveStatus(
        view_fresh=fleet.is_fresh(),
        endpoints=[EndpointStatus.model_validate(endpoint) for endpoint in endpoints],
        queues=[
            QueueStatus.of(model, backlog) for model, backlog in sorted(backlogs(session, count_max=COUNT_MAX).items())
        ],
        objectives=objectives,
    )


def _objectives(metrics: str) -> list[ObjectiveStatus]:
    answers, tokens = (_by_tier(metrics, f"tidepool_slo_{what}_total") for what in ("requests", "tokens"))
    return [
        ObjectiveStatus(
            tier=tier,
            answers=answers[tier, "true"] + answers[tier, "false"],
            kept=answers[tier, "true"],
            tokens=tokens[tier, "true"] + tokens[tier, "false"],
            tokens_in_time=tokens[tier, "true"],
        )
        for tier in sorted({tier for (tier, _), count in (answers + tokens).items() if count})
    ]


def _by_tier(metrics: str, name: str) -> Counter[tuple[str, str]]:
    """A counter's total by tier and `met`."""
    lines = [line for line in metrics.split("\n") if line.startswith(f"{name}{{")]
    totals: Counter[tuple[str, str]] = Counter()
    for family in text_string_to_metric_families("\n".join([*lines, ""])):
        for sample in family.samples:
            totals[sample.labels["tier"], sample.labels["met"]] += int(sample.value)
    return totals
