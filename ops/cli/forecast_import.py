"""`forecast import`: recorded demand of public formats, to a CSV file or to the API."""

import csv
import gzip
import io
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

import typer

from ops.cli.examples import examples
from ops.client.api import UPLOAD_TIMEOUT_S, CommandError, connected
from ops.client.screen import AsJson, print_answer, progress_bar, time_text

if TYPE_CHECKING:
    from forecasts.importers.formats import DemandFormat
    from forecasts.importers.settings import ImportSettings
    from forecasts.series import DemandRow

COLUMNS = ("start_s", "region", "model", "tokens_per_s")
MINUTE_S = 60
ROWS_PER_CHUNK = 2_000
OPTIONS = {
    "start_s": "--start",
    "regions": "--region",
    "model": "--model",
    "tokens_per_request": "--tokens-per-request",
    "workload": "--workload",
}
"""The option that fills a field of the importer's settings."""


Format = Literal["csv", "azure-2023", "azure-2024", "sageserve", "servegen", "burstgpt", "mooncake"]
"""The names of `forecasts.importers.formats.FORMATS`, which imports numpy."""
Out = Annotated[
    Path | None, typer.Option(dir_okay=False, help="Write a CSV here (.gz packs it) instead of asking the API.")
]
Start = Annotated[
    str | None,
    typer.Option(help="Time 0 of a file with relative times: Unix seconds, or UTC. Default: 2024-11-11, a Monday."),
]
Regions = Annotated[
    list[str] | None, typer.Option(help="Region to name; clients of ServeGen are dealt out to several. Default: all.")
]
TokensPerRequest = Annotated[
    float | None, typer.Option(help="Mean input tokens of a request, where the file counts requests.")
]


@examples(
    "tidepool forecast import azure-2023 AzureLLMInferenceTrace_code.csv --out demand.csv",
    "tidepool forecast import sageserve week.csv.gz --start 2024-11-11 --region us-east",
)
def import_recording(
    context: typer.Context,
    format: Annotated[Format, typer.Argument(metavar="FORMAT", help="One of the formats above.")],
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="The recording; packed by gzip or not.")],
    out: Out = None,
    start: Start = None,
    region: Regions = None,
    model: Annotated[str | None, typer.Option(help="Model to name where the file names none.")] = None,
    tokens_per_request: TokensPerRequest = None,
    workload: Annotated[str | None, typer.Option(metavar="prod|dev", help="Of SageServe: interactive or not.")] = None,
    kind: Annotated[str | None, typer.Option(metavar="IW|NIW", help="For the API. Default: IW.")] = None,
    as_json: AsJson = False,
) -> None:
    """Import recorded demand as input tokens per second: into a CSV with --out, else into the API's demand.

    \b
    Formats:
      csv         start_s,region,model,tokens_per_s; an empty value is a gap
      azure-2023  Azure's trace, a line for each request: TIMESTAMP,ContextTokens,GeneratedTokens
      azure-2024  the same of 2024, or its requests per 10 s: Time,TIMESTAMP (2560 tokens a request by default)
      sageserve   a week of tokens per minute: minute,model,workload,prompt_tokens_per_min
      servegen    two weeks by 10 minutes, of models (rates) or of a model's clients (--tokens-per-request)
      burstgpt    a line for each request: Timestamp (seconds),Model,Request tokens,Response tokens,...
      mooncake    JSON lines, one for each request: timestamp (milliseconds), input_length, ...

    \b
    Requests are summed by minute; rates keep their own width (the API gets minutes). A gap of the file stays a gap.
    """
    if out is not None and kind is not None:
        raise CommandError("--kind is for the API: it means nothing with --out")
    form, settings = _form(
        format,
        start,
        regions=tuple(region) if region else None,
        model=model,
        tokens_per_request=tokens_per_request,
        workload=workload,
    )
    with _read(file, form, settings) as rows:
        if out is None:
            answer = _sent(context, _minutes(rows, form), kind or "IW")
        else:
            answer = {"format": format, "out": str(out)} | _written(rows, file, out)
    show_import(answer, as_json=as_json)


@contextmanager
def _read(file: Path, form: "DemandFormat", settings: "ImportSettings") -> "Iterator[Iterable[DemandRow]]":
    """The rows of a file, read as they are taken, with a progress bar."""
    from forecasts.importers.lines import DemandFileError

    try:
        with reading(file) as report:
            yield form.read(file, settings, report)
    except DemandFileError as error:
        raise CommandError(str(error)) from error


def _form(format: Format, start: str | None, **given: Any) -> "tuple[DemandFormat, ImportSettings]":
    """The format and the settings of its reader; an error names the option."""
    from forecasts.importers.formats import FORMATS

    form = FORMATS[format]
    try:
        return form, form.settings(start_s=None if start is None else _start_s(start), **given)
    except ValueError as error:
        field, _, message = str(error).partition(":")
        raise CommandError(f"{OPTIONS[field]}:{message}") from error


@contextmanager
def reading(file: Path) -> Iterator[Callable[[int], None]]:
    """A progress bar over the bytes of a file; the yielded function takes the number of bytes read."""
    size_bytes = file.stat().st_size
    doing = f"reading {file.name}"
    with progress_bar(doing, in_bytes=True) as report:
        yield lambda done: report(doing, done, size_bytes)
        report(doing, size_bytes, size_bytes)


def _start_s(text: str) -> float:
    from forecasts.importers.lines import unix_time_s

    try:
        return float(text) if text.isdigit() else unix_time_s(text)
    except ValueError as error:
        raise ValueError(f"start_s: neither Unix seconds nor a time like 2024-11-11 00:00: {text!r}") from error


def _minutes(rows: "Iterable[DemandRow]", form: "DemandFormat") -> "Iterator[DemandRow]":
    """Rows of minutes, as the API takes them: a longer bucket's rate is that of each of its minutes."""
    count = 1 if form.bucket_s is None else round(form.bucket_s / MINUTE_S)
    for row in rows:
        for minute in range(count):
            yield row._replace(start_s=row.start_s + minute * MINUTE_S)


def _sent(context: typer.Context, rows: "Iterable[DemandRow]", kind: str) -> Any:
    def chunks() -> Iterator[bytes]:
        yield (",".join(COLUMNS) + "\n").encode()
        source = iter(rows)
        while part := list(islice(source, ROWS_PER_CHUNK)):
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows(map(_fields, part))
            yield text.getvalue().encode()

    return send_demand(context, chunks(), kind)


def send_demand(context: typer.Context, chunks: Iterator[bytes], kind: str) -> Any:
    """Send demand as CSV to the API, which imports all of it or nothing."""
    with connected(context) as api:
        headers, params = {"Content-Type": "text/csv"}, {"kind": kind}
        return api.send(
            "POST", "/admin/demand", content=chunks, params=params, headers=headers, timeout=UPLOAD_TIMEOUT_S
        )


def _fields(row: "DemandRow") -> tuple[object, ...]:
    start_s = int(row.start_s) if row.start_s == int(row.start_s) else row.start_s
    return start_s, row.region, row.model, "" if row.tokens_per_s is None else row.tokens_per_s


def _written(rows: "Iterable[DemandRow]", file: Path, out: Path) -> dict[str, Any]:
    """Write all rows or nothing, and return their counts."""
    if out.exists() and out.samefile(file):
        raise CommandError(f"--out {out} is the file to read")
    count, gaps, series = 0, 0, set[tuple[str, str]]()
    first_s, last_s = float("inf"), float("-inf")
    with replaced(out) as text:
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in rows:
            writer.writerow(_fields(row))
            count += 1
            gaps += row.tokens_per_s is None
            series.add((row.region, row.model))
            first_s, last_s = min(first_s, row.start_s), max(last_s, row.start_s)
        if not count:
            raise CommandError(f"{file}: holds no demand: nothing after the header")
    return {"rows": count, "gaps": gaps, "series": len(series), "first_s": first_s, "last_s": last_s}


@contextmanager
def replaced(out: Path) -> Iterator[IO[str]]:
    """A text file that replaces `out` when it is complete. A pipe or a device is written directly."""
    special = out.exists() and not out.is_file()
    part = out if special else out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        with gzip.open(part, "wt", newline="") if out.suffix == ".gz" else part.open("w", newline="") as text:
            yield text
        if not special:
            part.replace(out)
    except OSError as error:
        raise CommandError(f"{out} cannot be written: {error.strerror or error}") from error
    finally:
        if not special:
            part.unlink(missing_ok=True)


def show_import(answer: Any, *, as_json: bool) -> None:
    """Print how much demand was imported, into the API or into the file `out`."""
    span = f", {time_text(answer['first_s'])} to {time_text(answer['last_s'])}" if answer["rows"] else ""
    text = f"{answer['rows']} minutes of {answer['series']} endpoints are imported{span}"
    if "out" in answer:
        text = f"{answer['out']}: {answer['rows']} rows of {answer['series']} series, {answer['gaps']} gaps{span}"
    print_answer(answer, text, as_json=as_json)
