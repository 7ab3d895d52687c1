"""A model of the slot as the vLLM engine keeps it, and what stands for the KV of its sequences."""

from collections.abc import Sequence
from dataclasses import dataclass

from dataplane.engines.core.kv import KvLocation
from dataplane.engines.core.sequences import Chunk, TokenSequence
from dataplane.engines.core.served_models import ServedModel
from dataplane.engines.interface import KvHandle
from dataplane.engines.vllm.runner import Runner


@dataclass(eq=False, kw_only=True)
class VllmKv:
    """The KV of a sequence: the request of vLLM that has it, or will have it again. `vllm_id` None: not asked yet."""

    runner: Runner
    bytes_per_token: float
    vllm_id: str | None = None

    @property
    def location(self) -> KvLocation:
        """Where it is. What vLLM preempted comes back by itself, so it counts as on the device."""
        return KvLocation.NONE if self.vllm_id is None else KvLocation.DEVICE

    @property
    def tokens(self) -> int:
        """How many tokens have keys and values now."""
        return 0 if self.vllm_id is None else self.runner.computed_tokens(self.vllm_id)

    @property
    def size_bytes(self) -> int:
        """What it takes on the slot."""
        return int(self.tokens * self.bytes_per_token)


class VllmKvMemory:
    """Meets `dataplane.engines.core.kv.KvMemory`. vLLM itself makes room, so that only dropping is asked of it."""

    freeing = False
    swapped_out_total = 0
    swapped_in_total = 0

    def grow(self, kv: VllmKv, tokens: int) -> bool:
        """vLLM does it."""
        raise AssertionError("vLLM gives its requests their KV itself")

    def fits(self, kv: VllmKv, *, spare: int) -> bool:
        """vLLM knows."""
        raise AssertionError("vLLM gives its requests their KV itself")

    def swap_out(self, kv: VllmKv, tokens: int) -> bool:
        """No KV goes to host memory."""
        return False

    def swap_in(self, kv: VllmKv) -> bool:
        """None is there."""
        return False

    def drop(self, kv: VllmKv) -> None:
        """Have vLLM forget the request."""
        if kv.vllm_id is not None:
            kv.runner.end(kv.vllm_id)
            kv.vllm_id = None

    def adopt(self, kv: VllmKv, handle: KvHandle) -> bool:
        """KV of other slots is of another shape; it is computed anew."""
        return False

    def handle(self, kv: VllmKv, tokens: int) -> KvHandle:
        """Nothing is handed over."""
        raise AssertionError("the settings allow no hand-over")


VllmSequence = TokenSequence[VllmKv]


@dataclass(eq=False, kw_only=True)
class VllmModel(ServedModel[VllmKv]):
    """One model. `stored_bytes`: of its weights; `kv_bytes`: of its KV blocks; `come_s`: how long its weights took to
    come, with making room, the last time; `used_s`: when it had its last step.
    """

    runner: Runner
    stored_bytes: int
    kv_bytes: int
    eos_ids: tuple[int, ...]
    wake_s: float
    used_s: float = 0.0

    @property
    def weights_bytes(self) -> int:
        """The size of its weights."""
        return self.stored_bytes

    @property
    def switch_s(self) -> float:
        """How long it takes until it decodes again after it was away: its weights come, and KV is prefilled anew."""
        lost = [len(sequence.tokens) for sequence in self.decoding]
        return self.wake_s + (self.estimate.prefill_s(sum(lost), sum(n * n for n in lost)) if lost else 0.0)

    def new_kv(self) -> VllmKv:
        """The KV of a sequence that has none yet."""
        return VllmKv(runner=self.runner, bytes_per_token=self.kv_bytes / self.runner.kv_tokens)

    def observe(self, chunks: Sequence[Chunk[VllmKv]], took_s: float) -> None:
        """Learn what steps cost from one that only decoded, or only prefilled."""
        decodes = [chunk.sequence.cached > 0 and chunk.sequence.pending == 1 for chunk in chunks]
        if chunks and all(decodes):
            context = sum(chunk.sequence.cached for chunk in chunks)
            self.estimate = self.estimate.observe_decode(took_s, context, len(chunks))
        elif chunks and not any(decodes):
            tokens = sum(chunk.count for chunk in chunks)
            self.estimate = self.estimate.observe_prefill(took_s, tokens, sum(chunk.squared_tokens for chunk in chunks))
