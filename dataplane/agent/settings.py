"""One frozen, validated settings object of an agent. Every name can be set as `TIDEPOOL_AGENT_<NAME>`."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from dataplane.checkpoints.local import Sources
from dataplane.checkpoints.sources import FetchRules
from dataplane.engines.core.pressure import KvPressure, vllm_refusal
from dataplane.engines.vllm.version import TESTED, check_version, installed_version
from dataplane.protocol.errors import ModelLoadError
from dataplane.protocol.messages import EngineKind
from dataplane.protocol.tls import check_tls_files
from dataplane.scheduling.decode import DecodeSettings
from dataplane.scheduling.prefill import PrefillSettings
from dataplane.scheduling.schedule import TurnSettings

SlotKind = Literal["both", "prefill", "decode"]
"""What a slot runs. A prefill slot hands its requests over after their first token."""


class SlotSettings(BaseModel):
    """One slot: the GPUs that one worker process drives, and their memory together."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpus: int = Field(1, ge=1, le=64, description="over 1 only for a replay, or as a number to plan with on a CPU")
    memory_bytes: int = Field(ge=2**20)
    kind: Literal["auto", SlotKind] = Field("auto", description="auto: by the agent's split and prefill_ratio")


def _engine_for(values: dict[str, Any]) -> EngineKind:
    """vLLM where GPUs have it in a version that was tested: whoever installed it wants it. On a CPU it is slower, and
    slots that serve together, and most of `kv_pressure`, are the torch engine's.
    """
    if vllm_refusal(values.get("kv_pressure", "auto")):
        return "torch"
    split = values.get("split") or any(slot.kind in {"prefill", "decode"} for slot in values.get("slots", ()))
    alone = not split and not values.get("together")
    usable = values.get("device", "cpu") != "cpu" and alone and installed_version() in TESTED
    return "vllm" if usable else "torch"


class AgentSettings(BaseSettings):
    """Settings of one node's agent. Limits and timeouts are here and nowhere else."""

    model_config = SettingsConfigDict(env_prefix="TIDEPOOL_AGENT_", frozen=True, extra="ignore")

    node: str = Field(min_length=1, max_length=200)
    region: str = Field(min_length=1, max_length=200)
    gpu_type: str = Field(min_length=1, max_length=200)
    slots: tuple[SlotSettings, ...] = Field(min_length=1, max_length=64, description="a JSON list")

    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    kv_share: float = Field(0.5, gt=0, lt=1, description="share of a slot's memory for KV; the rest holds weights")
    batch_max: int = Field(32, ge=1, le=4096, description="sequences in a step batch")
    slab_bytes: int | None = Field(None, ge=256, multiple_of=256, description="none: chosen by the size of the slot")
    kv_pressure: KvPressure = Field("auto", description="what is done when KV has no room; auto: the cheapest way")
    host_kv_bytes: int | None = Field(None, ge=0, description="host memory for KV of a slot; none: as its own KV")
    cache_dir: Path | None = Field(None, description="folder in memory for models and KV; none: one that ends with us")
    cache_bytes: int = Field(8 * 2**30, ge=1, description="host memory for the models of all slots, less where short")
    host_wait_max_s: float = Field(60.0, gt=0, description="how long a model may wait for host memory before it fails")
    checkpoints_dir: Path = Field(Path("~/.cache/tidepool/checkpoints"), description="where remote ones are fetched to")
    checkpoint_roots: tuple[Path, ...] | None = Field(
        None, description="folders that models' paths may lie in, a JSON list; none: anywhere on this node"
    )
    private_hosts: tuple[str, ...] = Field(
        (), description="names, addresses, networks to fetch from though they are not public, a JSON list"
    )
    checkpoint_bytes_max: int = Field(4 * 2**40, ge=1, description="of one remote checkpoint")
    checkpoint_time_max_s: float = Field(6 * 3600.0, gt=0, description="to fetch one")

    split: bool = Field(False, description="split the slots of a TP size into prefill and decode slots")
    prefill_ratio: float = Field(0.5, gt=0, lt=1, description="share of the slots of a TP size that prefill")
    together: bool = Field(
        False,
        description="let the slots of a TP size that do both serve together: an instance stands on each of them, and to"
        " the control plane they are one slot",
    )
    engine: EngineKind = Field(
        default_factory=_engine_for,
        description="of dedicated instances whose model leaves it open, by default vLLM on a GPU where it is installed,"
        " else torch; replay: of all",
    )
    vllm_models_max: int = Field(
        1, ge=1, le=64, description="models on a slot that vLLM runs; over 1 they take turns, without CUDA graphs"
    )
    order: Literal["fcfs", "edf", "pf", "dpa"] = Field("edf", description="which prefill goes first")
    group_requests_max: int = Field(8, ge=1, description="prefills of one model before another's turn")
    quota_max_s: float = Field(4.0, gt=0, description="longest decode turn while others wait")
    prefill_share: float = Field(0.5, gt=0, lt=1, description="share of a slot's time for prefill while decodes wait")
    prefetch: bool = Field(True, description="bring the weights of the next model early")

    profile: Path | None = Field(None, description="GPU profile of the replay engine")
    replay_speed: float = Field(1.0, gt=0, description="divides every replayed time")
    replay_mean_tokens: int | None = Field(None, ge=1, description="mean length of replayed answers; none: max_tokens")

    host: str = Field("127.0.0.1", description="loopback: only the control plane's own network should reach an agent")
    port: int = Field(0, ge=0, le=65535, description="0 takes a free one")
    tls_cert_file: Path | None = Field(None, description="the agent's certificate and those above it, PEM; none: http")
    tls_key_file: Path | None = Field(None, description="... and its private key, PEM")
    tls_ca_file: Path | None = Field(
        None,
        description="PEM: who may have signed a gateway's certificate, instead of the system's authorities",
    )
    advertise_url: str | None = Field(None, description="how the control plane reaches this agent")
    control_url: str = "http://127.0.0.1:8080"
    node_key: SecretStr = Field(min_length=8, description="what we show to the control plane")
    fleet_key: SecretStr | None = Field(
        None, min_length=8, description="what the control plane shows to us (its node_key); none: our node_key"
    )

    queue_max: int = Field(256, ge=1, description="requests in flight on one slot")
    body_bytes_max: int = Field(8 * 2**20, ge=1024)
    stop_strings_max: int = Field(16, ge=1)
    long_prompt_chars: int = Field(2**16, ge=1, description="characters from which a prompt is a long one")
    long_prompts_max: int = Field(2, ge=1, le=64, description="long prompts that are tokenized at once")
    fences_max: int = Field(
        10_000, ge=1, description="deferred requests not in flight whose newest claim is remembered"
    )
    heartbeat_every_s: float = Field(1.0, gt=0, le=60)
    heartbeat_gap_s: float = Field(0.2, gt=0, description="least time between two heartbeats")
    control_timeout_s: float = Field(3.0, gt=0, description="less than the time after which a silent node is unknown")
    control_backoff_max_s: float = Field(2.0, gt=0)
    worker_backoff_max_s: float = Field(2.0, gt=0.1)
    worker_losses_max: int = Field(3, ge=0, description="workers a request may lose before it fails")
    worker_wait_max_s: float = Field(45.0, gt=0, description="how long a request waits for a worker after it lost one")
    load_retry_s: float = Field(30.0, gt=0)
    handover_max_s: float = Field(
        20.0, ge=0, description="how long to serve after SIGTERM while successors start on other nodes; SIGINT skips it"
    )
    shutdown_grace_s: float = Field(5.0, ge=0, description="how long streams may go on after that")

    @model_validator(mode="after")
    def _replay_has_profile(self) -> Self:
        if self.engine == "replay" and self.profile is None:
            raise ValueError("profile must be set for the replay engine")
        return self

    @model_validator(mode="after")
    def _vllm_is_here(self) -> Self:
        if self.engine == "vllm":
            try:
                check_version()
            except ModelLoadError as error:
                raise ValueError(f"engine: {error}") from error
            if refusal := vllm_refusal(self.kv_pressure):
                raise ValueError(refusal)
        return self

    @model_validator(mode="after")
    def _a_slot_is_one_gpu(self) -> Self:
        if self.engine != "replay" and self.device != "cpu":
            for index, slot in enumerate(self.slots):
                if slot.gpus > 1:
                    raise ValueError(
                        f"slots.{index}.gpus must be 1 on {self.device}, got {slot.gpus}: the torch engine and vLLM run"
                        " a model on one GPU here; make a slot of each"
                    )
        return self

    @model_validator(mode="after")
    def _tls_files_are_there(self) -> Self:
        check_tls_files(self.tls_cert_file, self.tls_key_file, self.tls_ca_file)
        return self

    @model_validator(mode="after")
    def _url_is_reachable(self) -> Self:
        if self.host in ("0.0.0.0", "::") and self.advertise_url is None:  # noqa: S104  (refused, not bound)
            raise ValueError(f"advertise_url must be set when host is {self.host}: nobody can call that address")
        return self

    @model_validator(mode="after")
    def _pools_have_both_kinds(self) -> Self:
        kinds = self.kinds()
        for indices in self.pools():
            present = {kinds[index] for index in indices}
            missing = set() if present == {"both"} else {"prefill", "decode"} - present
            if missing:
                gpus = self.slots[indices[0]].gpus
                raise ValueError(f"slots: those of {gpus} GPUs have no {missing.pop()} slot; change a slot's kind")
        return self

    @model_validator(mode="after")
    def _prefilled_requests_can_leave(self) -> Self:
        if "prefill" in self.kinds() and self.host_kv_bytes == 0:
            raise ValueError("host_kv_bytes must be over 0 where slots prefill: requests are handed over through it")
        return self

    def device_of(self, slot: int) -> str:
        """The device of a slot: the first of its GPUs where `device` is just "cuda"."""
        if self.device != "cuda":
            return self.device
        return f"cuda:{sum(before.gpus for before in self.slots[:slot])}"

    @property
    def turns(self) -> TurnSettings:
        """The turn policy of a slot."""
        return TurnSettings(
            prefill=PrefillSettings(group_requests_max=self.group_requests_max, order=self.order),
            decode=DecodeSettings(
                quota_max_s=self.quota_max_s, quota_min_s=min(self.quota_max_s, DecodeSettings.quota_min_s)
            ),
            prefill_share=self.prefill_share,
        )

    def kinds(self) -> tuple[SlotKind, ...]:
        """What each slot runs. Where a TP size is split, `prefill_ratio` of its slots prefill, never none or all."""
        kinds: list[SlotKind] = ["both" if slot.kind == "auto" else slot.kind for slot in self.slots]
        for gpus in {slot.gpus for slot in self.slots} if self.split else ():
            members = [index for index, slot in enumerate(self.slots) if slot.gpus == gpus and slot.kind != "both"]
            wanted = min(len(members) - 1, max(1, round(self.prefill_ratio * len(members))))
            wanted -= sum(self.slots[index].kind == "prefill" for index in members)
            autos = [index for index in members if self.slots[index].kind == "auto"]
            for place, index in enumerate(autos if len(members) > 1 else ()):
                kinds[index] = "prefill" if place < wanted else "decode"
        return tuple(kinds)

    def pools(self) -> tuple[tuple[int, ...], ...]:
        """The slots, by index, that serve together: the prefill and decode slots of a TP size; those that do both, if
        the settings say so. Each other is by itself.
        """
        pools: dict[object, list[int]] = {}
        for index, (slot, kind) in enumerate(zip(self.slots, self.kinds(), strict=True)):
            alone = kind == "both" and not self.together
            key = ("alone", index) if alone else (kind == "both", slot.gpus)
            pools.setdefault(key, []).append(index)
        return tuple(tuple(indices) for indices in pools.values())

    def sources(self) -> Sources:
        """Where models come from."""
        rules = FetchRules(
            private_hosts=self.private_hosts,
            bytes_max=self.checkpoint_bytes_max,
            time_max_s=self.checkpoint_time_max_s,
        )
        return Sources(folder=self.checkpoints_dir, rules=rules, roots=self.checkpoint_roots)

    def inbound_key(self) -> str:
        """What callers of this node must show."""
        return (self.fleet_key or self.node_key).get_secret_value()

    def weights_bytes(self, slot: SlotSettings) -> int:
        """Room for weights on a slot."""
        return int(slot.memory_bytes * (1 - self.kv_share))

    def kv_bytes(self, slot: SlotSettings) -> int:
        """Room for KV on a slot, shared by its instances."""
        return int(slot.memory_bytes * self.kv_share)

    def host_kv_bytes_of(self, slot: SlotSettings) -> int:
        """Room for KV in host memory."""
        return self.kv_bytes(slot) if self.host_kv_bytes is None else self.host_kv_bytes
