"""One model in one vLLM engine in our process: its steps, and how it sleeps and wakes."""

import gc
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm import EngineArgs, LLMEngine, PoolingParams, PoolingRequestOutput, SamplingParams
from vllm.logprobs import Logprob

from dataplane.checkpoints.safetensors_file import FLOATS, list_tensors, read_json
from dataplane.engines.core.devices import HostSpan
from dataplane.engines.vllm import interfaces, sleep
from dataplane.engines.vllm.adapters import NO_ADAPTERS, AdapterLimits, Adapters
from dataplane.engines.vllm.settings import ITEM_BYTES, VllmEngineSettings
from dataplane.engines.vllm.version import check_version, installed_version
from dataplane.memory.model_cache import CachedModel, ModelCache
from dataplane.protocol.errors import DeviceLostError, ModelLoadError
from dataplane.protocol.messages import Task

_SAMPLING = "dataplane.engines.vllm.sampling:SeededSampling"
_FREE_SHARE_MIN = 0.01
"""Share of a GPU's memory that must be free for a load. By default vLLM would require nearly all of it."""
_READ_BYTES = 2**24
_ONE_HOST = HostSpan(hosts=1, host=0, address="127.0.0.1", port=29501, own_address="127.0.0.1")
"""vLLM's own defaults, which it does not use."""
_ENVIRONMENT = interfaces.layout_settings()
"""As the process inherited it: vLLM adds variables that differ from load to load."""


@dataclass(eq=False, kw_only=True)
class HostCopy:
    """Weights in host memory: flat uint8, the sizes of their storages, and the file that contains them."""

    host: torch.Tensor
    sizes: list[int]
    cached: CachedModel | None


@dataclass(frozen=True, kw_only=True)
class Step:
    """The result of a step, by the requests' names: the token of each, how many tokens of its first prefill were
    cached, vLLM's log probabilities where they are wanted, and why vLLM ended some. `pooled`: the states that answer
    requests of models that do not generate.
    """

    tokens: dict[str, int]
    ended: dict[str, str]
    cached: dict[str, int] = field(default_factory=dict)
    logprobs: dict[str, Mapping[int, Logprob]] = field(default_factory=dict)
    pooled: dict[str, torch.Tensor] = field(default_factory=dict)


class Runner:
    """A model that is awake: on its device, with its KV. `context_tokens`: of one request at most; `kv_tokens`: tokens
    whose KV fits in its blocks.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        settings: VllmEngineSettings,
        cache: ModelCache | None,
        task: Task = "generate",
        *,
        kv_bytes: int,
        adapters: AdapterLimits = NO_ADAPTERS,
    ) -> None:
        """Build it, which takes seconds. `kv_bytes`: memory for its KV. `adapters`: that it can serve.

        Raises:
            ModelLoadError: vLLM cannot run the checkpoint, or its KV memory holds no token.
        """
        self._name = name
        self._folder = folder
        self._settings = settings
        self._cache = cache
        self._copy: HostCopy | None = None
        self._kv_sizes: list[int] | None = None
        self._preempted: dict[str, int] = {}
        self._computed: dict[str, int] = {}
        """With steps in flight: tokens that have KV after the step whose tokens were returned last, by request."""
        self._preemptions_ended = 0
        self.engine = _build(name, engine_arguments(name, folder, settings, task, kv_bytes, adapters), settings)
        interfaces.check_interfaces(self.engine)
        self.adapters = Adapters(self.engine, adapters)
        self._overlaps = interfaces.overlaps(self.engine)
        self.scratch = interfaces.scratch()
        self.context_tokens: int = self.engine.vllm_config.model_config.max_model_len
        self.kv_tokens = interfaces.kv_tokens(self.engine)
        self.vocabulary: int = self.engine.vllm_config.model_config.get_vocab_size()

    @property
    def awake(self) -> bool:
        return self._kv_sizes is None

    @property
    def kv_usage(self) -> float:
        """The share of its KV blocks that are in use; 0 while it sleeps."""
        return interfaces.kv_usage(self.engine) if self.awake else 0.0

    @property
    def preemptions_total(self) -> int:
        """How often a request was preempted, for blocks or because the model was put to sleep."""
        return self._preemptions_ended + sum(self._preempted.values())

    def add(
        self,
        name: str,
        tokens: list[int],
        params: SamplingParams | PoolingParams,
        *,
        salt: str,
        priority: int,
        adapter: str = "",
    ) -> str:
        """Queue a request, also while asleep; returns vLLM's id of it. `step` refers to it by `name`. Only requests
        with the same salt and the same adapter, of which the base has none, share cached prefixes.
        """
        prompt: dict[str, Any] = {"prompt_token_ids": tokens}
        if salt:
            prompt["cache_salt"] = salt
        lora = self.adapters.request(adapter)
        vllm_id = self.engine.add_request(name, prompt, params, lora_request=lora, priority=priority)
        self._preempted[vllm_id] = 0
        return str(vllm_id)

    def end(self, vllm_id: str) -> None:
        """Remove a request, ended or not, and free its KV."""
        self._preemptions_ended += self._preempted.pop(vllm_id, 0)
        self.engine.abort_request([vllm_id], internal=True)

    def computed_tokens(self, vllm_id: str) -> int:
        if self._overlaps:
            return self._computed.get(vllm_id, 0)
        return interfaces.computed_tokens(self.engine, vllm_id) if self.awake else 0

    def step(self) -> Step:
        """Run a step. With asynchronous scheduling vLLM submits one, and returns the tokens of the one before it: where
        none is in flight, the first call returns nothing.

        Raises:
            DeviceLostError: several processes run the model, and one of them failed, has ended, or did not answer in
                time.
        """
        assert self.awake
        interfaces.use_scratch(self.scratch)
        if self._overlaps:
            if not interfaces.steps_in_flight(self.engine):
                self._step_engine()
            self._computed = {one: interfaces.computed_tokens(self.engine, one) for one in self._preempted}
        step = Step(tokens={}, ended={})
        for output in self._step_engine():
            if isinstance(output, PoolingRequestOutput):
                if output.finished:
                    step.pooled[output.request_id] = output.outputs.data
                continue
            (answer,) = output.outputs
            if answer.token_ids:
                (step.tokens[output.request_id],) = answer.token_ids
                step.cached[output.request_id] = output.num_cached_tokens or 0
                if answer.logprobs:
                    (step.logprobs[output.request_id],) = answer.logprobs
            if output.finished:
                step.ended[output.request_id] = str(answer.finish_reason)
        self._note_preemptions()
        return step

    def _step_engine(self) -> list[Any]:
        """vLLM's own step. Where one of several processes fails, answers to this step remain in vLLM's queues, and the
        next step would take them for its own.
        """
        try:
            outputs: list[Any] = self.engine.step()
        except Exception as error:
            ranks = self._settings.ranks
            if ranks == 1:
                raise
            raise DeviceLostError(f"{self._name}: a step of {ranks} processes failed: {error}") from error
        return outputs

    def keep_host_copy(self) -> None:
        """Copy the weights to host memory, once, so that the model can sleep.

        Raises:
            ModelLoadError: the model cannot sleep.
            dataplane.memory.model_cache.HostMemoryError: host memory is full.
        """
        if self._copy is not None:
            return
        if interfaces.keeps_kv_addresses(self.engine):
            raise ModelLoadError(
                f"{self._name}: its KV cannot move, so that it cannot share a slot; models_max must be 1 for it"
            )
        (sizes,) = self.engine.collective_rpc(sleep.weight_sizes)

        def fill(view: memoryview) -> None:
            self.engine.collective_rpc(sleep.copy_weights, args=(torch.frombuffer(view, dtype=torch.uint8),))

        if self._cache is None:
            private = torch.empty(sum(sizes), dtype=torch.uint8)
            self.engine.collective_rpc(sleep.copy_weights, args=(private,))
            self._copy = HostCopy(host=private, sizes=sizes, cached=None)
            return
        cached = self._cache.acquire(_cache_key(self._folder, self._settings, sizes), sum(sizes), fill)
        host = torch.frombuffer(cached.view, dtype=torch.uint8)
        self._copy = HostCopy(host=host, sizes=sizes, cached=cached)

    def sleep(self) -> None:
        """Free the device memory. Requests stay: their tokens are prefilled again after `wake`. Cached prefixes are
        forgotten, since their KV is.

        Raises:
            ModelLoadError: vLLM does not free its KV; the model stays awake.
        """
        assert self._copy is not None, "call keep_host_copy first"
        is_reset = self.engine.reset_prefix_cache(reset_running_requests=True)
        if not is_reset:
            raise ModelLoadError(
                f"{self._name}: vLLM did not reset its KV cache, so that the model cannot leave the device"
            )
        self._note_preemptions()
        (self._kv_sizes,) = self.engine.collective_rpc(sleep.offload)

    def wake(self) -> None:
        assert self._copy is not None
        self.engine.collective_rpc(sleep.restore, args=(self._copy.host, self._copy.sizes, self._kv_sizes))
        self._kv_sizes = None

    def close(self) -> None:
        """Free everything. The runner cannot be used afterwards."""
        interfaces.end_engine(self.engine)
        copy, self._copy = self._copy, None
        if copy is not None and copy.cached is not None:
            del copy.host
            copy.cached.release()

    def _note_preemptions(self) -> None:
        for vllm_id, before in self._preempted.items():
            self._preempted[vllm_id] = max(before, interfaces.preemptions(self.engine, vllm_id))


def stored_bytes(folder: Path, dtype: str) -> int:
    """The size of a checkpoint's tensors in a dtype. Quantized ones, which are integers or 8 bits wide, stay so.

    Raises:
        ModelLoadError: there are no safetensors, or a header does not describe its file.
    """
    item_bytes = ITEM_BYTES[dtype]
    return sum(
        torch.Size(stored.shape).numel() * item_bytes if stored.dtype in FLOATS else stored.size_bytes
        for stored in list_tensors(folder).values()
    )


def read_ahead(folder: Path) -> None:
    """The part of a load that may run concurrently with steps: import the model's class, and read the files into the
    page cache.
    """
    for architecture in _architectures(folder):
        interfaces.import_model_class(architecture)
    buffer = bytearray(_READ_BYTES)
    for file in sorted({stored.file for stored in list_tensors(folder).values()}):
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def _build(name: str, arguments: EngineArgs, settings: VllmEngineSettings) -> Any:
    check_version()
    if settings.device == "cpu":
        torch.cpu._init_amx()  # noqa: SLF001 - or the first matrix product in bfloat16 is an illegal instruction
        if settings.models_max > 1:
            interfaces.keep_weights_in_torch()
    interfaces.make_expert_group()
    try:
        return LLMEngine.from_engine_args(arguments)
    except torch.AcceleratorError:
        raise
    except Exception as error:  # whatever vLLM refuses, the slot's other models continue
        reason = f"{type(error).__name__}: {error}"
    gc.collect()  # the half-built engine, which the error held: the next load needs its memory
    raise ModelLoadError(f"{name}: vLLM cannot run it: {reason}")


def engine_arguments(
    name: str,
    folder: Path,
    settings: VllmEngineSettings,
    task: Task,
    kv_bytes: int,
    adapters: AdapterLimits = NO_ADAPTERS,
) -> EngineArgs:
    """How vLLM is asked to run a model. `kv_bytes`: of each GPU. `adapters`: that it can serve.

    Raises:
        ModelLoadError: it cannot be split over the slot's GPUs.
    """
    check_split(name, folder, settings.ranks)
    pools, span = task != "generate", settings.span or _ONE_HOST
    return EngineArgs(
        model=str(folder),
        served_model_name=name,
        skip_tokenizer_init=True,
        generation_config="vllm",  # defaults of requests are ours
        trust_remote_code=False,
        dtype=settings.dtype,
        max_model_len=-1,  # as much as fits the KV memory
        max_num_seqs=settings.batch_max,
        runner="pooling" if pools else "generate",
        # vLLM computes some prompts in one piece if their states are pooled: the limit is its own then
        max_num_batched_tokens=None if pools else max(settings.prefill_tokens_per_step_max, settings.batch_max),
        kv_cache_memory_bytes=kv_bytes,
        gpu_memory_utilization=_FREE_SHARE_MIN,
        block_size=settings.block_tokens,
        enable_prefix_caching=settings.prefix_cache and not pools,
        prefix_caching_hash_algo="sha256",  # a tenant could make a prompt that matches another's by a weaker one
        enforce_eager=settings.eager,
        scheduling_policy="priority",
        async_scheduling=settings.overlapped and not pools,
        logits_processors=None if pools else [_SAMPLING],
        disable_log_stats=True,
        tensor_parallel_size=settings.ranks,
        distributed_executor_backend="mp" if settings.ranks > 1 else None,
        enable_lora=adapters.places > 0,
        max_loras=max(1, adapters.places),
        max_cpu_loras=max(1, adapters.places),  # vLLM evicts none: what it has no memory for is refused
        max_lora_rank=adapters.rank or 1,
        nnodes=span.hosts,
        node_rank=span.host,
        master_addr=span.address,
        master_port=span.port,
    )


def check_split(name: str, folder: Path, ranks: int) -> None:
    """Check that a model can be split over so many GPUs.

    Raises:
        ModelLoadError: its attention heads cannot be divided.
    """
    config = read_json(folder / "config.json")
    text = config.get("text_config")
    heads = (text if isinstance(text, dict) else config).get("num_attention_heads")
    if ranks > 1 and isinstance(heads, int) and heads % ranks:
        raise ModelLoadError(f"{name}: num_attention_heads={heads} of its config cannot be divided among {ranks} GPUs")


def _architectures(folder: Path) -> Iterable[str]:
    named = read_json(folder / "config.json").get("architectures")
    return [name for name in named if isinstance(name, str)] if isinstance(named, list) else []


def _cache_key(folder: Path, settings: VllmEngineSettings, sizes: list[int]) -> str:
    """A key of all that determines the bytes: the files' state, and vLLM's layout, which depends on its version, its
    settings, torch and the device.
    """
    files = sorted({stored.file for stored in list_tensors(folder).values()})
    state = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    kind = settings.device.partition(":")[0]
    device = torch.cuda.get_device_name() if kind == "cuda" else kind
    layout = (installed_version(), _ENVIRONMENT, torch.__version__, device, settings.dtype)
    described = repr((layout, state, sizes))
    return f"{folder.name}-vllm-{hashlib.blake2b(described.encode(), digest_size=12).hexdigest()}"
