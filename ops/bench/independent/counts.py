"""What a load generator saw of a run, and what the server counted of it, in the same terms."""

from collections.abc import Callable
from dataclasses import dataclass, fields

from prometheus_client.parser import text_string_to_metric_families

from controlplane.store.request_log import OK
from dataplane.protocol.tiers import Tier


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Requests, tokens and times of one side. `answered` counts whole answers, `errors` all other requests, those that
    their client cancelled too; tokens are those of whole answers. `ttft_sum_s` is over the requests that had a first
    token (`first_tokens`), `itl_sum_s` over the mean times between tokens of those that had several (`paced`).
    """

    answered: int = 0
    errors: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    first_tokens: int = 0
    ttft_sum_s: float = 0.0
    paced: int = 0
    itl_sum_s: float = 0.0

    @property
    def ttft_s(self) -> float | None:
        """The mean time to the first token; None without any."""
        return self.ttft_sum_s / self.first_tokens if self.first_tokens else None

    @property
    def itl_s(self) -> float | None:
        """The mean over requests of the mean time between tokens; None without any."""
        return self.itl_sum_s / self.paced if self.paced else None

    def since(self, before: "Counts") -> "Counts":
        """What was counted since then."""
        return Counts(**{each.name: getattr(self, each.name) - getattr(before, each.name) for each in fields(self)})


def counted(metrics: str, tier: Tier) -> Counts:
    """What a gateway has counted of a tier, from its metrics in Prometheus' text format. Refusals by a tenant's limit
    have no tier, so all of them are errors of this one.
    """
    samples = [sample for family in text_string_to_metric_families(metrics) for sample in family.samples]

    def total(name: str, keep: Callable[[dict[str, str]], bool]) -> float:
        return sum(sample.value for sample in samples if sample.name == name and keep(sample.labels))

    def of_tier(name: str) -> float:
        return total(name, lambda labels: labels["tier"] == tier)

    def ended(*, well: bool) -> int:
        name = "tidepool_requests_total"
        return int(total(name, lambda labels: labels["tier"] == tier and (labels["outcome"] == OK) == well))

    ttft, itl = "gen_ai_server_time_to_first_token_seconds", "gen_ai_server_time_per_output_token_seconds"
    return Counts(
        answered=ended(well=True),
        errors=ended(well=False) + int(total("tidepool_limit_refusals_total", lambda _: True)),
        input_tokens=int(of_tier("tidepool_input_tokens_total")),
        output_tokens=int(of_tier("tidepool_output_tokens_total")),
        first_tokens=int(of_tier(f"{ttft}_count")),
        ttft_sum_s=of_tier(f"{ttft}_sum"),
        paced=int(of_tier(f"{itl}_count")),
        itl_sum_s=of_tier(f"{itl}_sum"),
    )


def streams(metrics: str) -> int:
    """How many requests a gateway was answering when it wrote its metrics."""
    found = [
        sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == "tidepool_streams"
    ]
    return int(sum(found))
