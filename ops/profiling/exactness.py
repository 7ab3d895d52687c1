"""`tidepool node check`: are the tokens of a multiplexed engine those of transformers?

Each model first runs alone in transformers' `generate`. Then one engine runs all models in an arena that holds little
more than the largest one, with KV memory for little more than one request: models switch after a few steps, KV is
swapped, requests arrive at any step, and some are cancelled. Every token and its logits are compared.

If two tokens are nearly tied, rounding may choose the other one. That is no mismatch as long as the reference's logits
of the two differ by no more than the tolerance, or the choice between two experts is nearly tied at that token. Such
ties are counted, and the request continues from the reference's token, so that the tokens after it are compared too.
"""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from dataplane.engines.torch.model.parallel import Rank, Unconnected
from dataplane.engines.torch.model.skeleton import Skeleton, build_skeleton
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.memory.kv_cache import blocks_for
from dataplane.protocol.messages import ModelSpec
from dataplane.scheduling.decode import DecodeSettings
from dataplane.scheduling.schedule import TurnSettings
from ops.profiling.figures import Progress
from ops.profiling.interleaving import CheckReport, CheckSettings, Interleaving
from ops.profiling.reference import longest_prompt, make_prompts, run_reference

BLOCK_TOKENS = 8
SLAB_BYTES_MIN = 4096
SLABS_WANTED = 512
BATCH_MAX = 4
QUOTA_S = 0.02
"""Decode quota of a model: a few steps by the clock of `Interleaving`."""


def check_models(folders: Sequence[Path], settings: CheckSettings, report: Progress) -> CheckReport:
    """Compare all models.

    Raises:
        ModelLoadError: a folder holds no model that the engine runs, or that so many ranks can run.
        ValueError: the device cannot be used, a model is quantized, or its context is too short for `tokens` and a
            prompt.
    """
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("no CUDA device can be used here")
    if settings.device == "cuda" and torch.cuda.device_count() < settings.ranks:
        raise ValueError(f"{settings.ranks} ranks need as many CUDA devices; here are {torch.cuda.device_count()}")
    names = _names(folders)
    dtype = getattr(torch, settings.dtype)
    skeletons = {name: build_skeleton(folder, dtype, torch.device("cpu")) for name, folder in names.items()}
    for name, skeleton in skeletons.items():
        if skeleton.is_quantized:
            raise ValueError(
                f"{name} is quantized: transformers has no reference for it here. Check the model it was made of"
            )
    references = {}
    for number, (name, skeleton) in enumerate(skeletons.items()):
        if settings.tokens >= skeleton.geometry.context_tokens:
            raise ValueError(f"{name} has a context of {skeleton.geometry.context_tokens} tokens, too few for --tokens")
        report(f"transformers runs {name}", number, len(names))
        prompts = make_prompts(skeleton, count=settings.prompts, tokens=settings.tokens, seed=settings.seed + number)
        references[name] = run_reference(
            names[name],
            skeleton,
            prompts,
            tokens=settings.tokens,
            device=settings.device,
            rounding=settings.ranks > 1 and settings.dtype != "float32",
        )
    specs = [_spec(name, names[name], skeleton) for name, skeleton in skeletons.items()]
    rank = Rank(index=0, count=settings.ranks, collectives=Unconnected())
    parts = [build_skeleton(folder, dtype, torch.device("cpu"), rank=rank) for folder in names.values()]
    with TemporaryDirectory(prefix="tidepool-check-") as cache:
        interleaving = Interleaving(specs, references, slot_for_one(parts, settings, Path(cache)), settings)
        try:
            return interleaving.run(report)
        finally:
            interleaving.engine.close()


def slot_for_one(skeletons: Sequence[Skeleton], settings: CheckSettings, cache_folder: Path) -> TorchEngineSettings:
    """Engine settings for the largest model, with KV memory for one and a half of the largest requests. The skeletons
    are those of a rank; the ranks share host copies in the folder.
    """
    longest = [longest_prompt(skeleton, tokens=settings.tokens) + settings.tokens for skeleton in skeletons]
    blocks_bytes = [s.geometry.kv_bytes_per_token(s.dtype) * BLOCK_TOKENS for s in skeletons]
    wanted_bytes = max(*blocks_bytes, SLAB_BYTES_MIN, max(s.size_bytes for s in skeletons) // SLABS_WANTED)
    slab_bytes = 2 ** (wanted_bytes - 1).bit_length()
    needed = [
        -(-blocks_for(tokens, BLOCK_TOKENS) // (slab_bytes // block_bytes))
        for tokens, block_bytes in zip(longest, blocks_bytes, strict=True)
    ]
    return TorchEngineSettings(
        device=settings.device,
        dtype=settings.dtype,
        weights_bytes=max(skeleton.slabs(slab_bytes) for skeleton in skeletons) * slab_bytes,
        kv_bytes=-(-max(needed) * 3 // 2) * slab_bytes,
        host_kv_bytes=sum(needed) * (settings.prompts + 1) * slab_bytes,
        slab_bytes=slab_bytes,
        block_tokens=BLOCK_TOKENS,
        prefill_tokens_per_step_max=max(1, max(longest) // 3),
        batch_max=BATCH_MAX,
        turns=TurnSettings(decode=DecodeSettings(quota_max_s=QUOTA_S, quota_min_s=QUOTA_S)),
        ranks=settings.ranks,
        cache_folder=None if settings.ranks == 1 else cache_folder,
    )


def _names(folders: Sequence[Path]) -> dict[str, Path]:
    """Names of the folders, numbered if two are equal."""
    names: dict[str, Path] = {}
    for folder in folders:
        name = folder.resolve().name
        alike = sum(other.rpartition("#")[0] == name or other == name for other in names)
        names[f"{name}#{alike + 1}" if alike else name] = folder
    return names


def _spec(name: str, folder: Path, skeleton: Skeleton) -> ModelSpec:
    return ModelSpec(
        name=name,
        path=str(folder),
        weights_bytes=skeleton.size_bytes,
        kv_bytes_per_token=skeleton.geometry.kv_bytes_per_token(skeleton.dtype),
        context_tokens=skeleton.geometry.context_tokens,
    )
