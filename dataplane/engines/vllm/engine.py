"""The vLLM engine: vLLM models in one process, which take turns by our scheduler.

A turn's step is one step of vLLM's engine of that model, which prefills and decodes together and handles KV pressure
itself (what it preempts, it prefills again). If the next model does not fit with those that are awake, the least
recently used one is put to sleep. It keeps its requests, whose tokens are prefilled again when it wakes.

If models share a slot, loading one blocks the others' turns: vLLM keeps its configuration, forward context, default
dtype and scratch memory in globals of the process, so that nothing of it may run concurrently with a load.
`read_ahead` does beforehand what is possible; `tidepool_load_seconds` counts the rest, which is 0 if `models_max` is 1.

On a slot of several GPUs vLLM splits its one model over them, in processes that it starts and ends itself. Where the
GPUs are of several hosts, `dataplane.engines.vllm.ranks` runs those of the others.

The process belongs to this slot alone: `interfaces.prepare_process` must run before this module is imported.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from msgspec.structs import replace
from vllm import PoolingParams, SamplingParams

from dataplane.checkpoints.eos import read_eos_ids
from dataplane.checkpoints.safetensors_file import read_json
from dataplane.constraints.compiler import ConstraintCompiler
from dataplane.engines.core.masks import prepare_masks
from dataplane.engines.core.sequences import Chunk
from dataplane.engines.core.slot_engine import Made, SlotEngine
from dataplane.engines.interface import EngineStats, KvShapeStats, PoolStats, TokenScore
from dataplane.engines.vllm.adapters import NO_ADAPTERS, AdapterLimits, check_adapter_of, readable_ranks
from dataplane.engines.vllm.models import VllmKv, VllmKvMemory, VllmModel, VllmSequence
from dataplane.engines.vllm.pooling import answer_of, pooling_params, read_rules
from dataplane.engines.vllm.runner import Runner, Step, check_split, read_ahead, stored_bytes
from dataplane.engines.vllm.sampling import ends_at_eos, sampling_params, score_of
from dataplane.engines.vllm.settings import VllmEngineSettings
from dataplane.engines.vllm.version import check_version
from dataplane.memory.model_cache import ModelCache
from dataplane.protocol.errors import DeviceLostError, ModelLoadError
from dataplane.protocol.messages import ModelSpec
from dataplane.scheduling.costs import CostEstimate, LatencyModel
from dataplane.scheduling.schedule import Turn
from dataplane.scheduling.tiers import TIER_RANKS

_BYTES_PER_S = {"cpu": 1e9, "cuda": 1e10}
"""Guess of the rate at which weights are loaded, and read by a step, until it is measured."""


class VllmEngine(SlotEngine[VllmModel, VllmKv]):
    """Meets `Engine`. `load` builds a model on the owner's thread, which blocks other models' requests."""

    def __init__(self, settings: VllmEngineSettings, clock: Callable[[], float]) -> None:
        """Raises:
        ModelLoadError: vLLM is not installed, or in a version that was not tested.
        """
        check_version()
        self._settings = settings
        self._cache = None if settings.cache_folder is None else ModelCache(settings.cache_folder, settings.cache_bytes)
        self._preemptions_before = 0
        self._read_ahead: set[str] = set()
        self._asked_ranks: dict[str, int] = {}
        """The highest rank of the adapters that were prepared since their base was built or forgotten, by the base."""
        self._blocked_s = 0.0
        super().__init__(settings, clock, VllmKvMemory(), reclaim=lambda _: False)

    def close(self) -> None:
        """End vLLM's engines. The engine cannot be used afterwards."""
        for model in self.models.values():
            model.runner.close()
        self.models.clear()

    def prepare(self, model: ModelSpec) -> None:
        """Check that the checkpoint exists and fits, and read it once, so that it is in the page cache for `load`.

        Raises:
            ModelLoadError: it cannot be read, its weights exceed the slot's memory, or vLLM cannot make its answers; of
                an adapter: it is not of its base.
        """
        checkpoint = model.checkpoint
        if model.base is not None:
            rank = check_adapter_of(model).rank
            self._asked_ranks[checkpoint.name] = max(rank, self._asked_ranks.get(checkpoint.name, 0))
        folder = Path(checkpoint.path)
        read_rules(folder, model.task)
        check_split(checkpoint.name, folder, self._settings.ranks)
        size_bytes = stored_bytes(folder, self._settings.dtype)
        limit = self._settings.weights_bytes * self._settings.ranks
        if size_bytes > limit:
            raise ModelLoadError(f"weights_bytes of {checkpoint.name} is {size_bytes}; this slot has {limit}")
        if checkpoint.path not in self._read_ahead:
            read_ahead(folder)
            self._read_ahead.add(checkpoint.path)

    def load(self, instance_id: str, model: ModelSpec, *, gpus: int = 1) -> None:
        """See `Engine.load`.

        Raises:
            ModelLoadError: as there.
            DeviceLostError: this process cannot load anything any more.
        """
        try:
            super().load(instance_id, model, gpus=gpus)
        except torch.AcceleratorError as error:
            raise DeviceLostError(f"{model.name}: {error}") from error

    def _new_model(self, spec: ModelSpec, gpus: int) -> VllmModel:
        folder, settings = Path(spec.path), self._settings
        began_s, others_wait = self._clock(), self.has_work()
        if len(self.models) >= settings.models_max:
            here = ", ".join(sorted(self.models))
            raise ModelLoadError(f"{spec.name}: models_max={settings.models_max}, and this slot has {here}")
        size_bytes = -(-stored_bytes(folder, settings.dtype) // settings.ranks)
        self._sleep_until_fits(size_bytes, keep=None)
        rules = read_rules(folder, spec.task)
        limits = self._adapter_limits(spec, size_bytes)
        with_adapters = size_bytes + limits.reserved_bytes(folder, settings.item_bytes)
        kv_bytes = settings.pool_bytes(with_adapters)
        runner = Runner(spec.name, folder, settings, self._cache, spec.task, kv_bytes=kv_bytes, adapters=limits)
        try:
            if settings.models_max > 1:
                runner.keep_host_copy()
            eos_ids = read_eos_ids(folder, read_json(folder / "config.json"))
        except BaseException:
            runner.close()
            raise
        self._read_ahead.discard(spec.path)
        if others_wait:
            self._blocked_s += self._clock() - began_s
        guess_s = size_bytes / _BYTES_PER_S[settings.device.partition(":")[0]]
        return VllmModel(
            name=spec.name,
            context_tokens=min(spec.context_tokens, runner.context_tokens),
            vocabulary=runner.vocabulary,
            estimate=_first_estimate(guess_s / 100),
            runner=runner,
            stored_bytes=size_bytes,
            kv_bytes=kv_bytes * settings.ranks,
            constraints=ConstraintCompiler(folder, size=runner.vocabulary, eos_ids=eos_ids),
            eos_ids=tuple(sorted(eos_ids)),
            wake_s=guess_s,
            task=spec.task,
            rules=rules,
            used_s=self._clock(),
        )

    def _forget_model(self, model: VllmModel) -> None:
        self._preemptions_before += model.runner.preemptions_total
        self._asked_ranks.pop(model.name, None)
        model.runner.close()

    def _adapter_limits(self, spec: ModelSpec, size_bytes: int) -> AdapterLimits:
        """Of a model that is built now, for itself and those that are to be loaded beside it, or for an adapter. Their
        memory cannot sleep. Where that of all those beside it does not fit, the model serves as many as it would
        without them.

        Raises:
            ModelLoadError: the weights, of `size_bytes`, do not fit with what it has to reserve.
        """
        settings, asked = self._settings, self._asked_ranks.pop(spec.name, 0)
        if spec.task != "generate" or settings.models_max > 1 or settings.span is not None:
            return NO_ADAPTERS
        beside = readable_ranks(spec.adapters)
        for ranks in ([*beside, asked], [asked]):
            limits = AdapterLimits.of(
                adapters_max=settings.adapters_max,
                rank_max=settings.adapter_rank_max,
                asked=sum(rank > 0 for rank in ranks),
                asked_rank=max(ranks),
                device=settings.device,
            )
            needed_bytes = size_bytes + limits.reserved_bytes(Path(spec.path), settings.item_bytes)
            if needed_bytes <= settings.weights_bytes:
                return limits
        raise ModelLoadError(
            f"{spec.name}: its weights take {needed_bytes} bytes with memory for {limits.count} adapters of rank"
            f" {limits.rank} (vllm_adapters_max); this slot has weights_bytes={settings.weights_bytes}"
        )

    def _load_adapter(self, model: VllmModel, spec: ModelSpec) -> None:
        model.runner.adapters.add(spec)

    def _unload_adapter(self, model: VllmModel, name: str) -> None:
        model.runner.adapters.remove(name)

    def _settle(self) -> None:
        """No transfer is under way between steps."""

    def _awake(self) -> list[VllmModel]:
        return [model for model in self.models.values() if model.runner.awake]

    def _sleep_until_fits(self, needed_bytes: int, *, keep: VllmModel | None) -> None:
        """Put models to sleep, the least recently used first, until one more of that size fits."""
        staying = sorted((m for m in self._awake() if m is not keep), key=lambda model: model.used_s)
        while staying and not self._fits((*(m.stored_bytes for m in staying), needed_bytes)):
            staying.pop(0).runner.sleep()

    def _fits(self, sizes: Iterable[int]) -> bool:
        sizes = tuple(sizes)
        return len(sizes) <= self._settings.awake_max and sum(sizes) <= self._settings.weights_bytes

    def _fit_together(self, models: Iterable[VllmModel]) -> bool:
        return self._fits(model.stored_bytes for model in models)

    def _switch_s(self, model: VllmModel) -> float:
        return model.switch_s

    def _missing_s(self, model: VllmModel, now_s: float) -> float:
        return 0.0 if model.runner.awake else model.switch_s

    def _is_ready(self, model: VllmModel) -> bool:
        return True  # its host copy was made when it was loaded

    def _run(self, turn: Turn, model: VllmModel, now_s: float) -> Made[VllmKv] | None:
        """A failing model ends its own requests only; a lost device ends the worker, as does a step that failed in one
        of several processes that run the model.
        """
        try:
            self._wake(model, now_s)
            return self._step_of(model)
        except (torch.AcceleratorError, DeviceLostError):
            raise
        except Exception as error:
            mine = [sequence for sequence in self.requests if sequence.model == model.name]
            self.requests.end_all(mine, f"model {model.name} failed: {type(error).__name__}: {error}")
            return []

    def _wake(self, model: VllmModel, now_s: float) -> None:
        model.used_s = now_s
        if not model.runner.awake:
            self._sleep_until_fits(model.stored_bytes, keep=model)
            model.runner.wake()
            model.wake_s = self._clock() - now_s

    def _step_of(self, model: VllmModel) -> Made[VllmKv]:
        """Submit new requests to vLLM, run its step, and find the answers that ended by themselves."""
        mine = {str(sequence.order): sequence for sequence in self.requests if sequence.model == model.name}
        for name, sequence in mine.items():
            if sequence.kv.vllm_id is None:
                self._submit(name, sequence, model)
            sequence.cached = sequence.kv.tokens
        prepare_masks(mine.values())
        began_s = self._clock()
        step = model.runner.step()
        self._observe(step, mine, model, self._clock() - began_s)
        made: dict[str, tuple[VllmSequence, int | None, TokenScore | None]] = {}
        for name, token in step.tokens.items():
            sequence = mine[name]
            ended = token in model.eos_ids and ends_at_eos(sequence.request)
            if name not in step.ended or ended or sequence.generated + 1 == sequence.request.max_tokens:
                self.requests.begin(sequence)
                made[name] = sequence, None if ended else token, _score_of(sequence, token, step)
        for name, pooled in step.pooled.items():
            assert model.rules is not None
            mine[name].values = answer_of(pooled, model.rules)
            if mine[name].values:
                made[name] = mine[name], None, None
            else:
                self.requests.end_all([mine[name]], f"{model.name}: the pooled states are not numbers")
        for name in step.ended.keys() - made.keys():
            self.requests.end_all([mine[name]], f"vLLM ended it too early: {step.ended[name]}")
        for name in made:
            if (matcher := mine[name].matcher) is not None:
                matcher.mask(mine[name].tokens)  # where other processes chose, nobody has waited for it
        return self._without_unmatched(list(made.values()))

    def _observe(self, step: Step, mine: Mapping[str, VllmSequence], model: VllmModel, took_s: float) -> None:
        """Record which tokens have KV now, and the cost of the step. How many tokens of a prompt were cached is known
        with its first token; a step that began a longer prefill is not measured.
        """
        chunks, measured = [], True
        for name, sequence in mine.items():
            if name in step.tokens and sequence.first:
                sequence.reused = step.cached[name]
                sequence.cached = max(sequence.cached, sequence.reused)
            is_done = name in step.tokens or name in step.pooled
            cached = len(sequence.tokens) if is_done else sequence.kv.tokens
            if cached > sequence.cached:
                chunks.append(Chunk(sequence=sequence, count=cached - sequence.cached))
                measured = measured and (sequence.cached > 0 or is_done)
        if measured:
            model.observe(chunks, took_s)
        for chunk in chunks:
            chunk.sequence.cached = chunk.end

    def _submit(self, name: str, sequence: VllmSequence, model: VllmModel) -> None:
        request = sequence.request
        left = request.max_tokens - sequence.generated
        if model.rules is not None:
            params: SamplingParams | PoolingParams = pooling_params(model.rules)
        else:
            params = sampling_params(request, model.eos_ids, left=left, matcher=sequence.matcher)
        priority = TIER_RANKS[request.tier]
        sequence.kv.vllm_id = model.runner.add(
            name,
            list(sequence.tokens),
            params,
            salt=request.cache_salt,
            priority=priority,
            adapter=sequence.adapter,
        )

    def _wait(self, now_s: float) -> None:
        """Waiting requests can always run."""

    def _kv_tokens_max(self, model: VllmModel) -> int:
        return model.runner.context_tokens

    def _kv_free_bytes(self, model: VllmModel) -> int:
        return int(model.kv_bytes * (1 - model.runner.kv_usage))

    def _resident_models(self, now_s: float) -> tuple[str, ...]:
        return tuple(model.name for model in self._awake())

    def stats(self) -> EngineStats:
        """The present load. `preemptions` are vLLM's; `load_s`: how long loads of models blocked other models'
        requests.
        """
        stats = super().stats()
        total = self._preemptions_before + sum(m.runner.preemptions_total for m in self.models.values())
        mine = {"preemptions": float(total), "recomputed": float(total), "load_s": self._blocked_s}
        return replace(stats, extra={**stats.extra, **mine})

    def _memory_stats(self, now_s: float) -> PoolStats:
        settings, awake = self._settings, self._awake()
        weights = settings.ranks * sum(model.stored_bytes for model in awake)
        used = {model.name: int(model.kv_bytes * model.runner.kv_usage) for model in awake}
        free = settings.ranks * (settings.weights_bytes + settings.kv_bytes) - weights - sum(used.values())
        return PoolStats(
            now_s=now_s,
            slabs={"weights": weights, "kv": sum(used.values()), "free": free},
            kv=tuple(
                KvShapeStats(
                    shape=f"vLLM: {model.name}", used_bytes=used[model.name], held_bytes=model.kv_bytes, moving_bytes=0
                )
                for model in awake
            ),
        )


def _score_of(sequence: VllmSequence, token: int, step: Step) -> TokenScore | None:
    """The score of a request's new token, if it wants one."""
    wanted = sequence.request.logprobs
    return None if wanted is None else score_of(token, step.logprobs[str(sequence.order)], wanted)


def _first_estimate(step_s: float) -> CostEstimate:
    """The cost of steps before any was timed."""
    latency = LatencyModel(
        prefill_base_s=step_s,
        prefill_per_token_s=step_s / 100,
        prefill_per_token2_s=0.0,
        decode_base_s=step_s,
        decode_per_context_token_s=0.0,
        decode_per_sequence_s=0.0,
    )
    return CostEstimate(latency=latency)
