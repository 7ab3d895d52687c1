"""Recordings of rates: a plain CSV, and the weeks of SageServe, Azure 2024 and ServeGen. A missing value is a gap."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from forecasts.importers.lines import CsvFile, DemandFileError, Line, Progress, no_progress, open_csv
from forecasts.importers.requests import CODING, azure_requests
from forecasts.importers.settings import MINUTE_S, ImportSettings
from forecasts.series import DemandRow

AZURE_CODING_INPUT_TOKENS = 2560.0
AZURE_BUCKET_S = 10.0
DEMAND = ("start_s", "region", "model", "tokens_per_s")
_SAGESERVE = ("minute", "model", "workload", "prompt_tokens_per_min")
SERVEGEN = ("model", "t_s", "rps_all_clients", "rps_clients_with_length_data", "input_tps_covered")
SERVEGEN_CLIENTS = ("client_chunk", "timestamp_s", "rate_rps")
_DEFAULTS = ImportSettings()


def read_demand_csv(path: Path, _: ImportSettings = _DEFAULTS, progress: Progress = no_progress) -> Iterator[DemandRow]:
    """A CSV with the columns start_s (Unix time), region, model, tokens_per_s, in its own order; empty = a gap.

    Raises:
        DemandFileError: a column is missing, or a value is no number, negative or empty where it must not be.
    """
    with open_csv(path, progress) as file:
        yield from map(demand_row, file.lines(DEMAND))


def demand_row(line: Line) -> DemandRow:
    """The row of a line with the columns of `DEMAND`."""
    return DemandRow(
        start_s=line.unix_time_s("start_s"),
        region=line.word("region"),
        model=line.word("model"),
        tokens_per_s=line.amount_or_gap("tokens_per_s"),
    )


def read_sageserve_week(
    path: Path, settings: ImportSettings = _DEFAULTS, progress: Progress = no_progress
) -> Iterator[DemandRow]:
    """SageServe's week of November 2024: prompt tokens per minute and model, regions summed; minute 0 is a Monday's.

    The workload "prod" is the interactive one, "dev" the other.

    Raises:
        DemandFileError: as for `read_demand_csv`, or the file holds no row of that workload.
    """
    found: set[str] = set()
    with open_csv(path, progress) as file:
        for workload, row in sageserve_rows(file, settings):
            found.add(workload)
            if workload == settings.workload:
                yield row
    if found and settings.workload not in found:
        known = ", ".join(sorted(found)[:10])
        raise DemandFileError(f"{path}: column workload: no row has {settings.workload!r}; found: {known}")


def sageserve_rows(file: CsvFile, settings: ImportSettings) -> Iterator[tuple[str, DemandRow]]:
    """Each line's workload, and the demand of a minute."""
    for line in file.lines(_SAGESERVE):
        tokens = line.amount_or_gap("prompt_tokens_per_min")
        yield (
            line.word("workload"),
            DemandRow(
                start_s=line.time_after_s(settings.start_s, "minute", MINUTE_S),
                region=settings.region,
                model=line.word("model"),
                tokens_per_s=None if tokens is None else tokens / MINUTE_S,
            ),
        )


def read_azure_week(
    path: Path, settings: ImportSettings = _DEFAULTS, progress: Progress = no_progress
) -> Iterator[DemandRow]:
    """Azure's week of May 2024: as published, with a line per request, or as requests per 10 s.

    Counts have the columns Time (UTC) and TIMESTAMP; the latter, so named in the source, is the number of requests.
    They are multiplied by `tokens_per_request`; the coding trace has about 2,560. A minute is the mean of its known
    counts.

    Raises:
        DemandFileError: as for `read_demand_csv`.
    """
    with open_csv(path, progress) as file:
        yield from (_azure_minutes if "Time" in file.header else azure_requests)(file, settings)


def _azure_minutes(file: CsvFile, settings: ImportSettings) -> Iterator[DemandRow]:
    tokens_per_request = settings.tokens_per_request or AZURE_CODING_INPUT_TOKENS
    requests: dict[float, list[float]] = {}
    for start_s, count in azure_counts(file):
        minute = requests.setdefault(start_s // MINUTE_S * MINUTE_S, [])
        if count is not None:
            minute.append(count)
    for start_s, counts in sorted(requests.items()):
        rate = sum(counts) / (AZURE_BUCKET_S * len(counts)) * tokens_per_request if counts else None
        yield DemandRow(start_s=start_s, region=settings.region, model=settings.model or CODING, tokens_per_s=rate)


def azure_counts(file: CsvFile) -> Iterator[tuple[float, float | None]]:
    """Unix times, and the number of requests in the `AZURE_BUCKET_S` from then on; None = a gap."""
    for line in file.lines(("Time", "TIMESTAMP")):
        yield line.date_time_s("Time"), line.amount_or_gap("TIMESTAMP")


def read_servegen(
    path: Path, settings: ImportSettings = _DEFAULTS, progress: Progress = no_progress
) -> Iterator[DemandRow]:
    """ServeGen per 10 minutes: the rates of whole models, or of one model's clients. See the README of the data.

    Requests are multiplied by `tokens_per_request`. Its default for whole models is the mean of the whole file over the
    clients with known lengths: these are a changing 15 to 94 % of the requests, so that a mean of 10 minutes would
    mostly show which clients are known. For clients it is required; they are distributed round-robin over the regions.
    A time at which all clients are at zero is a gap.

    Raises:
        DemandFileError: as for `read_demand_csv`, or `tokens_per_request` or a single region is needed.
    """
    with open_csv(path, progress) as file:
        if "client_chunk" in file.header:
            if settings.tokens_per_request is None:
                raise DemandFileError(f"{path}: holds requests of clients only: tokens_per_request is needed")
            yield from _servegen_clients(file, settings, settings.tokens_per_request)
        else:
            if settings.model is not None or len(settings.regions) > 1:
                raise DemandFileError(f"{path}: holds whole models by name, so takes no model and a single region")
            yield from _servegen_models(file, settings)


def _servegen_models(file: CsvFile, settings: ImportSettings) -> Iterator[DemandRow]:
    found: list[tuple[float, str, float]] = []
    tokens, requests = defaultdict[str, float](float), defaultdict[str, float](float)
    for line in file.lines(SERVEGEN):
        model = line.word("model")
        start_s = line.time_after_s(settings.start_s, "t_s", 1.0)
        found.append((start_s, model, line.amount("rps_all_clients")))
        requests[model] += line.amount("rps_clients_with_length_data")
        tokens[model] += line.amount("input_tps_covered")
    for start_s, model, requests_per_s in found:
        tokens_per_request = settings.tokens_per_request
        if tokens_per_request is None:
            if not requests[model]:
                raise DemandFileError(f"{file.path}: {model} has no lengths at all: tokens_per_request is needed")
            tokens_per_request = tokens[model] / requests[model]
        rate = requests_per_s * tokens_per_request if requests_per_s > 0 else None
        yield DemandRow(start_s=start_s, region=settings.region, model=model, tokens_per_s=rate)


def _servegen_clients(file: CsvFile, settings: ImportSettings, tokens_per_request: float) -> Iterator[DemandRow]:
    regions = settings.regions
    indices: dict[str, int] = {}
    rates: defaultdict[float, list[float]] = defaultdict(lambda: [0.0] * len(regions))
    for line in file.lines(SERVEGEN_CLIENTS):
        index = indices.setdefault(line.word("client_chunk"), len(indices) % len(regions))
        start_s = line.time_after_s(settings.start_s, "timestamp_s", 1.0)
        rates[start_s][index] += line.amount("rate_rps")
    for index, region in enumerate(regions):
        for start_s, by_region in sorted(rates.items()):
            rate = by_region[index] * tokens_per_request if any(by_region) else None
            yield DemandRow(start_s=start_s, region=region, model=settings.model or "servegen", tokens_per_s=rate)
