"""The baseline of request-level auto-scaling (ServerlessLLM): GPUs that switch when nothing of their model is left.

A GPU serves one model until nothing of it is left; a switch takes what is left of the transfer of the weights. Whom it
serves then, see `Switching`. GPUs do both kinds of work, or some prefill and the others decode, each switching by
itself.

A GPU keeps the models that fit into its memory for weights, as the slot of a pool does, and while it serves one it may
load the next: that of the first waiting request whose model no other GPU loads. Each model that waits is loaded by the
GPU that is expected to end first. That GPU then serves it before requests that came earlier, for which others load.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import takewhile
from typing import Literal

from controlplane.policies.facts import Endpoint, InstanceFacts
from dataplane.engines.replay.weights import Weights, WeightsMemory
from ops.simulator.kernel.answers import AnswersByModel
from ops.simulator.kernel.costs import InstanceSettings, ModelCosts
from ops.simulator.kernel.events import Alarm, Events, Kind
from ops.simulator.kernel.requests import Request, Served
from ops.simulator.servers.dedicated import Instance

Ended = Callable[[Served], None]
Switching = Literal["first-come", "shortest-first", "line-per-gpu"]
"""A request goes to the GPU that serves its model, as long as its KV memory may hold it; else it waits for an idle one
in one line over all models, the first or (its length known beforehand: Aegaeon's ServerlessLLM+) the shortest first.
`line-per-gpu`: it joins the queue of one GPU at once, as in the simulator of Aegaeon's artifact.
"""
LINE_MAX = 4
"""Requests of one model in a row at a GPU, from which on another GPU is to take some."""


class RequestLevelCluster:
    """GPUs that switch when nothing runs on them. Meets `presence.Server`. `weights_bytes`: of a GPU, for the models
    that it keeps, at least the largest; `prefetch`: whether it loads the next one while it serves another.
    """

    def __init__(
        self,
        name: str,
        region: str,
        gpus: int,
        models: Mapping[str, ModelCosts],
        settings: InstanceSettings,
        *,
        gpu_type: str,
        events: Events,
        answers: AnswersByModel,
        ended: Ended,
        switching: Switching = "first-come",
        weights_bytes: int,
        prefetch: bool = True,
    ) -> None:
        self.slots = gpus
        self.switches = 0
        self._name = name
        self._region = region
        self._models = models
        self._settings = settings
        self._gpu_type = gpu_type
        self._events = events
        self._answers = answers
        self._tell_ended = ended
        self._switching = switching
        self._prefetches = prefetch
        self._weights = {
            name: Weights(model=name, size_bytes=model.weights_bytes, switch_s=model.switch_s, layers=1)
            for name, model in models.items()
        }
        self._gpus: list[_Gpu] = [_Gpu(WeightsMemory(weights_bytes)) for _ in range(gpus)]
        self._waiting: list[Served] = []
        self._switching_s = 0.0
        self._retired_s = 0.0

    @property
    def busy_s(self) -> float:
        """Time of work, and of switches that no prefetch hid."""
        running_s = sum(gpu.instance.busy_s for gpu in self._gpus if gpu.instance)
        return self._retired_s + self._switching_s + running_s

    def fits(self, request: Request) -> bool:
        token_bytes = self._models[request.model].kv_bytes_per_token
        return (request.prompt_tokens + request.output_tokens) * token_bytes <= self._settings.kv_bytes

    def submit(self, served: Served) -> None:
        if self._switching == "line-per-gpu":
            self._choose_line(served).line.append(served)
        elif self._switching == "shortest-first":
            insort(self._waiting, served, key=self._takes_s)
        else:
            self._waiting.append(served)
        self._assign()

    def reports(self, model: str | None = None) -> Iterable[InstanceFacts]:
        """Reports of every model on the whole cluster, which queues by itself."""
        waiting = sum(map(self._tokens_left, self._waiting))
        used_bytes = sum(gpu.instance.kv_tokens * gpu.token_bytes for gpu in self._gpus if gpu.instance)
        for name in self._models if model is None else [model]:
            yield InstanceFacts(
                instance_id=f"{self._name}/{name}",
                node_id=self._name,
                endpoint=Endpoint(model=name, region=self._region),
                gpu_type=self._gpu_type,
                accepting=True,
                age_s=0.0,
                kv_used_bytes=used_bytes,
                kv_capacity_bytes=self._settings.kv_bytes * self.slots,
                remaining_tokens=waiting,
            )

    def _tokens_left(self, served: Served) -> int:
        """Of a request that waits: its prompt, and what its answer has to come."""
        request = served.request
        return request.prompt_tokens + self._answers[request.model].rest(served.made, served.left)

    def _assign(self) -> None:
        """Assign requests to GPUs with their model, or idle ones; the others keep their order."""
        self._waiting = [one for one in self._waiting if not self._join(one)]
        self._forget_loads()
        self._waiting = [one for one in self._waiting if not self._join(one) and not self._switch(one)]
        for gpu in self._gpus:
            while gpu.line and (self._take(gpu, gpu.line[0]) or self._turn(gpu, gpu.line[0])):
                gpu.line.popleft()
        if self._prefetches:
            self._prefetch()

    def _forget_loads(self) -> None:
        """A GPU that loaded a model for which nobody waits any more is free for others; it keeps the model."""
        wanted = {served.request.model for served in self._waiting}
        for gpu in self._gpus:
            if gpu.next_model not in wanted:
                gpu.next_model = None

    def _prefetch(self) -> None:
        """Load the models of waiting requests, in their order, on GPUs that serve others; each on one GPU."""
        self._forget_loads()
        loading = {gpu.next_model for gpu in self._gpus}
        for model in dict.fromkeys(served.request.model for served in self._waiting):
            free = [gpu for gpu in self._gpus if gpu.next_model is None and self._may_load(gpu, model)]
            if free and model not in loading:
                gpu = min(free, key=lambda gpu: (self._missing_s(gpu, model), self._rest_tokens(gpu)))
                gpu.next_model = model
                self._load(gpu, model, keep=gpu.model)
        for gpu in self._gpus:
            follows = next((one.request.model for one in gpu.line if one.request.model != gpu.model), None)
            if follows is not None and self._may_load(gpu, follows):
                self._load(gpu, follows, keep=gpu.model)

    def _may_load(self, gpu: "_Gpu", model: str) -> bool:
        """Whether a GPU that serves another model has the memory to load this one."""
        if not gpu.requests or gpu.model is None or gpu.model == model:
            return False
        return gpu.memory.fits_with(self._weights[model], others=(gpu.model,))

    def _load(self, gpu: "_Gpu", model: str, *, keep: str | None = None) -> float:
        """Load a model if the GPU has not got it; when it is there."""
        now_s = self._events.now_s
        loaded_s = gpu.memory.load(self._weights[model], now_s, keep=keep)
        assert loaded_s is not None
        return max(loaded_s, now_s)

    def _missing_s(self, gpu: "_Gpu", model: str) -> float:
        return gpu.memory.missing_s(self._weights[model], self._events.now_s)

    def _rest_tokens(self, gpu: "_Gpu") -> int:
        """The tokens that the longest answer on a GPU is expected to have to come."""
        return max(self._answers[one.request.model].rest(one.made, one.left) for one in gpu.requests.values())

    def _choose_line(self, served: Served) -> "_Gpu":
        """A GPU that serves the model last of all in its line, for fewer than `LINE_MAX`; else that which has been
        without work for longest.
        """
        own = [gpu for gpu in self._gpus if gpu.last_model == served.request.model]
        if sum(max(0, LINE_MAX - gpu.last_run) for gpu in own) >= 1 or len(own) == len(self._gpus):
            return min(own, key=lambda gpu: gpu.last_run)
        return min((gpu for gpu in self._gpus if gpu not in own), key=lambda gpu: (gpu.works, gpu.idle_since_s))

    def _takes_s(self, served: Served) -> float:
        """The remaining time of a request served alone."""
        latency, tokens = self._models[served.request.model].latency, served.request.prompt_tokens
        prefill_s = 0.0 if served.made else latency.prefill_s(tokens, tokens**2)
        return prefill_s + served.left * latency.decode_s(tokens, 1)

    def _join(self, served: Served) -> bool:
        return any(self._take(gpu, served) for gpu in self._gpus)

    def _take(self, gpu: "_Gpu", served: Served) -> bool:
        """Serve a request on a GPU of its model, if KV allows."""
        tokens = served.request.prompt_tokens + served.request.output_tokens
        if gpu.model != served.request.model:
            return False
        if (gpu.promised_tokens + tokens) * gpu.token_bytes > self._settings.kv_bytes:
            return False
        gpu.promised_tokens += tokens
        gpu.requests[served.request.number] = served
        if gpu.instance:
            self._give(gpu, gpu.instance, served)
        return True

    def _switch(self, served: Served) -> bool:
        """Switch an idle GPU that has not loaded another model for others: that which has the request's soonest."""
        model = served.request.model
        idle = [gpu for gpu in self._gpus if not gpu.requests and gpu.next_model in (None, model)]
        if not idle:
            return False
        best = min(idle, key=lambda gpu: (gpu.next_model is None, self._missing_s(gpu, model), gpu.idle_since_s))
        return self._turn(best, served)

    def _turn(self, gpu: "_Gpu", served: Served) -> bool:
        """Switch an idle GPU to the request's model."""
        if gpu.requests:
            return False
        model = self._models[served.request.model]
        if gpu.instance:
            self._retired_s += gpu.instance.busy_s
        gpu.model, gpu.instance, gpu.token_bytes = model.name, None, model.kv_bytes_per_token
        gpu.next_model = None
        loaded_s = self._load(gpu, model.name)
        self.switches += 1
        self._switching_s += loaded_s - self._events.now_s
        self._take(gpu, served)
        self._events.at(loaded_s, Kind.END, lambda: self._start(gpu, model))
        return True

    def _start(self, gpu: "_Gpu", model: ModelCosts) -> None:
        gpu.instance = Instance(
            model, self._settings, self._answers[model.name], lambda served: self._ended(gpu, served)
        )
        gpu.alarm = Alarm(gpu.instance, self._events)
        for served in list(gpu.requests.values()):
            self._give(gpu, gpu.instance, served)

    def _give(self, gpu: "_Gpu", instance: Instance, served: Served) -> None:
        assert gpu.alarm is not None
        if served.made:
            instance.adopt(served, self._events.now_s)
        else:
            instance.submit(served, self._events.now_s)
        gpu.alarm.set()

    def _ended(self, gpu: "_Gpu", served: Served) -> None:
        del gpu.requests[served.request.number]
        gpu.promised_tokens -= served.request.prompt_tokens + served.request.output_tokens
        gpu.idle_since_s = self._events.now_s
        self._tell_ended(served)
        # Its instance is in the midst of a step: whoever comes next does so at this moment, but after it.
        self._events.at(self._events.now_s, Kind.END, self._assign)


class SplitCluster:
    """A cluster that prefills and one that decodes. Meets `presence.Server`; the instances are those of the first."""

    def __init__(self, prefill: RequestLevelCluster, decode: RequestLevelCluster) -> None:
        self.slots = prefill.slots + decode.slots
        self._prefill = prefill
        self._decode = decode

    @property
    def busy_s(self) -> float:
        return self._prefill.busy_s + self._decode.busy_s

    @property
    def switches(self) -> int:
        return self._prefill.switches + self._decode.switches

    def fits(self, request: Request) -> bool:
        return self._decode.fits(request)

    def submit(self, served: Served) -> None:
        self._prefill.submit(served)

    def reports(self, model: str | None = None) -> Iterable[InstanceFacts]:
        return self._prefill.reports(model)


class _Gpu:
    """One GPU. `instance`: None while weights arrive. `next_model`: loaded, or being loaded, for requests that wait in
    the global queue. Whoever waits for the GPU notices each end: it has an alarm.
    """

    def __init__(self, memory: WeightsMemory) -> None:
        self.memory = memory
        self.next_model: str | None = None
        self.model: str | None = None
        self.instance: Instance | None = None
        self.alarm: Alarm | None = None
        self.token_bytes = 0
        self.promised_tokens = 0
        self.requests: dict[int, Served] = {}
        self.line: deque[Served] = deque()
        self.idle_since_s = -1.0

    @property
    def works(self) -> bool:
        return bool(self.requests or self.line)

    @property
    def last_model(self) -> str | None:
        """The model of the last request in its queue, or the one it serves."""
        return self.line[-1].request.model if self.line else self.model

    @property
    def last_run(self) -> int:
        """The number of requests of that model at the end of its queue."""
        model = self.last_model
        count = sum(1 for _ in takewhile(lambda served: served.request.model == model, reversed(self.line)))
        return count + (len(self.requests) if count == len(self.line) and model == self.model else 0)
