"""One frozen, validated settings object of an agent. Every name can be set as `TIDEPOOL_AGENT_<NAME>`."""

import os
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from dataplane.agent.host_settings import HostSettings
from dataplane.checkpoints.adapters import ADAPTER_RANK_MAX
from dataplane.dispatch.worker import WorkerKind
from dataplane.engines.core.devices import StepLimits, step_limits, visible_gpus
from dataplane.engines.core.kv import KvEvents
from dataplane.engines.core.pressure import KvPressure, vllm_refusal
from dataplane.engines.vllm.version import TESTED, check_version, installed_version
from dataplane.protocol.errors import ModelLoadError
from dataplane.protocol.layouts import Layout, check_layout, memory_like, slots_of
from dataplane.protocol.messages import EngineKind
from dataplane.protocol.tls import check_tls_files
from dataplane.scheduling.decode import DecodeSettings
from dataplane.scheduling.prefill import PrefillSettings
from dataplane.scheduling.schedule import TurnSettings


class WorkerSettings(BaseModel):
    """One worker: its GPUs, and their memory together."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    gpus: int = Field(1, ge=1, le=64)
    """GPUs of the worker; several run each model together, by tensor parallelism"""
    hosts: int = Field(1, ge=1, le=64)
    """hosts that the GPUs are of, each with as many: this one, and those of `tidepool node follow`; more than 1 needs
    `engine` vllm"""
    ranks: int | None = Field(None, ge=1, le=64)
    """processes that run each model together, one for each GPU; on a CPU either 1, so that `gpus` is a number for
    planning, or `gpus`, to try tensor parallelism; unset: `gpus` on GPUs, 1 on a CPU and for the replay engine"""
    memory_bytes: int = Field(ge=2**20)
    """memory of the worker's GPUs together"""
    kind: Literal["auto", WorkerKind] = "auto"
    """requests it runs; auto: chosen from `split` and `prefill_ratio`"""


def _engine_for(values: dict[str, Any]) -> EngineKind:
    """vLLM on GPUs where a tested version is installed, else torch: vLLM is slower on a CPU, and has neither worker
    groups nor most of `kv_pressure`. Slots of several GPUs get it only where it is named: no such slot has run it here.
    """
    if vllm_refusal(values.get("kv_pressure", "auto")):
        return "torch"
    split = values.get("split") or any(one.kind in {"prefill", "decode"} for one in values.get("slots", ()))
    alone = not split and not values.get("together") and all(one.gpus == 1 for one in values.get("slots", ()))
    usable = values.get("device", "cpu") != "cpu" and alone and installed_version() in TESTED
    return "vllm" if usable else "torch"


_SILENT_S = 5.0
"""The least limit of a worker's silence: an idle one reports every two seconds."""


class AgentSettings(HostSettings):
    """Settings of one node's agent."""

    node: str = Field(min_length=1, max_length=200)
    """name of this node"""
    region: str = Field(min_length=1, max_length=200)
    """name of this node's region"""
    gpu_type: str = Field(min_length=1, max_length=200)
    """name of this node's GPU type, as `tidepool gpu list` shows it"""
    slots: tuple[WorkerSettings, ...] = Field(min_length=1, max_length=64)
    """workers of this node, a JSON list; their fields are listed below"""

    regroup: bool = False
    """let the control plane group the GPUs into other slots of 1, 2, 4, 8, ... than `slots`, which have the same memory
    for each GPU then"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """data type of weights and KV cache"""
    kv_share: float = Field(0.5, gt=0, lt=1)
    """share of a worker's memory for KV cache; the rest holds weights"""
    batch_max: int | None = Field(None, ge=1, le=4096)
    """sequences in one step's batch; unset: 256 on a GPU of 64 GB or more, 128 from 32 GB on, else 64; on a CPU 32"""
    prefill_tokens_max: int | None = Field(None, ge=1, le=2**20)
    """tokens that one step prefills; unset: on vLLM 8192, 4096 or 2048 by the same sizes, on the torch engine 512"""
    slab_bytes: int | None = Field(None, ge=256, multiple_of=256)
    """size of a memory slab, a multiple of 256; unset: chosen from the worker's memory"""
    kv_pressure: KvPressure = "auto"
    """action when the KV cache is full; auto: the cheapest"""
    host_kv_bytes: int | None = Field(None, ge=0)
    """host memory for offloaded KV cache, per worker; unset: as much as its KV cache on the device"""
    adapters_bytes: int = Field(2**28, ge=0)
    """memory for LoRA adapters on each GPU of a worker, taken as they are loaded, beside the worker's memory_bytes"""
    prefix_cache: bool = True
    """keep the KV cache of ended requests for requests that begin with the same tokens"""
    cache_dir: Path | None = None
    """folder in memory (tmpfs) for host copies of models and KV cache; unset: one that is deleted on exit"""
    cache_bytes: int = Field(8 * 2**30, ge=1)
    """host memory for models of all workers; less is used where the file system is smaller"""
    host_wait_max_s: float = Field(60.0, gt=0)
    """how long a model load may wait for host memory before it fails"""
    state_dir: Path | None = None
    """folder on disk, of this node alone, for the newest term that it has seen; unset: a restart forgets it"""

    split: bool = False
    """disaggregate prefill and decode: divide the workers of each size into both kinds"""
    prefill_ratio: float = Field(0.5, gt=0, lt=1)
    """share of the workers of each size that prefill, where `split` is set"""
    kv_events: KvEvents = "host"
    """how decode workers wait for KV that a prefill worker transfers. host: a thread waits for its end, seen in shared
    memory; device: the GPU waits for the prefill worker's, which decode workers then see; off: the KV is announced when
    it has been transferred"""
    together: bool = False
    """place each instance on all workers of a size; the control plane sees them as one slot"""
    engine: EngineKind = Field(
        default_factory=_engine_for,
        description="engine of dedicated instances whose model names none, by default vLLM on a GPU where"
        " it is installed, else torch; replay: of all instances",
    )
    vllm_models_max: int = Field(1, ge=1, le=64)
    """models that share one vLLM worker; more than 1 time-slice it, without CUDA graphs"""
    vllm_async_scheduling: bool = True
    """let vLLM prepare a step while the one before runs, on a GPU and where `vllm_models_max` is 1"""
    vllm_adapters_max: int = Field(0, ge=0, le=256)
    """LoRA adapters for which vLLM reserves memory beside a model that it loads, one at least if it loads it for an
    adapter; needs `vllm_models_max` of 1"""
    vllm_adapter_rank_max: int = Field(16, ge=1, le=ADAPTER_RANK_MAX)
    """highest rank of these adapters"""
    order: Literal["fcfs", "edf", "pf", "dpa"] = Field(
        "edf",
        description="order of waiting prefills; fcfs: arrival, edf: earliest deadline, pf: tier and then"
        " arrival, dpa: deadline and tier",
    )
    group_requests_max: int = Field(8, ge=1)
    """prefills of one model before the next model is scheduled"""
    time_slices: Literal["rounds", "deadlines"] = Field(
        "deadlines",
        description="how models share a worker's time; deadlines: the model whose next token is due first runs, its"
        " prompts and its batch in one slice; rounds: one decode time slice a model in turn, prefills between them",
    )
    quota_max_s: float = Field(4.0, gt=0)
    """longest decode time slice of a round, and longest minimal slice by deadlines, while other models wait"""
    prefill_share: float = Field(0.5, gt=0, lt=1)
    """share of a worker's time for prefill while decodes wait"""
    mixed_batches: bool = Field(
        False,
        description="chunked prefill in mixed batches: a step of the torch or replay engine decodes a model's batch and"
        " prefills beside it as many tokens as the objectives between tokens allow; vLLM always mixes",
    )
    prefetch: bool = True
    """load the weights of the next scheduled model in advance"""

    profile: Path | None = None
    """GPU profile of the replay engine, a JSON file"""
    replay_speed: float = Field(1.0, gt=0)
    """factor that divides every replayed time"""
    replay_mean_tokens: int | None = Field(None, ge=1)
    """mean length of replayed answers; unset: max_tokens of the request"""

    host: str = "127.0.0.1"
    """address that the agent listens on; an agent should be reachable from the control plane's network only"""
    port: int = Field(0, ge=0, le=65535)
    """port that the agent listens on; 0 for a free one"""
    tls_cert_file: Path | None = None
    """certificate chain of the agent, PEM; unset: plain HTTP"""
    tls_key_file: Path | None = None
    """private key of `tls_cert_file`, PEM"""
    advertise_url: str | None = None
    """URL at which the control plane reaches this agent; unset: from `host` and `port`"""
    control_url: str = "http://127.0.0.1:8080"
    """URL of a gateway, which heartbeats are sent to"""
    fleet_key: SecretStr | None = Field(None, min_length=8)
    """key that the control plane presents to this agent (its node_key); unset: `node_key`"""

    queue_max: int = Field(512, ge=1)
    """requests in flight on one worker"""
    unread_bytes_max: int = Field(16 * 2**20, ge=2**16)
    """commands that a worker has not read, in bytes, from which on it gets no new requests"""
    unread_time_max_s: float = Field(60.0, gt=0)
    """how long a reader may leave much of a stream unread before its request is cancelled"""
    body_bytes_max: int = Field(8 * 2**20, ge=1024)
    """size of a request's body"""
    stop_strings_max: int = Field(16, ge=1)
    """stop strings of a request"""
    long_prompt_chars: int = Field(2**16, ge=1)
    """length from which a prompt counts as long"""
    long_prompts_max: int = Field(2, ge=1, le=64)
    """long prompts that are tokenized at the same time"""
    template_processes_max: int = Field(2, ge=1, le=64)
    """processes that render chat templates; each template uses one at a time"""
    template_time_max_s: float = Field(5.0, gt=0, le=60)
    """longest time to render a conversation, and to wait for that"""
    constraint_chars_max: int = Field(2**17, ge=1)
    """length of the JSON schema, regular expression or grammar that an answer must match"""
    constraint_compile_max_s: float = Field(2.0, gt=0)
    """CPU time that such a definition may take to compile"""
    fences_max: int = Field(10_000, ge=1)
    """batch requests no longer in flight whose newest claim is remembered, to reject outdated ones"""
    heartbeat_every_s: float = Field(1.0, gt=0, le=60)
    """interval between heartbeats"""
    heartbeat_gap_s: float = Field(0.2, gt=0)
    """shortest interval between two heartbeats when something changed"""
    control_timeout_s: float = Field(3.0, gt=0)
    """limit for a heartbeat; keep it below the control plane's `heartbeat_stale_s`"""
    control_backoff_max_s: float = Field(2.0, gt=0)
    """longest delay before a failed heartbeat is repeated"""
    worker_backoff_max_s: float = Field(2.0, gt=0.1)
    """longest delay before a worker process is restarted"""
    worker_losses_max: int = Field(3, ge=0)
    """worker processes that may die under a request before it fails"""
    worker_wait_max_s: float = Field(45.0, gt=0)
    """how long a request waits for a worker after losing one"""
    worker_start_max_s: float = Field(1800.0, ge=0)
    """how long a worker may take from its start until it can load models, before it is replaced: it imports its engine
    and allocates and pins its memory; and how long vLLM may take to load a model; 0: for ever"""
    worker_silent_max_s: float = Field(600.0, ge=0)
    """how long a worker with requests may report nothing before it is replaced; longer than its longest step, 5 at
    least, since it reports every 2; 0: for ever"""
    load_retry_s: float = Field(30.0, gt=0)
    """delay before a failed model load is retried"""
    handover_max_s: float = Field(20.0, ge=0)
    """how long to keep serving after SIGTERM while replacements start on other nodes; SIGINT waits for none"""
    shutdown_grace_s: float = Field(5.0, ge=0)
    """how long open streams may continue after that"""

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        if self.engine == "replay" and self.profile is None:
            raise ValueError("profile must be set for the replay engine")
        if self.engine == "vllm":
            try:
                check_version()
            except ModelLoadError as error:
                raise ValueError(f"engine: {error}") from error
            if refusal := vllm_refusal(self.kv_pressure):
                raise ValueError(refusal)
        if self.vllm_adapters_max and self.vllm_models_max > 1:
            raise ValueError(f"vllm_adapters_max: must be 0 where vllm_models_max is {self.vllm_models_max}, not 1")
        return self

    @model_validator(mode="after")
    def _check_silence(self) -> Self:
        if 0 < self.worker_silent_max_s < _SILENT_S:
            raise ValueError(
                f"worker_silent_max_s must be 0 or at least {_SILENT_S:g}, not {self.worker_silent_max_s:g}"
            )
        return self

    @model_validator(mode="after")
    def _check_gpus(self) -> Self:
        for index, worker in enumerate(self.slots):
            usable = self._usable_ranks(worker)
            if worker.ranks is not None and worker.ranks not in usable:
                given = f"got {worker.ranks} with gpus={worker.gpus}"
                raise ValueError(f"slots.{index}.ranks must be {' or '.join(map(str, usable))}, {given}")
            if self.engine == "vllm" and (refusal := self.vllm_split_refusal(index)) is not None:
                raise ValueError(f"slots.{index}: {refusal}")
            if worker.hosts > 1 and (refusal := self._span_refusal(worker)) is not None:
                raise ValueError(f"slots.{index}.hosts: {refusal}")
            if self.engine != "replay":
                self._check_visible(index)
        return self

    def _span_refusal(self, worker: WorkerSettings) -> str | None:
        """Why a worker's GPUs cannot be of several hosts."""
        if self.engine != "vllm":
            return f"must be 1 for the engine {self.engine}; vllm takes {worker.hosts}"
        if worker.gpus % worker.hosts:
            return f"the {worker.gpus} GPUs cannot be divided among {worker.hosts}"
        if self.regroup or self.together or worker.kind in {"prefill", "decode"} or self.split:
            return f"must be 1 where regroup, together or split is set, or a kind; got {worker.hosts}"
        return None

    @model_validator(mode="after")
    def _check_regrouping(self) -> Self:
        if not self.regroup:
            return self
        layout = tuple(worker.gpus for worker in self.slots)
        try:
            check_layout(layout, sum(layout))
        except ValueError as error:
            raise ValueError(f"slots: {error}; regroup needs that") from error
        if self.together or any(kind != "both" for kind in self.kinds):
            raise ValueError("regroup: must be false where slots serve together (split, together, or their kind)")
        if len({worker.memory_bytes / worker.gpus for worker in self.slots}) > 1:
            raise ValueError("slots: memory_bytes must be the same for each GPU where regroup is set")
        if len({self.ranks_of(index) > 1 for index, worker in enumerate(self.slots) if worker.gpus > 1}) > 1:
            raise ValueError("slots: ranks must be 1 for all, or gpus for all, where regroup is set")
        if self.device.startswith("cuda:"):
            raise ValueError(
                f"device must be cuda where regroup is set, not {self.device}: slots have GPUs of their own"
            )
        return self

    def regrouped(self, layout: Layout) -> Self:
        """The settings with its GPUs grouped into other slots.

        Raises:
            ValueError: the node cannot be grouped like that.
        """
        check_layout(layout, sum(worker.gpus for worker in self.slots))
        of_bytes, of_gpus = self.slots[0].memory_bytes, self.slots[0].gpus
        split = any(worker.ranks is not None and worker.ranks > 1 for worker in self.slots)
        slots = tuple(
            WorkerSettings(
                gpus=gpus,
                ranks=gpus if split else None,
                memory_bytes=memory_like(gpus, of_bytes=of_bytes, of_gpus=of_gpus),
                kind="both",
            )
            for gpus in layout
        )
        return self.model_copy(update={"slots": slots})

    def _check_visible(self, worker: int) -> None:
        try:
            visible_gpus(self.gpus_of(worker), os.environ)
        except ModelLoadError as error:
            raise ValueError(f"slots.{worker}: {error}") from error

    @model_validator(mode="after")
    def _check_addresses(self) -> Self:
        check_tls_files(self.tls_cert_file, self.tls_key_file, self.tls_ca_file)
        if self.host in ("0.0.0.0", "::") and self.advertise_url is None:  # noqa: S104  (refused, not bound)
            raise ValueError(f"advertise_url must be set when host is {self.host}: nobody can call that address")
        return self

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        kinds = self.kinds
        for indices in self.groups:
            present = {kinds[index] for index in indices}
            missing = set() if present == {"both"} else {"prefill", "decode"} - present
            if missing:
                gpus = self.slots[indices[0]].gpus
                raise ValueError(f"slots: those of {gpus} GPUs have no {missing.pop()} slot; change a slot's kind")
        if "prefill" in kinds and self.host_kv_bytes == 0:
            raise ValueError("host_kv_bytes must be over 0 where slots prefill: it holds the KV that they transfer")
        return self

    def gpus_of(self, worker: int) -> range:
        """Which of the GPUs that the agent sees are a worker's; none on a CPU. With the device "cuda" the workers have
        them one after the other; "cuda:N" is the first one of every worker. Those of other hosts are not seen here.
        """
        kind, _, first = self.device.partition(":")
        if kind != "cuda":
            return range(0)
        here = [one.gpus // one.hosts for one in self.slots]
        start = int(first) if first else sum(here[:worker])
        return range(start, start + here[worker])

    def awaited_gpus(self, worker: int) -> tuple[int, ...]:
        """The GPUs of prefill workers for which a decode worker's GPU waits, and which it must see therefore."""
        if self.kv_events != "device" or self.kinds[worker] != "decode" or self.ranks_of(worker) > 1:
            return ()
        (group,) = (indices for indices in self.groups if worker in indices)
        gpus = [gpu for index in group if self.kinds[index] == "prefill" for gpu in self.gpus_of(index)]
        return tuple(dict.fromkeys(gpu for gpu in gpus if gpu not in self.gpus_of(worker)))

    def _usable_ranks(self, worker: WorkerSettings) -> tuple[int, ...]:
        """How many ranks a worker may have. The first is the default."""
        if self.engine == "replay":
            return (1,)
        if worker.hosts > 1:
            return (worker.gpus,)
        return tuple(dict.fromkeys((1, worker.gpus))) if self.device == "cpu" else (worker.gpus,)

    def vllm_split_refusal(self, worker: int) -> str | None:
        """Why vLLM cannot run a model on all GPUs of a worker; None where it can."""
        ranks = self.ranks_of(worker)
        if ranks > 1 and self.vllm_models_max > 1:
            return f"gpus must be 1 for vLLM where vllm_models_max is above 1, got {ranks}"
        return None

    def ranks_of(self, worker: int) -> int:
        """How many processes run each model of a worker together."""
        one = self.slots[worker]
        return self._usable_ranks(one)[0] if one.ranks is None else one.ranks

    @property
    def worker_device(self) -> str:
        """The device of a worker, as its process sees it: the first of its GPUs."""
        return "cuda:0" if self.device.partition(":")[0] == "cuda" else self.device

    @property
    def turns(self) -> TurnSettings:
        """How a worker schedules its models."""
        return TurnSettings(
            prefill=PrefillSettings(group_requests_max=self.group_requests_max, order=self.order),
            decode=DecodeSettings(
                quota_max_s=self.quota_max_s, quota_min_s=min(self.quota_max_s, DecodeSettings.quota_min_s)
            ),
            prefill_share=self.prefill_share,
            mixed_batches=self.mixed_batches,
            time_slices=self.time_slices,
        )

    @property
    def kinds(self) -> tuple[WorkerKind, ...]:
        """What each worker runs. With `split`, `prefill_ratio` of the workers of a size prefill, never none or all."""
        kinds: list[WorkerKind] = ["both" if worker.kind == "auto" else worker.kind for worker in self.slots]
        for gpus in {worker.gpus for worker in self.slots} if self.split else ():
            members = [index for index, one in enumerate(self.slots) if one.gpus == gpus and one.kind != "both"]
            wanted = min(len(members) - 1, max(1, round(self.prefill_ratio * len(members))))
            wanted -= sum(self.slots[index].kind == "prefill" for index in members)
            autos = [index for index in members if self.slots[index].kind == "auto"]
            for number, index in enumerate(autos if len(members) > 1 else ()):
                kinds[index] = "prefill" if number < wanted else "decode"
        return tuple(kinds)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The worker groups, as indices of workers: the prefill and decode workers of a size, in GPUs and in ranks, and
        with `together` those that do both. Each other worker is a group.
        """
        groups: dict[object, list[int]] = {}
        for index, (worker, kind) in enumerate(zip(self.slots, self.kinds, strict=True)):
            alone = kind == "both" and not self.together
            key = ("alone", index) if alone else (kind == "both", worker.gpus, self.ranks_of(index))
            groups.setdefault(key, []).append(index)
        return tuple(tuple(indices) for indices in groups.values())

    @property
    def numbers(self) -> tuple[int, ...]:
        """The number of each worker group on the node, as the control plane knows it."""
        if self.regroup:
            return tuple(slots_of([worker.gpus for worker in self.slots]))
        return tuple(range(len(self.groups)))

    @property
    def inbound_key(self) -> str:
        """The key that callers of this node must present."""
        return (self.fleet_key or self.node_key).get_secret_value()

    def weights_bytes(self, worker: WorkerSettings) -> int:
        return int(worker.memory_bytes * (1 - self.kv_share))

    def kv_bytes(self, worker: WorkerSettings) -> int:
        return int(worker.memory_bytes * self.kv_share)

    def step_limits(self, worker: WorkerSettings) -> StepLimits:
        """What one step of a worker may hold, of which `prefill_tokens_max` is vLLM's."""
        by_card = step_limits(self.device, worker.memory_bytes // worker.gpus)
        return StepLimits(self.batch_max or by_card.batch_max, self.prefill_tokens_max or by_card.prefill_tokens_max)

    def host_kv_bytes_of(self, worker: WorkerSettings) -> int:
        return self.kv_bytes(worker) if self.host_kv_bytes is None else self.host_kv_bytes
