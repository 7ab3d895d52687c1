"""The formats that demand is imported from, by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forecasts.importers.rates import read_azure_week, read_demand_csv, read_sageserve_week, read_servegen
from forecasts.importers.requests import read_azure_requests, read_burstgpt, read_mooncake
from forecasts.importers.settings import MINUTE_S, ImportSettings, Reader

REGIONS_MAX = 100


@dataclass(frozen=True, kw_only=True)
class DemandFormat:
    """One format.

    Attributes:
        about: the content of a file, in one line.
        read: the reader.
        takes: the names of the `ImportSettings` that apply to it.
        bucket_s: time covered by a row; None = defined by the file.
        regions_max: most regions that its demand may be distributed over.
    """

    about: str
    read: Reader
    takes: frozenset[str]
    bucket_s: float | None = MINUTE_S
    regions_max: int = 1

    def settings(self, **given: Any) -> ImportSettings:
        """Settings for this format by field of `ImportSettings`; None = not given.

        Raises:
            ValueError: a field does not apply to this format, or is out of range.
        """
        meant = {name: value for name, value in given.items() if value is not None}
        for name in meant:
            if name not in self.takes:
                raise ValueError(f"{name}: does not apply to this format")
        settings = ImportSettings(**meant)
        if len(settings.regions) > self.regions_max:
            raise ValueError(f"regions: this format takes one, got {len(settings.regions)}")
        return settings


FORMATS: Mapping[str, DemandFormat] = {
    "csv": DemandFormat(
        about="start_s,region,model,tokens_per_s; an empty value is a gap",
        read=read_demand_csv,
        takes=frozenset(),
        bucket_s=None,
    ),
    "azure-2023": DemandFormat(
        about="Azure LLM inference trace, a line for each request: TIMESTAMP,ContextTokens,GeneratedTokens",
        read=read_azure_requests,
        takes=frozenset({"regions", "model"}),
    ),
    "azure-2024": DemandFormat(
        about="the same of 2024, or its requests per 10 s: Time,TIMESTAMP (times --tokens-per-request, 2560)",
        read=read_azure_week,
        takes=frozenset({"regions", "model", "tokens_per_request"}),
    ),
    "sageserve": DemandFormat(
        about="a week of tokens per minute: minute,model,workload,prompt_tokens_per_min (--workload prod or dev)",
        read=read_sageserve_week,
        takes=frozenset({"start_s", "regions", "workload"}),
    ),
    "servegen": DemandFormat(
        about="two weeks by 10 minutes, of models (rates) or of one model's clients (needs --tokens-per-request)",
        read=read_servegen,
        regions_max=REGIONS_MAX,
        takes=frozenset({"start_s", "regions", "model", "tokens_per_request"}),
        bucket_s=600.0,
    ),
    "burstgpt": DemandFormat(
        about="a line for each request: Timestamp (seconds),Model,Request tokens,Response tokens,...",
        read=read_burstgpt,
        takes=frozenset({"start_s", "regions"}),
    ),
    "mooncake": DemandFormat(
        about="JSON lines, one for each request: timestamp (milliseconds), input_length, ...",
        read=read_mooncake,
        takes=frozenset({"start_s", "regions", "model"}),
    ),
}
