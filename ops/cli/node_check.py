"""`node check`: compares the tokens of a shared worker on this machine with those of transformers."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dataplane.protocol.errors import ModelLoadError
from ops.cli.examples import examples
from ops.client.api import CommandError
from ops.client.screen import Columns, notes, print_fields, print_json, print_table, progress_bar, same

if TYPE_CHECKING:
    from ops.profiling.interleaving import CheckReport

MISMATCHES_SHOWN = 3


Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16"]


@examples("tidepool node check models/qwen3-0.6b models/llama-1b --dtype bfloat16 --switches 200")
def check_node(
    model_dirs: Annotated[
        list[Path],
        typer.Argument(metavar="MODEL_DIR...", exists=True, file_okay=False, help="Hugging Face checkpoints."),
    ],
    device: Annotated[Device, typer.Option(help="Where to run.")] = "cpu",
    dtype: Annotated[Dtype, typer.Option(help="What to compute in.")] = "float32",
    switches: Annotated[int, typer.Option(min=0, help="The least number of switches.")] = 50,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts for each model.")] = 4,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to make from each prompt, at most.")] = 16,
    ranks: Annotated[int, typer.Option(min=1, max=64, help="Processes that run each model: one for each GPU.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, and nothing else.")] = False,
) -> None:
    """Interleave models on one pooled slot and compare tokens and logits with transformers' own generate.

    \b
    The slot holds the largest model and hardly more, and KV for little more than one request, so that models switch
    and KV is swapped all the time. A token that differs is a mismatch unless the two are nearly tied in the
    reference, or two experts are for their place; such ties are counted. Logits are reported and must keep the bounds
    below the table. The status is 1 if there was a mismatch.
    """
    from transformers.utils.logging import disable_progress_bar

    from ops.profiling.exactness import check_models
    from ops.profiling.interleaving import CheckSettings

    disable_progress_bar()  # type: ignore[no-untyped-call]
    given: dict[str, Any] = {"device": device, "dtype": dtype, "switches": switches, "ranks": ranks}
    settings = CheckSettings(**given, prompts=prompts, tokens=tokens)
    try:
        with progress_bar("reading the models") as report_progress:
            report = check_models(model_dirs, settings, report_progress)
    except (ModelLoadError, ValueError) as error:
        raise CommandError(str(error)) from error
    if as_json:
        print_json(asdict(report) | {"tolerance": settings.tolerance, "failed": report.failed})
    else:
        _show(report)
    if report.failed:
        raise CommandError(f"not the tokens and logits of transformers: {', '.join(report.failed)}")


def _shares(row: Mapping[str, Any], name: str) -> str:
    return f"{row['logits'][name]:.1g} ({row['spread'][name]:.1g})"


def _show(report: "CheckReport") -> None:
    from ops.profiling.interleaving import SPREADS_MAX

    columns: Columns = {
        **same("model", "architecture", "prompts"),
        "longest": "prompt_tokens_max",
        "window": "window_tokens",
        "tokens": "tokens",
        "equal": lambda row: not row["mismatches"],
        "ties (routers)": lambda row: f"{row['ties']} ({row['router_ties']})",
        "logit difference": lambda row: f"{row['logit_difference']:.2g}",
        "share (own)": lambda row: _shares(row, "most"),
        "settled": lambda row: _shares(row, "settled"),
        "median": lambda row: _shares(row, "median"),
        "switches": "switches",
    }
    settings = report.settings
    is_rounded = settings.ranks > 1 and settings.dtype != "float32"
    rounded = f", or as {settings.dtype} differs from float32" if is_rounded else ""
    print_table(
        f"Pooled slot against transformers, {settings.dtype} on {settings.ranks} {settings.device}",
        columns,
        asdict(report)["models"],
    )
    print_fields(
        [
            ("switches", report.switches),
            ("models in the arena", f"{report.resident_max} at most"),
            ("preemptions", report.preemptions),
            ("KV swapped", f"{report.swapped_out} out, {report.swapped_in} in, {report.recomputed} recomputed"),
            ("left early", f"{report.left} requests"),
            ("a tie", f"logits at most {settings.tolerance:g} of the largest apart"),
            ("a tie of routers", f"experts at most {settings.router_tolerance:g} of the probability apart"),
            ("share", "of a token's largest logit; own: transformers against itself, the same tokens in one pass"),
            ("settled", "the same at tokens up to which no routers tie; median: of all tokens"),
            ("bounds", f"settled and median: {settings.tolerance:g} or {SPREADS_MAX:g} times their own{rounded}"),
        ]
    )
    for finding in report.models:
        for mismatch in finding.mismatches[:MISMATCHES_SHOWN]:
            notes().print(f"{finding.model}: {mismatch}", markup=False)
        if len(finding.mismatches) > MISMATCHES_SHOWN:
            notes().print(f"{finding.model}: and {len(finding.mismatches) - MISMATCHES_SHOWN} more", markup=False)
