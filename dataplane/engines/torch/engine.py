"""The torch engine: real tokens of many models that share one device.

A step completes transfers, asks the scheduler for the turn, provides its weights and KV, runs one forward pass, samples
tokens, returns them, and prefetches what the next turn needs. It waits for a transfer only if nothing can run.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import structlog
import torch
from msgspec.structs import replace

from dataplane.engines.core.pressure import Shortage
from dataplane.engines.core.pressure_handler import KvPressureHandler
from dataplane.engines.core.remapping.actions import Action
from dataplane.engines.core.slot_engine import Made, SlotEngine
from dataplane.engines.interface import InstanceStats, PoolStats
from dataplane.engines.torch.copies.base import CopyStream
from dataplane.engines.torch.copies.interprocess import DeviceEvents, device_events
from dataplane.engines.torch.copies.open import make_stream
from dataplane.engines.torch.memory.adapters import AdapterStore
from dataplane.engines.torch.memory.host_models import HostModel, HostModels
from dataplane.engines.torch.memory.kv import KvStore, SequenceKv
from dataplane.engines.torch.memory.kv_exports import KvExports
from dataplane.engines.torch.memory.kv_imports import KvImports
from dataplane.engines.torch.memory.models import TorchModel, make_model
from dataplane.engines.torch.memory.slot_memory import TorchSlotMemory
from dataplane.engines.torch.memory.transfer_rates import TransferRates, transfer_rates
from dataplane.engines.torch.memory.weights import WeightStore
from dataplane.engines.torch.model.graphs import DecodeGraphs
from dataplane.engines.torch.ranks.commands import HOST_KV, STREAMS
from dataplane.engines.torch.ranks.leader import Leader
from dataplane.engines.torch.ranks.processes import OtherRanks, start_processes
from dataplane.engines.torch.ranks.start import lead
from dataplane.engines.torch.report import memory_stats
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.engines.torch.steps import ModelFailedError, Sampled, Steps, Watch
from dataplane.memory.events import TransferError
from dataplane.memory.model_cache import HostMemoryError, ModelCache
from dataplane.memory.slabs import SlabArena
from dataplane.protocol.errors import DeviceLostError, ModelLoadError
from dataplane.protocol.messages import ModelSpec
from dataplane.scheduling.schedule import Turn

log = structlog.get_logger()

IDLE_S = 0.001
"""How long a step waits when all that could run is being transferred."""
CHECK_EVERY_S = 10.0
"""How often a slot without work checks its memory bookkeeping."""


class TorchEngine(SlotEngine[TorchModel, SequenceKv]):
    """Meets `Engine`. Single-threaded except for `prepare`: its owner calls one method at a time."""

    def __init__(
        self,
        settings: TorchEngineSettings,
        clock: Callable[[], float],
        make_copy_stream: Callable[[str], CopyStream] | None = None,
        watch: Watch | None = None,
        other_ranks: OtherRanks | None = None,
        events: DeviceEvents | None = None,
    ) -> None:
        """`other_ranks`: those that were started for `settings.ranks`; `events`: of the device; None: made here."""
        self._settings = settings
        self._dtype = torch.float32 if settings.dtype == "float32" else torch.bfloat16
        self._device = torch.device(settings.device)
        if self._device.type == "cuda":
            self._device = torch.device("cuda", self._device.index or 0)
            torch.cuda.set_device(self._device)  # events wait on the current device's stream
        slab_bytes = settings.slab_size_bytes
        weights_slabs = settings.weights_bytes // slab_bytes
        self.arena = SlabArena(weights_slabs + settings.kv_bytes // slab_bytes, weights_slabs=weights_slabs)
        buffer = torch.empty(self.arena.slabs * slab_bytes, dtype=torch.uint8, device=self._device)
        self._leader: Leader | None = None
        if settings.ranks > 1:
            self._leader = lead(settings, buffer, other_ranks or start_processes(settings.ranks - 1))
        self._new_stream = make_copy_stream or self._make_stream
        self._streams = self._make_streams()
        self.host_models = self._make_host_models(slab_bytes)
        self.adapters = AdapterStore(
            self._dtype,
            self._device,
            size_max_bytes=settings.adapters_bytes,
            rank_max=settings.adapter_rank_max,
            ranks=settings.ranks,
        )
        rates = transfer_rates(buffer, settings.host_link_bytes_per_s)
        self.kv = self._make_kv(buffer, rates, events)
        self.weights = WeightStore(
            self.arena, buffer, slab_bytes, self._streams["weights"], rates.weights, self._streams["layers"], self.kv
        )
        super().__init__(settings, clock, self.kv, reclaim=self._reclaim, on_shortage=self._on_shortage)
        self._slot_memory = TorchSlotMemory(
            self.models, self.weights, self.kv, self.arena, batch_max=settings.batch_max
        )
        self.pressure = KvPressureHandler(settings, self, self._slot_memory, self.kv, clock, load_s=self._switch_s)
        self._graphs = self._make_graphs()
        self._steps = Steps(
            settings,
            self.weights,
            self.kv,
            self._step_batches,
            clock,
            watch,
            evict_kv=self._evict_kv_for,
            graphs=self._graphs,
        )
        self._prefetched_s = self._checked_s = float("-inf")

    def _make_graphs(self) -> DecodeGraphs | None:
        settings = self._settings
        has_graphs = self._device.type == "cuda" and settings.cuda_graphs and settings.ranks == 1
        return DecodeGraphs(self._device, settings.batch_max) if has_graphs else None

    def _make_stream(self, name: str) -> CopyStream:
        return make_stream(self._device, name, threads=self._settings.copy_threads)

    def _make_streams(self) -> dict[str, CopyStream]:
        streams = {name: self._new_stream(name) for name in STREAMS}
        if self._leader is None:
            return streams
        return {name: self._leader.stream(name, inner) for name, inner in streams.items()}

    def _stream(self, name: str) -> CopyStream:
        """One of the streams that all ranks have, or one of this rank alone."""
        if name not in self._streams:
            self._streams[name] = self._new_stream(name)
        return self._streams[name]

    def _make_host_models(self, slab_bytes: int) -> HostModels:
        settings = self._settings
        cache = None if settings.cache_folder is None else ModelCache(settings.cache_folder, settings.cache_bytes)
        return HostModels(
            cache,
            self._dtype,
            self._device,
            slab_bytes,
            leave_rank=self._leave_rank,
            in_use=lambda name: name in self.models,
            host_wait_max_s=settings.host_wait_max_s,
            leader=self._leader,
        )

    def _make_kv(self, buffer: torch.Tensor, rates: TransferRates, events: DeviceEvents | None) -> KvStore:
        settings = self._settings
        events = events or device_events(self._device, interprocess=settings.kv_events == "device")
        kv = KvStore(
            self.arena,
            buffer,
            settings.slab_size_bytes,
            host_bytes=settings.host_kv_bytes,
            host_file=settings.host_kv_file,
            make_stream=self._stream,
            rates=rates,
            prefix_cache=settings.prefix_cache,
            ranks=settings.ranks,
            imports=KvImports(
                self._device,
                events,
                ranks=settings.ranks,
                mirror=self._leader,
            ),
            exports=self._make_exports(events),
        )
        if self._leader is not None:
            self._leader.regions.add(HOST_KV, kv.host_bytes)
        return kv

    def _make_exports(self, events: DeviceEvents | None) -> KvExports | None:
        """What announces KV that is still being transferred to other slots; the log says whether, or why not."""
        settings = self._settings
        if settings.host_kv_file is None:
            return None
        refusal = settings.announcement_refusal
        if refusal is not None:
            log.info("KV is announced once it was transferred", reason=refusal)
            return None
        waits = settings.kv_events if self._device.type == "cuda" else "host"
        log.info("KV is announced while it is transferred", waits=waits, asked=settings.kv_events)
        return KvExports(settings.host_kv_file, events)

    def close(self) -> None:
        """End the threads. The engine cannot be used afterwards."""
        for stream in self._streams.values():
            stream.close()
        self.host_models.close()
        self.kv.close()
        if self._leader is not None:
            self._leader.close()

    def prepare(self, model: ModelSpec) -> None:
        """See `Engine.prepare`.

        Raises:
            ModelLoadError: the checkpoint cannot be used, or does not fit; nothing is kept of it.
        """
        base = self._prepared(model.checkpoint)
        if model.base is not None:
            self.adapters.prepare(model, base)

    def is_prepared(self, model: ModelSpec) -> bool:
        spec = model.checkpoint
        has_adapter = model.base is None or self.adapters.has(model.name)
        return has_adapter and self.host_models.has(spec.name, Path(spec.path), spec.task)

    def forget(self, model: ModelSpec) -> None:
        if model.base is not None:
            self.adapters.forget(model.name)

    def _prepared(self, spec: ModelSpec) -> HostModel:
        return self.host_models.prepare(spec.name, Path(spec.path), slabs_max=self.arena.weights_slabs, task=spec.task)

    def check(self) -> None:
        """Assert that the memory bookkeeping is consistent: every slab and block is accounted for exactly once."""
        self.arena.check()
        self.kv.check(self.requests.all_kv)

    def _new_model(self, spec: ModelSpec, gpus: int) -> TorchModel:
        self._slot_memory.lend_place(None)  # the new model may be the largest
        model = make_model(self._prepared(spec), spec, self._settings.block_tokens, self._device)
        try:
            self.kv.check_fits(model.shape)
        except ValueError as error:
            self.host_models.forget(spec.name)
            raise ModelLoadError(f"{spec.name}: {error}") from error
        return model

    def _begin_slice(self) -> None:
        """Also move KV of models that wait out of a place that is lent no more, so that a model can be loaded there."""
        self.pressure.begin_slice()
        slabs = frozenset() if self._slot_memory.lends_place else self.arena.stranded_slabs
        if slabs:
            waiting = [model for name, model in self.models.items() if name != self.state.slice.model]
            leaving = {id(sequence.kv) for model in waiting for sequence in model.decoding_here}
            self._allocator.evict(lambda kv: id(kv) in leaving and self.kv.lies_in(kv, slabs))

    def _forget_model(self, model: TorchModel) -> None:
        self.weights.evict(model.name)
        self._steps.forget(model.weights.skeleton)
        self.kv.forget(model.name)
        self.host_models.forget(model.name)

    def _load_adapter(self, model: TorchModel, spec: ModelSpec) -> None:
        self.adapters.load(spec, model.weights)

    def _unload_adapter(self, model: TorchModel, name: str) -> None:
        self.adapters.unload(name, model.weights)

    def _settle(self) -> None:
        self.weights.settle()
        self.kv.settle()
        self.host_models.release_spare()
        self._vacate(self.pressure.revert())
        self.requests.queue_lost()

    def _vacate(self, names: Sequence[str]) -> None:
        """Evict KV from the memory of an offloaded layer of each of these models, and keep it out until that can be
        reclaimed.
        """
        begun = [sequence.kv for model in self.models.values() for sequence in model.begun] if names else []
        runs = [self._slot_memory.least_used_run(self.models[name], begun) for name in names]
        slabs = frozenset(slab for run in runs for slab in run.slabs)
        self.arena.withhold(slabs)
        if slabs and not self.kv.preempting:
            self._allocator.evict(lambda kv: self.kv.lies_in(kv, slabs))
            self.kv.clear(slabs, now=True)

    def _fit_together(self, models: Iterable[TorchModel]) -> bool:
        return not self._slot_memory.lends_place and self.weights.fit_together(model.weights for model in models)

    def _switch_s(self, model: TorchModel) -> float:
        return self.weights.whole_s(model.weights)

    def _missing_s(self, model: TorchModel, now_s: float) -> float:
        return self.weights.missing_s(model.weights, now_s=now_s)

    def _is_ready(self, model: TorchModel) -> bool:
        """Starts to read weights that are in no memory."""
        if model.name in self.weights.resident_models or model.name in self.weights.arriving_models:
            return True
        try:
            return self.host_models.ready(model.weights)
        except DeviceLostError:
            raise
        except Exception as error:  # whatever a file system does, the slot's other models continue
            reason = f"its weights cannot be read: {error}"
            if not isinstance(error.__cause__, HostMemoryError):
                self._failed[model.name] = reason
            self._fail(model, reason)
            return False

    def _run(self, turn: Turn, model: TorchModel, now_s: float) -> Made[SequenceKv] | None:
        """A failing model ends its own requests only; a lost device or inconsistent bookkeeping ends the worker."""
        model.weights.used_s = now_s
        made = None
        try:
            made = self._steps.run(turn, model, self.requests.find(turn.group))
        except TransferError as error:
            if not self.weights.try_again(model.weights):
                self._fail(model, f"the weights do not arrive: {error}")
        except ModelFailedError as error:
            self._fail(model, str(error))
        self._prefetch(turn)
        return None if made is None else self._answers(made, model)

    def _answers(self, made: Sampled, model: TorchModel) -> Made[SequenceKv]:
        """End requests whose logits are not numbers, and replace end-of-sequence tokens by None."""
        answers: Made[SequenceKv] = []
        for sequence, token, score in self._without_unmatched(made):
            if token is None:
                self.requests.end_all([sequence], f"{model.name}: logits are not numbers")
            else:
                answers.append((sequence, None if token in model.weights.skeleton.eos_ids else token, score))
        return answers

    def _leave_rank(self, name: str) -> int | None:
        """How early a model's host copy may be released: first those without work; then that of the running model,
        whose next turn is the furthest; those that wait for a turn only if another slot would have to wait otherwise.
        """
        model, turn = self.models.get(name), self.state.turn
        if name in self.weights.arriving_models or (turn is not None and name == turn.next_model):
            return None
        if model is None or not (model.begun or name in self.requests.waiting_models):
            return 0
        if turn is not None and name == turn.model and name not in self.weights.offloaded:
            return 1
        return None if model.weights.fresh else 2

    def _prefetch(self, turn: Turn) -> None:
        """Prefetch the next turn's weights while this one's run; once a turn, or they would compete with KV."""
        following = self.models.get(turn.next_model or "")
        lent = self._slot_memory.lends_place  # to KV, which would have it evicted again
        if not self._settings.prefetch or lent or following is None or self._prefetched_s == turn.started_s:
            return
        if self._is_ready(following) and self.weights.load(following.weights, self._clock(), keep=turn.model):
            self._prefetched_s = turn.started_s

    def _wait(self, now_s: float) -> None:
        """Wait for a transfer, or for a moment; without work, check the bookkeeping from time to time."""
        if self.kv.moving:
            self.kv.await_one()
        elif self.requests:
            time.sleep(IDLE_S)
        elif now_s >= self._checked_s + CHECK_EVERY_S:
            self._checked_s = now_s
            self.check()

    def _fail(self, model: TorchModel, reason: str) -> None:
        """End all requests of a model that cannot run, and evict its weights from the device."""
        sequences = [s for s in self.requests if s.model == model.name]
        self.requests.end_all(sequences, f"model {model.name} failed: {reason}")
        self.weights.evict(model.name)

    def _reclaim(self, keep: str | None) -> bool:
        """Evict weights from slabs borrowed from KV; see `KvAllocator`."""
        return self.weights.evict_idle_above(self.arena.kv_from, keep=keep)

    def _on_shortage(self, shortage: Shortage) -> Action | None:
        return self.pressure.on_shortage(shortage)

    def _evict_kv_for(self, model: TorchModel) -> None:
        """Evict KV from slabs of the weight region that a model to run needs."""
        slabs = self.weights.blocking_kv_slabs(model.weights)
        if slabs:
            self._allocator.evict(lambda kv: self.kv.lies_in(kv, slabs))
            self.kv.clear(slabs)

    def _kv_tokens_max(self, model: TorchModel) -> int:
        return self.kv.capacity_tokens(model.shape)

    def _kv_free_bytes(self, model: TorchModel) -> int:
        return self.kv.free_blocks(model.shape) * model.shape.block_bytes

    def _instance_stats(self, instance_id: str, model: TorchModel) -> InstanceStats:
        """The bytes of KV are those of all ranks, heads that several of them have counted once."""
        stats = super()._instance_stats(instance_id, model)
        geometry = model.weights.skeleton.geometry
        parts = geometry.kv_heads_total // geometry.kv_heads
        return replace(
            stats, kv_used_bytes=parts * stats.kv_used_bytes, kv_capacity_bytes=parts * stats.kv_capacity_bytes
        )

    def _resident_models(self, now_s: float) -> tuple[str, ...]:
        return self.weights.resident_models

    def _memory_stats(self, now_s: float) -> PoolStats:
        stats = memory_stats(now_s, self.weights, self.kv, self.arena, host_cache_bytes=self.host_models.cache_bytes)
        return self.pressure.counted(stats)
