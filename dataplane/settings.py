"""One frozen, validated settings object of an agent. Every name can be set as `TIDEPOOL_AGENT_<NAME>`."""

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class SlotSettings(BaseModel):
    """One slot: the GPUs that one worker process drives, and their memory together."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpus: int = Field(1, ge=1, le=64)
    memory_bytes: int = Field(ge=2**20)


class AgentSettings(BaseSettings):
    """Settings of one node's agent. Limits and timeouts are here and nowhere else."""

    model_config = SettingsConfigDict(env_prefix="TIDEPOOL_AGENT_", frozen=True, extra="ignore")

    node: str = Field(min_length=1, max_length=200)
    region: str = Field(min_length=1, max_length=200)
    gpu_type: str = Field(min_length=1, max_length=200)
    slots: tuple[SlotSettings, ...] = Field(min_length=1, max_length=64, description="a JSON list")

    engine: Literal["torch", "replay"] = "torch"
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    kv_share: float = Field(0.5, gt=0, lt=1, description="share of a slot's memory for KV; the rest holds weights")
    batch_max: int = Field(32, ge=1, le=4096, description="sequences in a step batch")
    turn_time_s: float = Field(0.25, gt=0)
    profile: Path | None = Field(None, description="GPU profile of the replay engine")
    replay_speed: float = Field(1.0, gt=0, description="divides every replayed time")
    replay_mean_tokens: int | None = Field(None, ge=1, description="mean length of replayed answers; none: max_tokens")

    host: str = Field("127.0.0.1", description="loopback: only the control plane's own network should reach an agent")
    port: int = Field(0, ge=0, le=65535, description="0 takes a free one")
    advertise_url: str | None = Field(None, description="how the control plane reaches this agent")
    control_url: str = "http://127.0.0.1:8080"
    node_key: SecretStr = Field(min_length=8)

    queue_max: int = Field(256, ge=1, description="requests in flight on one slot")
    body_bytes_max: int = Field(8 * 2**20, ge=1024)
    stop_strings_max: int = Field(16, ge=1)
    heartbeat_every_s: float = Field(1.0, gt=0, le=60)
    heartbeat_gap_s: float = Field(0.2, gt=0, description="least time between two heartbeats")
    control_timeout_s: float = Field(5.0, gt=0)
    control_backoff_max_s: float = Field(2.0, gt=0)
    worker_backoff_max_s: float = Field(2.0, gt=0.1)
    worker_losses_max: int = Field(3, ge=0, description="workers a request may lose before it fails")
    load_retry_s: float = Field(30.0, gt=0)
    shutdown_grace_s: float = Field(5.0, ge=0, description="how long streams may go on after SIGTERM")

    @model_validator(mode="after")
    def _replay_has_profile(self) -> Self:
        if self.engine == "replay" and self.profile is None:
            raise ValueError("profile must be set for the replay engine")
        return self

    @model_validator(mode="after")
    def _url_is_reachable(self) -> Self:
        if self.host in ("0.0.0.0", "::") and self.advertise_url is None:  # noqa: S104  (refused, not bound)
            raise ValueError(f"advertise_url must be set when host is {self.host}: nobody can call that address")
        return self

    def weights_bytes(self, slot: SlotSettings) -> int:
        """Room for weights on a slot."""
        return int(slot.memory_bytes * (1 - self.kv_share))

    def kv_bytes_per_gpu(self, slot: SlotSettings) -> int:
        """Room for KV on each GPU of the slot; an instance has that of the GPUs it takes."""
        return int(slot.memory_bytes * self.kv_share) // slot.gpus
