"""What of some models fits on a slot of one or several GPUs, from their checkpoints alone: weights, KV, batch, and step
times by guess.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ops.profiling.cards import Card
from ops.profiling.guess import GuessedTimes, guess_times

PROMPT_TOKENS = 1_000
"""The prompt whose prefill is told."""
_KV_SHARE_STEP = 0.01


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """What a checkpoint says of itself. `kv_bytes_per_token`: of keys and values of all layers, on all GPUs of a slot,
    some of which repeat a KV head where they are more than heads. `parameters` None: not known.
    """

    name: str
    weights_bytes: int
    kv_bytes_per_token: int
    context_tokens: int
    parameters: int | None = None


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A model with a share of a slot's memory for KV. `batch`: sequences of so many tokens as the plan was asked for.

    `prompt_s`: a prefill of `PROMPT_TOKENS`; `step_s`: a decode step of one sequence, `full_step_s`: of the batch.
    """

    model: ModelSizes
    kv_bytes: int
    kv_tokens: int
    batch: int
    times: GuessedTimes
    prompt_s: float
    step_s: float
    full_step_s: float | None

    @property
    def fits(self) -> bool:
        """Whether its weights leave room for a sequence."""
        return self.batch > 0

    @property
    def tokens_per_s(self) -> float | None:
        """Output tokens a second of the full batch."""
        return None if self.full_step_s is None else self.batch / self.full_step_s


@dataclass(frozen=True, kw_only=True)
class PooledFit:
    """All models in one slot, which switches between them.

    Attributes:
        kv_share: `TIDEPOOL_AGENT_KV_SHARE` that leaves the largest model its weights; None: it does not fit.
        fits: each model with all of the slot's KV.
        host_bytes: of all weights, which a node keeps in host memory, and of KV as large as the slot's.
    """

    kv_share: float | None
    fits: tuple[Fit, ...]
    host_bytes: int


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """On slots of `gpus` GPUs. `usable_bytes`: of a slot's memory, for weights and KV, beside `adapters_bytes` on each
    GPU for LoRA adapters. `alone`: each model on a slot of its own.
    """

    card: Card
    gpus: int
    usable_bytes: int
    tokens: int
    alone: tuple[Fit, ...]
    pooled: PooledFit
    adapters_bytes: int = 0


def plan_memory(
    models: Sequence[ModelSizes],
    card: Card,
    *,
    memory_share: float,
    tokens: int,
    adapters_bytes: int = 0,
    gpus: int = 1,
) -> MemoryPlan:
    """Predict what fits. Norms and other weights that all GPUs of a slot have count once.

    Args:
        models: at least one.
        card: each GPU.
        memory_share: of its memory that weights and KV may take; the rest is the runtime's and activations'.
        tokens: of a sequence, prompt and answer together; a model with a shorter context takes its own.
        adapters_bytes: of all LoRA adapters that are served together. Each GPU of several has a part, and is taken to
            have all.
        gpus: of a slot, which run each model together.
    """
    usable = max(1, gpus * (int(card.memory_bytes * memory_share) - adapters_bytes))
    slot = _Slot(card=card, gpus=gpus, usable_bytes=usable, tokens=tokens)
    alone = tuple(_fit(model, max(0, usable - model.weights_bytes), slot) for model in models)
    return MemoryPlan(
        card=card,
        gpus=gpus,
        usable_bytes=usable,
        tokens=tokens,
        alone=alone,
        pooled=_pooled(models, slot),
        adapters_bytes=adapters_bytes,
    )


@dataclass(frozen=True, kw_only=True)
class _Slot:
    card: Card
    gpus: int
    usable_bytes: int
    tokens: int


def _pooled(models: Sequence[ModelSizes], slot: _Slot) -> PooledFit:
    largest = max(model.weights_bytes for model in models)
    steps = int((1 - largest / slot.usable_bytes) / _KV_SHARE_STEP)
    kv_bytes = int(slot.usable_bytes * steps * _KV_SHARE_STEP) if steps > 0 else 0
    return PooledFit(
        kv_share=round(steps * _KV_SHARE_STEP, 2) if steps > 0 else None,
        fits=tuple(_fit(model, kv_bytes, slot) for model in models),
        host_bytes=sum(model.weights_bytes for model in models) + kv_bytes,
    )


def _fit(model: ModelSizes, kv_bytes: int, slot: _Slot) -> Fit:
    times = guess_times(model.weights_bytes, model.kv_bytes_per_token, slot.card, model.parameters, gpus=slot.gpus)
    length = min(slot.tokens, model.context_tokens)
    kv_tokens = kv_bytes // model.kv_bytes_per_token
    batch = kv_tokens // length
    return Fit(
        model=model,
        kv_bytes=kv_bytes,
        kv_tokens=kv_tokens,
        batch=batch,
        times=times,
        prompt_s=times.latency.prefill_s(PROMPT_TOKENS, PROMPT_TOKENS**2),
        step_s=times.latency.decode_s(length, 1),
        full_step_s=times.latency.decode_s(batch * length, batch) if batch else None,
    )
