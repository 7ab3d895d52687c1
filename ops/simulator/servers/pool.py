"""A pool: prefill and decode slots that many models share. The live dispatcher says which slot runs a request; each
slot is the live engine (`fast_forward_engine`).
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from controlplane.policies.facts import Endpoint, InstanceFacts
from dataplane.dispatch.dispatcher import Dispatcher
from dataplane.dispatch.requests import InflightRequest
from dataplane.dispatch.worker import WorkerKind
from dataplane.engines.interface import EngineOutput, EngineRequest
from dataplane.engines.replay.engine import ReplaySettings
from dataplane.protocol.messages import ModelSpec
from dataplane.protocol.tiers import IW_F, IW_N
from ops.simulator.kernel.answers import AnswersByModel
from ops.simulator.kernel.events import Events
from ops.simulator.kernel.fast_forwards import FastForward
from ops.simulator.kernel.requests import Request, Served
from ops.simulator.servers.pool_log import PoolLog
from ops.simulator.servers.slot_process import SlotProcess


class PoolServer:
    """Meets `presence.Server`. All models are on all slots, of `gpus` each; they may come and go. So may slots: those
    not `opened` begin closed, without models (None: all are open). What the slots do is noted in `log`, if there is
    one.
    """

    def __init__(
        self,
        name: str,
        region: str,
        kinds: Sequence[WorkerKind],
        models: Iterable[ModelSpec],
        settings: ReplaySettings,
        *,
        gpus: int = 1,
        opened: Collection[int] | None = None,
        events: Events,
        answers: AnswersByModel,
        ended: Callable[[Served], None],
        log: PoolLog | None = None,
    ) -> None:
        self.slots = len(kinds) if opened is None else len(opened)
        self.gpus = gpus
        self._name, self._region = name, region
        self._models: dict[str, ModelSpec] = {}
        self._checkpoints: dict[str, str] = {}
        """By model, the one whose weights it needs: of an adapter its base."""
        self._settings = settings
        of_slots = [replace(settings, prefill_only=kind == "prefill") for kind in kinds]
        self._request_kv_bytes = min(slot.request_kv_bytes for slot in of_slots)
        self._answers, self._ended = answers, ended
        self._log = log
        self._processes = [
            SlotProcess(
                index,
                kind,
                of_slots[index],
                events,
                self._on_step,
                self._served,
                answers=answers,
                gpus=gpus,
                log=log,
            )
            for index, kind in enumerate(kinds)
        ]
        self._dispatcher = Dispatcher(self._processes, settings.turns.prefill, losses_max=0, clock=lambda: events.now_s)
        self._in_flight: dict[str, tuple[Served, InflightRequest]] = {}
        self._of_model: dict[str, dict[int, Served]] = {}
        """Requests in flight of each model by their number."""
        self._prompt_tokens: dict[str, int] = {}
        """Of those without a token yet."""
        self.submitted: Counter[str] = Counter()
        """All requests so far, by model."""
        self._closing: dict[int, Callable[[], None]] = {}
        """What to call when a slot that was closed is empty."""
        if opened is not None:
            for process in self._processes:
                process.open = process.index in opened
        for model in models:
            self.load(model)

    @property
    def busy_s(self) -> float:
        """Busy time of all slots: steps, switches, and waits for KV."""
        return sum(process.busy_s for process in self._processes)

    @property
    def switches(self) -> int:
        return sum(process.engine.switches_total for process in self._processes)

    @property
    def active_models(self) -> int:
        """The number of models with a request in flight."""
        return sum(map(bool, self._of_model.values()))

    @property
    def load_alpha(self) -> float:
        """The load of the busiest slot that decodes; above 1 it is overloaded."""
        return max((process.engine.load_alpha for process in self._decoding()), default=0.0)

    def load(self, model: ModelSpec) -> None:
        assert model.name not in self._models
        self._models[model.name], self._checkpoints[model.name] = model, model.checkpoint.name
        self._of_model[model.name], self._prompt_tokens[model.name] = {}, 0
        for process in self._processes:
            if process.open:
                process.load([model])

    def unload(self, model: str) -> None:
        """Remove a model without requests in flight."""
        assert not self.inside(model)
        del self._models[model], self._of_model[model], self._prompt_tokens[model]
        for process in self._processes:
            if process.open or process.index in self._closing:
                process.unload(model)

    def open_slot(self, index: int) -> None:
        """A closed slot serves, with nothing in its memory yet."""
        process = self._processes[index]
        assert not process.open
        process.open = True
        process.load(self._models.values())
        for model in self._models:
            self._dispatcher.assign_waiting(model)

    def close_slot(self, index: int, emptied: Callable[[], None]) -> None:
        """A slot takes no more requests; its models go, and `emptied` is called, once it has none."""
        process = self._processes[index]
        assert process.open
        process.open = False
        self._closing[index] = emptied
        self._settle(index)

    def remaining_tokens(self, index: int) -> int:
        """As `left_tokens`, of the requests on a slot."""
        mine = [served for served, inflight in self._in_flight.values() if inflight.worker == index]
        engine, tokens = self._processes[index].engine, 0
        made = {model: engine.batched_made(self._checkpoints[model]) for model in {one.request.model for one in mine}}
        for served in mine:
            request = served.request
            done = made[request.model].get(request.number, served.made)
            tokens += self._answers[request.model].rest(done, request.output_tokens - done)
            tokens += 0 if done else request.prompt_tokens
        return tokens

    def _settle(self, index: int) -> None:
        """Unload the models of a slot that is closed and empty."""
        if index in self._closing and not self._dispatcher.count(index):
            for model in self._models:
                self._processes[index].unload(model)
            self._closing.pop(index)()

    def _decoding(self) -> list[SlotProcess]:
        return [process for process in self._processes if process.open and process.kind != "prefill"]

    def has(self, model: str) -> bool:
        return model in self._models

    def left_tokens(self, model: str) -> int:
        """Prompt tokens to prefill and tokens of answers to come, of a model's requests."""
        mine, answers = self._of_model[model], self._answers[model]
        made = {number: served.made for number, served in mine.items()}
        for process in self._processes:
            made |= process.engine.batched_made(self._checkpoints[model])
        rests = [answers.rest(made[number], one.request.output_tokens - made[number]) for number, one in mine.items()]
        return self._prompt_tokens[model] + sum(rests)

    def inside(self, model: str) -> list[Served]:
        """A model's requests in flight, ordered by arrival."""
        return list(self._of_model.get(model, {}).values())

    def lose(self, model: str) -> list[Served]:
        """Stop for good; returns the requests of a model."""
        for process in self._processes:
            process.stop()
        lost = self.inside(model)
        for served in lost:
            self._leave(served)
        return lost

    def fits(self, request: Request) -> bool:
        return request.prompt_tokens + request.output_tokens <= self._context_tokens(self._models[request.model])

    def _context_tokens(self, model: ModelSpec) -> int:
        """Tokens of prompt and answer together that it takes of a model."""
        return min(model.context_tokens, self._request_kv_bytes // model.kv_bytes_per_token)

    def submit(self, served: Served) -> None:
        request = served.request
        sent = EngineRequest(
            request_id=str(request.number),
            instance_id=request.model,
            tier=request.tier,
            objective=served.target,
            prompt=(0,) * request.prompt_tokens,
            max_tokens=request.output_tokens,
        )
        self._prompt_tokens[request.model] += request.prompt_tokens
        self._of_model[request.model][request.number] = served
        self.submitted[request.model] += 1
        dispatched = self._dispatcher.submit(sent, self._checkpoints[request.model])
        self._in_flight[sent.request_id] = served, dispatched

    def reports(self, model: str | None = None) -> Iterable[InstanceFacts]:
        """Reports of each model on the pool; they share its memory and its prefill slots."""
        decoding = self._decoding()
        used_bytes = sum(process.engine.kv_used_bytes for process in decoding)
        capacity_bytes = sum(process.engine.kv_capacity_bytes for process in decoding)
        load = self.load_alpha
        anyone = next(iter(self._models))  # a tier is promised the same of every model
        asked = (anyone, "") if model is None else (model, self._checkpoints[model])
        wait_s, token_s = self._dispatcher.prefill_outlook(*asked, IW_N) or (None, None)
        urgent_wait_s, _ = self._dispatcher.prefill_outlook(*asked, IW_F) or (None, None)
        begun = set[str]().union(*(process.engine.begun for process in self._processes))
        for name in self._models if model is None else [model]:
            yield InstanceFacts(
                instance_id=f"{self._name}/{name}",
                node_id=self._name,
                endpoint=Endpoint(model=name, region=self._region),
                gpu_type=self._settings.profile.gpu_type,
                accepting=True,
                age_s=0.0,
                kv_used_bytes=used_bytes,
                kv_capacity_bytes=capacity_bytes,
                remaining_tokens=self.left_tokens(name),
                requests=len(self._of_model[name]),
                waiting=sum(not one.made and str(number) not in begun for number, one in self._of_model[name].items()),
                kv_bytes_per_token=self._models[name].kv_bytes_per_token,
                prefill_wait_s=wait_s,
                prefill_urgent_wait_s=urgent_wait_s,
                prefill_token_s=token_s,
                load=load,
                batch_max=self._settings.batch_max * len(decoding),
                context_tokens=self._context_tokens(self._models[name]),
            )

    def _on_step(self, slot: SlotProcess, outputs: list[EngineOutput], fast_forward: FastForward | None) -> None:
        """Pass on the outputs that change something for the dispatcher, without their tokens."""
        for output in outputs:
            assert output.error is None, output.error
            served, inflight = self._in_flight[output.request_id]
            if output.token_ids and served.left:  # the tokens of a batched sequence are counted already
                self._count(served, fast_forward, slot.now_s)
            ends = output.finish_reason is not None
            if ends or output.kv is not None or inflight.kv_at is not None or inflight.queued_at is not None:
                self._dispatcher.receive(slot, output)
            if ends:
                self._leave(served)
                if self._log is not None:
                    self._log.ended(served)
                self._settle(slot.index)
                self._ended(served)

    def _leave(self, served: Served) -> None:
        request = served.request
        del self._in_flight[str(request.number)], self._of_model[request.model][request.number]
        if not served.made:
            self._prompt_tokens[request.model] -= request.prompt_tokens

    def _served(self, request_id: str) -> Served:
        return self._in_flight[request_id][0]

    def _count(self, served: Served, fast_forward: FastForward | None, now_s: float) -> None:
        if not served.made:
            self._prompt_tokens[served.request.model] -= served.request.prompt_tokens
        if fast_forward is None:
            served.token(now_s)
        else:
            served.fast_forward(fast_forward)
