"""A model of the vLLM engine, and what represents the KV of its sequences."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dataplane.engines.core.kv import KvLocation, WithoutPrefixCache
from dataplane.engines.core.sequences import Chunk, TokenSequence
from dataplane.engines.core.served_models import ServedModel
from dataplane.engines.interface import KvHandle
from dataplane.engines.vllm.pooling import PoolingRules
from dataplane.engines.vllm.runner import Runner


@dataclass(eq=False, kw_only=True)
class VllmKv:
    """The KV of a sequence: the vLLM request that has it, or will have it again. `vllm_id` None: not submitted yet."""

    runner: Runner
    bytes_per_token: float
    vllm_id: str | None = None

    @property
    def location(self) -> KvLocation:
        """KV that vLLM preempted counts as on the DEVICE, because vLLM restores it itself."""
        return KvLocation.NONE if self.vllm_id is None else KvLocation.DEVICE

    @property
    def tokens(self) -> int:
        return 0 if self.vllm_id is None else self.runner.computed_tokens(self.vllm_id)

    @property
    def size_bytes(self) -> int:
        return int(self.tokens * self.bytes_per_token)


class VllmKvMemory(WithoutPrefixCache[VllmKv]):
    """Meets `dataplane.engines.core.kv.KvMemory`. vLLM allocates itself, so that only `drop` has an effect."""

    freeing = False
    swapped_out_total = 0
    swapped_in_total = 0

    def grow(self, kv: VllmKv, tokens: int) -> bool:
        raise AssertionError("vLLM gives its requests their KV itself")

    def fits(self, kv: VllmKv, *, spare: int) -> bool:
        raise AssertionError("vLLM gives its requests their KV itself")

    def swap_s(self, kvs: Iterable[VllmKv]) -> float:
        return 0.0

    def swap_out(self, kv: VllmKv, tokens: int) -> bool:
        return False

    def swap_in(self, kv: VllmKv) -> bool:
        return False

    def bytes_of(self, kvs: Iterable[VllmKv]) -> int:
        """See `KvMemory`; of one model. Blocks that requests share are in vLLM's count of used blocks once."""
        kvs = list(kvs)
        used = [kv.runner.kv_usage * kv.runner.kv_tokens * kv.bytes_per_token for kv in kvs[:1]]
        return min(super().bytes_of(kvs), int(sum(used)))

    def drop(self, kv: VllmKv) -> None:
        if kv.vllm_id is not None:
            kv.runner.end(kv.vllm_id)
            kv.vllm_id = None

    def adopt(self, kv: VllmKv, handle: KvHandle) -> bool:
        """False: KV of other slots has another shape and is recomputed."""
        return False

    def can_export(self, kv: VllmKv) -> bool:
        return False

    def handle(self, kv: VllmKv, tokens: int) -> KvHandle:
        raise AssertionError("the settings allow no KV transfer")


VllmSequence = TokenSequence[VllmKv]


@dataclass(eq=False, kw_only=True)
class VllmModel(ServedModel[VllmKv]):
    """One model. `stored_bytes`: of its weights on each GPU; `kv_bytes`: of its KV blocks on all of them; `wake_s`: how
    long it took to load its weights, with putting others to sleep, the last time; `used_s`: when its last step began.
    """

    runner: Runner
    stored_bytes: int
    kv_bytes: int
    eos_ids: tuple[int, ...]
    wake_s: float
    rules: PoolingRules | None = None
    used_s: float = 0.0

    @property
    def weights_bytes(self) -> int:
        return self.stored_bytes

    @property
    def switch_s(self) -> float:
        """Seconds until it decodes again after sleeping: its weights are loaded, and its KV is prefilled again."""
        lost = [len(sequence.tokens) for sequence in self.decoding]
        return self.wake_s + (self.estimate.prefill_s(sum(lost), sum(n * n for n in lost)) if lost else 0.0)

    def new_kv(self, adapter: str) -> VllmKv:
        return VllmKv(runner=self.runner, bytes_per_token=self.kv_bytes / self.runner.kv_tokens)

    def observe(self, chunks: Sequence[Chunk[VllmKv]], took_s: float) -> None:
        """Update the estimate by a step that only decoded, or only prefilled."""
        decodes = [chunk.sequence.cached > 0 and chunk.sequence.pending == 1 for chunk in chunks]
        if chunks and all(decodes):
            context = sum(chunk.sequence.cached for chunk in chunks)
            self.estimate = self.estimate.observe_decode(took_s, context, len(chunks))
        elif chunks and not any(decodes):
            tokens = sum(chunk.count for chunk in chunks)
            self.estimate = self.estimate.observe_prefill(took_s, tokens, sum(chunk.squared_tokens for chunk in chunks))
