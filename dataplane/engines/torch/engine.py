"""The torch engine: the verbs of a slot (`load`, `add`, `step`, `cancel`) over one device that many models share.

A step: note which transfers are over, ask whose turn it is, see to its weights and KV, run one forward pass, choose
tokens, hand them out, and send for what the next turn needs. Nothing here waits for bytes unless nothing can run.
"""

import time
from collections.abc import Callable
from pathlib import Path

import torch

from dataplane.engine import EngineOutput, EngineRequest, EngineStats
from dataplane.engines.torch.facts import slot_facts
from dataplane.engines.torch.host_models import HostModels
from dataplane.engines.torch.kv import KvStore
from dataplane.engines.torch.pooled import Pooled, make_pooled
from dataplane.engines.torch.report import instance_stats, pool_stats, swap_counts
from dataplane.engines.torch.requests import Requests
from dataplane.engines.torch.room import Room
from dataplane.engines.torch.settings import TorchEngineSettings
from dataplane.engines.torch.steps import Made, ModelFailedError, Steps, Watch
from dataplane.engines.torch.streams import CopyStream, make_stream
from dataplane.engines.torch.weights import WeightStore
from dataplane.engines.turn_log import TurnLog
from dataplane.errors import ModelLoadError, UnknownInstanceError
from dataplane.memory.events import TransferError
from dataplane.memory.model_cache import ModelCache
from dataplane.memory.slabs import SlabArena
from dataplane.messages import ModelSpec
from dataplane.turns.decode import BatchFacts
from dataplane.turns.load import DecodeShare
from dataplane.turns.prefill import PrefillQueue
from dataplane.turns.schedule import SlotFacts, SlotState, Turn, choose_turn

IDLE_S = 0.001
"""How long a step waits when all that could run is on its way."""
CHECK_EVERY_S = 10.0
"""A slot without work checks its books so often."""


class TorchEngine:
    """Meets `dataplane.engine.Engine`. Single-threaded but for `prepare`: its owner calls one method at a time."""

    def __init__(
        self,
        settings: TorchEngineSettings,
        clock: Callable[[], float],
        make_copy_stream: Callable[[str], CopyStream] | None = None,
        watch: Watch | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._models: dict[str, Pooled] = {}
        self._dtype = torch.float32 if settings.dtype == "float32" else torch.bfloat16
        self._device = torch.device(settings.device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # events wait on the current device's stream
        slab_bytes = settings.slab_size_bytes
        weights_slabs = settings.weights_bytes // slab_bytes
        self._arena = SlabArena(weights_slabs + settings.kv_bytes // slab_bytes, weights_slabs=weights_slabs)
        buffer = torch.empty(self._arena.slabs * slab_bytes, dtype=torch.uint8, device=self._device)
        stream = make_copy_stream or (lambda name: make_stream(self._device, name, threads=settings.copy_threads))
        self._streams = {name: stream(name) for name in ("weights", "kv_in", "kv_out")}
        cache = None if settings.cache_folder is None else ModelCache(settings.cache_folder, settings.cache_bytes)
        self._host = HostModels(
            cache,
            self._dtype,
            self._device,
            slab_bytes,
            leave_rank=self._leave_rank,
            in_use=lambda name: name in self._models,
        )
        self._weights = WeightStore(self._arena, buffer, slab_bytes, self._streams["weights"])
        self._kv = KvStore(
            self._arena,
            buffer,
            slab_bytes,
            host_bytes=settings.host_kv_bytes,
            host_file=settings.host_kv_file,
            make_stream=self._streams.__getitem__,
        )
        self._requests = Requests(self._models, self._kv, settings.turns.prefill, clock)
        self._room = Room(
            self._arena, self._weights, self._kv, recompute=self._requests.queue, hands_over=settings.hands_over
        )
        self._steps = Steps(settings, self._weights, self._kv, self._room, clock, watch)
        self._state = SlotState()
        self._batches: tuple[BatchFacts, ...] = ()
        self._share = DecodeShare()
        self._last_model: str | None = None
        self._held = False
        self._prefetched_s = self._checked_s = float("-inf")
        self._log = TurnLog()

    def close(self) -> None:
        """End the threads. The engine is of no use then."""
        for stream in self._streams.values():
            stream.close()
        self._host.close()

    def prepare(self, model: ModelSpec) -> None:
        """Read the model into host memory; may run on another thread.

        Raises:
            ModelLoadError: the checkpoint cannot be used, or does not fit; nothing is kept of it.
        """
        self._host.prepare(model.name, Path(model.path), slabs_max=self._arena.weights_slabs)

    def load(self, instance_id: str, model: ModelSpec, *, gpus: int = 1) -> None:
        """Take an instance in. Instances of one model share its weights, and all share the slot's KV.

        Raises:
            ModelLoadError: the checkpoint cannot be used, or does not fit; nothing is kept of it.
        """
        if any(instance_id in pooled.instances for pooled in self._models.values()):
            raise ModelLoadError(f"instance {instance_id} is loaded already")
        self.prepare(model)
        if model.name not in self._models:
            self._models[model.name] = self._pool(model)
        self._models[model.name].instances.add(instance_id)

    def _pool(self, spec: ModelSpec) -> Pooled:
        """A prepared model that is new to the pool."""
        host = self._host.prepare(spec.name, Path(spec.path), slabs_max=self._arena.weights_slabs)
        pooled = make_pooled(host, spec, self._settings.block_tokens, self._device)
        try:
            self._kv.check_fits(pooled.shape)
        except ValueError as error:
            self._host.forget(spec.name)
            raise ModelLoadError(f"{spec.name}: {error}") from error
        return pooled

    def unload(self, instance_id: str) -> None:
        """Forget an instance; with the last one of its model go the weights. Its requests end with an error."""
        pooled = self._pooled_of(instance_id)
        if pooled is None:
            return
        self._requests.end_all(self._requests.of_instance(instance_id), f"instance {instance_id} was unloaded")
        pooled.instances.remove(instance_id)
        if not pooled.instances:
            self._weights.evict(pooled.name)
            self._host.forget(pooled.name)
            del self._models[pooled.name]

    def add(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            UnknownInstanceError: the instance is not loaded.
            ContextLengthError: prompt + max_tokens exceed context or the slot's whole KV memory.
            BadRequestError: an id in use, an empty prompt, or a token the model does not know.
        """
        pooled = self._pooled_of(request.instance_id)
        if pooled is None:
            raise UnknownInstanceError(f"instance {request.instance_id} is not loaded")
        self._requests.add(request, pooled, capacity_tokens=self._kv.capacity_tokens(pooled.shape))

    def cancel(self, request_id: str) -> None:
        """Drop a request and free what it holds, now. Nothing more is heard of it."""
        self._requests.cancel(request_id)

    def release(self, request_id: str) -> None:
        """Free the KV of a request that was handed over. Unknown ids are ignored."""
        self._requests.release(request_id)

    def has_work(self) -> bool:
        """Whether a request is running or waiting, a transfer is under way, or an end is still to be told."""
        return bool(self._requests) or self._kv.moving

    def step(self) -> list[EngineOutput]:
        """Run one forward pass of the model whose turn it is, and say what came of it."""
        self._settle()
        now_s = self._clock()
        facts = self._facts(now_s)
        self._batches = facts.batches
        turn, self._state = choose_turn(facts, self._state, now_s, self._settings.turns)
        outputs = self._requests.tell_ended()
        self._note_turn(turn, now_s)
        if turn is None:
            self._held = False
            self._wait(now_s)
            return outputs
        pooled = self._models[turn.model]
        made = self._run(turn, pooled)
        # Where room is on its way, the prefill waits for it: a decode in between would bring back what left.
        self._held = made is None and turn.kind == "prefill" and not self._kv.leaving
        if made is not None:
            self._log.step(len(made))
        outputs += [self._requests.take(sequence, token, pooled) for sequence, token in made or ()]
        took_s = self._clock() - now_s
        self._state = self._state.spent(turn.kind, took_s, ran=made is not None)
        if self._batches:
            self._share = self._share.observe(took_s, decoded=turn.kind == "decode" and bool(made))
        self._prefetch(turn)
        return outputs + self._requests.tell_ended()

    def check(self) -> None:
        """Assert that the books of memory are right: every slab and block is where they say, and nothing is lost."""
        self._arena.check()
        self._kv.check(self._requests.all_kv)

    def stats(self) -> EngineStats:
        """The load right now."""
        return EngineStats(
            instances=tuple(
                instance_stats(instance_id, pooled, self._requests, self._kv)
                for pooled in self._models.values()
                for instance_id in sorted(pooled.instances)
            ),
            resident_models=self._weights.resident_models,
            switches_total=self._log.switches_total,
            steps_total=self._log.steps_total,
            tokens_total=self._log.tokens_total,
            pool=pool_stats(
                now_s=self._clock(),
                turn=self._state.turn,
                load=self._share.load(self._batches),
                weights=self._weights,
                kv=self._kv,
                arena=self._arena,
                prefills=self._requests.prefills,
                log=self._log,
                host_cache_bytes=self._host.cache_bytes,
            ),
            extra=swap_counts(self._room, self._kv),
        )

    def _run(self, turn: Turn, pooled: Pooled) -> Made | None:
        """A step of the turn. A model that fails takes no other down; a lost device or wrong books end the worker."""
        try:
            return self._steps.run(turn, pooled, self._requests.find(turn.group), self._models.values())
        except TransferError as error:
            if not self._weights.try_again(pooled.model):
                self._fail(pooled, f"the weights do not arrive: {error}")
        except ModelFailedError as error:
            self._fail(pooled, str(error))
        return None

    def _settle(self) -> None:
        """Note what arrived and left; hand over what may go."""
        self._weights.settle()
        self._kv.settle()
        self._host.yield_room()
        self._requests.requeue_lost()
        if self._settings.hands_over:
            self._requests.hand_over()

    def _facts(self, now_s: float) -> SlotFacts:
        """What the turn policy must know. Models whose weights are in no memory begin to be read. A prefill that found
        no room for its KV is held back for a step.
        """
        busy = [p for p in self._models.values() if p.sequences or self._requests.waiting_of(p.name)]
        ready = {pooled.name: self._is_ready(pooled) for pooled in busy}
        return slot_facts(
            busy,
            ready,
            PrefillQueue() if self._held else self._requests.prefills,
            self._weights,
            running_model=self._last_model,
            now_s=now_s,
            decode_batch_max=0 if self._settings.hands_over else self._settings.batch_max,
            prefetch=self._settings.prefetch,
        )

    def _is_ready(self, pooled: Pooled) -> bool:
        if pooled.name in self._weights.resident_models or pooled.name in self._weights.arriving_models:
            return True
        try:
            return self._host.ready(pooled.model)
        except Exception as error:  # whatever a file system does, the slot's other models go on
            self._fail(pooled, f"its weights cannot be read: {error}")
            return False

    def _leave_rank(self, name: str) -> int | None:
        """How early a model's host copy may leave: one without work first; then that of the running model, whose next
        turn is the furthest; those that wait for a turn only if another slot would have to wait else.
        """
        pooled, turn = self._models.get(name), self._state.turn
        if name in self._weights.arriving_models or (turn is not None and name == turn.next_model):
            return None
        if pooled is None or not (pooled.sequences or self._requests.waiting_of(name)):
            return 0
        if turn is not None and name == turn.model:
            return 1
        return None if pooled.model.fresh else 2

    def _note_turn(self, turn: Turn | None, now_s: float) -> None:
        self._log.turn(turn, now_s)
        if turn is not None:
            self._last_model = turn.model
            self._models[turn.model].model.used_s = now_s

    def _prefetch(self, turn: Turn) -> None:
        """Let the next turn's weights come while this one's run; once a turn, or KV and they would fight."""
        following = self._models.get(turn.next_model or "")
        if not self._settings.prefetch or following is None or self._prefetched_s == turn.started_s:
            return
        if self._is_ready(following) and self._weights.bring(following.model, self._clock(), keep=turn.model):
            self._prefetched_s = turn.started_s

    def _wait(self, now_s: float) -> None:
        """Nothing can run now. What is on its way gets a moment; a slot without work looks through its books."""
        if self._kv.moving:
            self._kv.await_one()
        elif self._requests:
            time.sleep(IDLE_S)
        elif now_s >= self._checked_s + CHECK_EVERY_S:
            self._checked_s = now_s
            self.check()

    def _fail(self, pooled: Pooled, reason: str) -> None:
        """End all requests of a model that cannot run, and forget its weights on the device."""
        sequences = [s for s in self._requests if s.model == pooled.name]
        self._requests.end_all(sequences, f"model {pooled.name} failed: {reason}")
        self._weights.evict(pooled.name)

    def _pooled_of(self, instance_id: str) -> Pooled | None:
        return next((pooled for pooled in self._models.values() if instance_id in pooled.instances), None)
