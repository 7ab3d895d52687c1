"""`node plan-memory`: what of some models fits on a card, without the card."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ops.cli.examples import examples
from ops.cli.model_adapters import describe_adapter
from ops.client.api import CommandError
from ops.client.screen import AsJson, Columns, bytes_text, notes, print_fields, print_json, print_table
from ops.profiling.cards import CARDS

if TYPE_CHECKING:
    from ops.local.checkpoints import Checkpoint
    from ops.profiling.memory_plan import Fit, MemoryPlan, ModelSizes

_ELEMENT_BYTES = 2
"""Of bfloat16, in which a GPU has weights and adapters."""


@examples(
    "tidepool node plan-memory models/qwen3-8b models/llama-1b --card H800",
    "tidepool node plan-memory models/qwen3-8b --adapter adapters/helpdesk --adapter adapters/sales --card L4",
    "tidepool node plan-memory models/llama-70b --card H100 --gpus 4",
    "tidepool node plan-memory hf://Qwen/Qwen3-8B --card L4 --context 8192 --json",
)
def plan_node_memory(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Folders of checkpoints, https:// or hf://.")],
    card: Annotated[str, typer.Option(metavar="GPU", help=f"{', '.join(sorted(CARDS))}.")],
    gpus: Annotated[int, typer.Option(min=1, help="Of a slot; they run each model together.")] = 1,
    context: Annotated[int, typer.Option(min=1, help="Tokens of a sequence, prompt and answer together.")] = 4096,
    memory_share: Annotated[
        float, typer.Option(min=0.1, max=1.0, help="Of the card's memory, for weights and KV.")
    ] = 0.9,
    adapter: Annotated[
        list[Path] | None, typer.Option(metavar="DIR", help="LoRA adapter of one of the models. May be repeated.")
    ] = None,
    private_host: Annotated[
        list[str] | None, typer.Option(help="Host or network to read from although it is not public.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict weights, KV, batch and times of models on GPUs, from their config.json and safetensors headers alone.

    \b
    Sizes are exact for the checkpoint's own type. Times are a guess by the card's data sheet: `tidepool node profile`
    measures them. Nothing is fetched but headers.
    """
    from ops.profiling.memory_plan import plan_memory

    if card not in CARDS:
        raise typer.BadParameter(f"--card must be one of {', '.join(sorted(CARDS))}, not '{card}'")
    sizes = [_sizes_of(model, gpus, tuple(private_host or ())) for model in models]
    adapters_bytes = sum(_ELEMENT_BYTES * describe_adapter(folder)["parameters"] for folder in adapter or [])
    plan = plan_memory(
        sizes, CARDS[card], memory_share=memory_share, tokens=context, adapters_bytes=adapters_bytes, gpus=gpus
    )
    if as_json:
        print_json(asdict(plan))
        return
    _show(plan)


def _sizes_of(model: str, gpus: int, private_hosts: tuple[str, ...]) -> "ModelSizes":
    from ops.local.checkpoints import CheckpointError, read_checkpoint
    from ops.profiling.memory_plan import ModelSizes

    try:
        found = read_checkpoint(model, private_hosts)
    except CheckpointError as error:
        raise CommandError(str(error)) from error
    copies = _copies_of_kv(found, gpus)
    if gpus > 1 and found.model["task"] != "embed" and found.config.get("quantization_config"):
        _check_quantized(found, gpus)
    kept = {name: found.model[name] for name in ("weights_bytes", "context_tokens", "parameters")}
    kv_bytes = copies * found.model["kv_bytes_per_token"]
    return ModelSizes(name=model.rstrip("/").rpartition("/")[2], kv_bytes_per_token=kv_bytes, **kept)


def _copies_of_kv(checkpoint: "Checkpoint", gpus: int) -> int:
    """How many GPUs of a slot have the same KV heads.

    Raises:
        CommandError: the model cannot be divided among so many.
    """
    from dataplane.engines.torch.model.split import rank_config
    from dataplane.protocol.errors import ModelLoadError

    if gpus == 1:
        return 1
    config, path = SimpleNamespace(**checkpoint.config), checkpoint.model["path"]
    try:
        mine = rank_config(config, gpus, _ELEMENT_BYTES, path)
    except ModelLoadError as error:
        raise CommandError(error.message) from error
    except AttributeError as error:
        raise CommandError(f"{path}/config.json needs {error.name} to be divided among {gpus} GPUs") from error
    kv_heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return gpus * int(mine.num_key_value_heads) // kv_heads


def _check_quantized(checkpoint: "Checkpoint", gpus: int) -> None:
    """Refuse what the torch engine would refuse to divide.

    Raises:
        CommandError: a GPU of the slot would have a part of a group or block.
    """
    from dataplane.protocol.errors import ModelLoadError

    config, path = checkpoint.config, checkpoint.model["path"]
    try:
        from dataplane.engines.torch.model.parts import check_quantized_parts
        from dataplane.engines.torch.model.skeleton import MODEL_TYPES
    except ImportError:
        notes().print(f"without torch it is not known whether the groups of {path} can be divided among {gpus} GPUs")
        return
    if config.get("model_type") in MODEL_TYPES:
        try:
            check_quantized_parts(path, config, checkpoint.types, gpus)
        except ModelLoadError as error:
            raise CommandError(error.message) from error


def _show(plan: "MemoryPlan") -> None:
    card, usable = plan.card, bytes_text(plan.usable_bytes)
    memory: Columns = {
        "model": lambda row: row["fit"].model.name,
        "weights": lambda row: bytes_text(row["fit"].model.weights_bytes),
        "KV per token": lambda row: bytes_text(row["fit"].model.kv_bytes_per_token),
        "KV tokens": lambda row: f"{row['fit'].kv_tokens:,}",
        f"sequences of {plan.tokens:,}": lambda row: row["fit"].batch if row["fit"].fits else "does not fit",
    }
    times: Columns = {
        "switch": lambda row: f"{row['fit'].times.switch_s:.2f} s",
        "prompt of 1,000": lambda row: _milliseconds(row["fit"].prompt_s),
        "step, one": lambda row: _milliseconds(row["fit"].step_s),
        "step, full": lambda row: _milliseconds(row["fit"].full_step_s),
        "tokens/s, full": lambda row: "-" if (rate := row["fit"].tokens_per_s) is None else f"{rate:,.0f}",
    }
    slot = f"one {card.name}" if plan.gpus == 1 else f"{plan.gpus} {card.name}"
    print_table(f"Each alone on {slot}, with {usable}", {**memory, **times}, _rows(plan.alone))
    pooled = plan.pooled
    if len(plan.alone) > 1:
        print_table(f"All in one pooled slot of {slot}", memory, _rows(pooled.fits))
    share = "the largest model does not fit" if pooled.kv_share is None else f"{pooled.kv_share:g}"
    needed = "at least" if plan.gpus == 1 else "at most, as each GPU has a part of them"
    adapters = [("TIDEPOOL_AGENT_ADAPTERS_BYTES", f"{plan.adapters_bytes} {needed}, in bfloat16")]
    print_fields(
        [
            ("TIDEPOOL_AGENT_KV_SHARE", share),
            *(adapters if plan.adapters_bytes else []),
            ("host memory", f"{bytes_text(pooled.host_bytes)}: all weights, and KV as large as the slot's"),
        ]
    )
    notes().print("times are a guess by the card's data sheet, until `tidepool node profile` has measured them")


def _rows(fits: "tuple[Fit, ...]") -> list[Mapping[str, Any]]:
    return [{"fit": fit} for fit in fits]


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f} ms"
