"""One frozen, validated settings object per process. Every name can be set as `TIDEPOOL_<NAME>` in the environment."""

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from dataplane.protocol.tiers import OBJECTIVE_TBT_MAX_S, OBJECTIVE_TTFT_MAX_S
from dataplane.protocol.tls import check_tls_files

_POSTGRES_SCHEMES = frozenset({"postgres", "postgresql", "postgresql+psycopg"})


def psycopg_url(url: str) -> str:
    """A Postgres address, in whichever of its spellings, as SQLAlchemy and our driver take it.

    Raises:
        ValueError: it is no address of a Postgres.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in _POSTGRES_SCHEMES:
        raise ValueError("must be postgresql://USER:PASSWORD@HOST:PORT/DATABASE")
    return f"postgresql+psycopg://{rest}"


class Settings(BaseSettings):
    """Settings of the control plane's processes. Limits and timeouts are here and nowhere else."""

    model_config = SettingsConfigDict(env_prefix="TIDEPOOL_", frozen=True, extra="ignore")

    database_url: Annotated[SecretStr, AfterValidator(lambda url: SecretStr(psycopg_url(url.get_secret_value())))] = (
        Field(SecretStr("postgresql+psycopg://postgres@127.0.0.1:5432/tidepool"), description="postgres://... will do")
    )
    redis_url: SecretStr = Field(SecretStr("redis://127.0.0.1:6379/0"))
    home: Path = Field(Path("~/.tidepool"), description="where uploaded files and keys.json live")
    files_url: str | None = Field(
        None, pattern=r"^s3://[^/?#]+(/[^?#]*)?$", description="s3://BUCKET[/PREFIX] for files, instead of home/files"
    )
    region: str | None = Field(None, description="region this gateway stands in; default: the first by preference")
    node_key: SecretStr = Field(SecretStr(""), description="what we show to node agents")
    host: str = Field("127.0.0.1", description="address that a gateway listens on; 0.0.0.0: all of this machine")
    port: int = Field(8080, ge=0, le=65535)
    tls_cert_file: Path | None = Field(None, description="a gateway's certificate and those above it, PEM; none: http")
    tls_key_file: Path | None = Field(None, description="... and its private key, PEM")
    tls_ca_file: Path | None = Field(
        None, description="PEM: who may have signed the certificates of nodes, instead of the system's authorities"
    )
    cors_origins: str = Field(
        "", max_length=4096, description="web pages' origins that may call the API, separated by commas; *: all"
    )

    database_pool_size: int = Field(10, ge=1, le=200)
    database_timeout_s: int = Field(10, ge=1, le=300, description="to connect, and for one statement")

    node_connections_max: int = Field(
        2000,
        ge=1,
        le=60_000,
        description="connections to nodes that a gateway or dispatcher may have open, one a request",
    )
    view_refresh_s: float = Field(0.25, gt=0, le=1)
    node_replace_s: float = Field(
        20.0, gt=0, description="instances of a node silent for longer are started elsewhere, if there is room"
    )
    heartbeat_stale_s: float = Field(5.0, gt=1, description="a node silent for longer is unknown")
    key_cache_s: float = Field(5.0, ge=0, description="how long a key is good without asking Postgres")
    key_wait_s: float = Field(1.0, gt=0, description="... and how long a request waits before the last answer counts")
    node_keys_unbound: bool = Field(False, description="take node keys of no node; for a stack on one machine")

    tenant_requests_per_minute: int | None = Field(None, ge=1, description="of tenants without limits of their own")
    tenant_tokens_per_minute: int | None = Field(None, ge=1)
    tenant_concurrent_max: int | None = Field(None, ge=1)
    tenant_queued_batch_tokens_max: int | None = Field(None, ge=0)
    limit_lease_s: float = Field(30.0, ge=1, description="after which a killed gateway's requests count no more")
    limit_timeout_s: float = Field(0.5, gt=0, description="how long Redis may take before a gateway counts alone")

    header_bytes_max: int = Field(32 * 2**10, ge=1024, description="a request's line and headers")
    header_count_max: int = Field(100, ge=10)
    header_timeout_s: float = Field(10.0, gt=0, description="for a request's line and headers to arrive")
    body_idle_timeout_s: float = Field(30.0, gt=0, description="between two pieces of a body")
    body_timeout_s: float = Field(900.0, gt=0, description="for a whole body")
    client_idle_timeout_s: float = Field(30.0, gt=0, description="a client that does not read for longer is cut off")
    request_body_bytes_max: int = Field(4 * 2**20, ge=1024)
    file_bytes_max: int = Field(200 * 2**20, ge=1024, description="a batch input file")
    file_keep_days: int = Field(30, ge=1)
    batch_lines_max: int = Field(50_000, ge=1)
    batch_attempts_max: int = Field(10, ge=1, description="tries to validate or to finalize a batch before it fails")
    request_attempts_max: int = Field(3, ge=1, description="instances tried before an interactive request fails")
    request_start_wait_s: float = Field(
        15.0, ge=0, description="how long an interactive request waits for an instance of its model that is starting"
    )
    first_token_timeout_s: float = Field(60.0, gt=0)
    stream_idle_timeout_s: float = Field(60.0, gt=0)
    circuit_open_max_s: float = Field(60.0, ge=1, description="failing instances are left alone at most for")
    stream_continuations_max: int = Field(5, ge=0, description="instances that may carry on one broken stream")
    stream_continue_wait_s: float = Field(30.0, ge=0, description="how long a broken stream waits for such an instance")

    request_log: Literal["all", "errors", "off"] = Field(
        "all", description="interactive requests that are logged; errors: those that failed or were slow"
    )
    request_log_lines: Literal["all", "errors", "off"] = Field(
        "errors", description="those of them that are lines of the process's log too; a line costs as much as the row"
    )
    request_log_sample: float = Field(1.0, ge=0, le=1, description="share of the others that is logged")
    request_log_slow_s: float = Field(10.0, ge=0, description="a first token that takes longer is slow")
    request_log_keep_s: float = Field(86_400.0, ge=60, description="how long `tidepool request show` finds a request")
    request_log_waiting_max: int = Field(
        10_000, ge=1, description="records that a gateway keeps while Postgres is away; older ones are dropped"
    )

    release_below_one: float = Field(0.6, gt=0, lt=1, description="utilization for 1 NIW request a signal")
    release_below_two: float = Field(0.5, gt=0, lt=1, description="... and 2")
    release_signal_s: float = Field(1.0, gt=0, description="an endpoint signals room at most this often")
    release_load_max: float = Field(1.0, gt=0, description="no NIW to nodes whose busiest slot has a higher load")
    release_rise_max: float = Field(0.1, gt=0, lt=1, description="... nor where utilization rose by more at one look")
    release_pause_max_s: float = Field(60.0, gt=0, description="the longest pause of an endpoint that showed trouble")
    release_turn_s: float = Field(30.0, gt=0, description="how long one model of a pooled slot takes NIW, in turns")
    niw_age_priority_s: float = Field(10 * 3600.0, gt=0, description="older requests count as interactive")
    niw_left_priority: float = Field(0.25, gt=0, lt=1, description="... and those with this share of their window left")
    niw_lease_s: int = Field(120, ge=5)
    niw_attempts_max: int = Field(5, ge=1, description="claims in which a node may have had it, or a dispatcher died")
    dispatcher_concurrency_max: int = Field(256, ge=1)

    slo_iw_f_ttft_s: float = Field(
        1.0, gt=0, le=OBJECTIVE_TTFT_MAX_S, description="first token of tier IW-F; models may have their own"
    )
    slo_iw_f_tbt_s: float = Field(0.1, gt=0, le=OBJECTIVE_TBT_MAX_S, description="... each token after it")
    slo_iw_n_ttft_s: float = Field(60.0, gt=0, le=OBJECTIVE_TTFT_MAX_S)
    slo_iw_n_tbt_s: float = Field(0.1, gt=0, le=OBJECTIVE_TBT_MAX_S)
    admission_iw_f_margin: float = Field(1.2, gt=0, description="refused if it waits longer than this times its TTFT")
    admission_iw_n_margin: float = Field(0.8, gt=0)
    flex_wait_s: float = Field(60.0, ge=0, description="how long a flex request is held until there is room")
    flex_waiting_max: int = Field(1000, ge=0, description="flex requests held by one gateway")

    route_utilization_max: float = Field(0.7, gt=0, lt=1)
    scale_out_above: float = Field(0.7, gt=0, lt=1)
    scale_in_below: float = Field(0.3, gt=0, lt=1)
    scale_cooldown_s: float = Field(15.0, ge=0)
    scale_strategy: str = Field("lt-i", pattern="^(lt-i|lt-u|lt-ua|lt-d|reactive|siloed|chiron)$")
    scale_room_out: float = Field(1.1, ge=1, description="lt-d: instances for this times what arrives")
    scale_room_in: float = Field(1.4, gt=1, description="... and above this some go; higher than scale_room_out")
    scale_start_patience_s: float = Field(900.0, gt=0, description="an instance not ready for longer is replaced")
    scale_failed_patience_s: float = Field(10.0, ge=0, description="... and one that failed; workers may come back")
    scale_retry_s: float = Field(600.0, gt=0, description="... and again, where its replacement failed too")
    instance_keep_days: int = Field(7, ge=1, description="forget instances stopped longer ago, and their leases")
    spot_enabled: bool = Field(True, description="lend out what is scaled in, instead of stopping it")
    spot_max_age_s: float | None = Field(6 * 3600.0, gt=0, description="then unleased spot is stopped; none: never")
    spot_notice_s: float = Field(30.0, ge=0, le=45, description="before a lease ends because its GPUs are needed")
    spot_lease_min_s: float = Field(60.0, gt=0)
    spot_lease_max_s: float = Field(86_400.0, gt=0)
    engine_retry_s: float = Field(600.0, gt=0, description="an engine is left alone for a model that failed on it, ...")
    engine_retry_max_s: float = Field(86_400.0, gt=0, description="... longer each time, up to this")
    scale_every_s: float = Field(15.0, gt=0)
    expire_every_s: float = Field(30.0, gt=0)
    pulse_every_s: float = Field(15.0, gt=0, description="how often workers, beat and dispatchers note that they work")

    forecast_history_s: int = Field(7 * 86_400, ge=3600)
    demand_keep_days: int = Field(
        90,
        ge=8,
        le=36_500,
        description="days that demand is kept, imported demand from its import on; not fewer than forecast_history_s",
    )
    forecast_keep_days: int = Field(90, ge=8, description="forget older forecasts")
    forecast_origins_max: int = Field(
        12, ge=1, le=168, description="past hours replayed for a series never forecast before"
    )
    forecast_quantile: float = Field(0.9, gt=0.5, lt=1)
    niw_demand_share: float = Field(0.1, ge=0, le=1, description="beta of SageServe 6.3")
    placement_epsilon: float = Field(0.8, ge=0, le=1, description="share of demand that must be served at home")
    placement_time_limit_s: float = Field(
        30.0, gt=0, description="seconds to solve a placement in, half of them at most for the integer program"
    )
    placement_gap: float = Field(0.001, ge=0, lt=1)
    pools_enabled: bool = Field(True, description="let plans pool endpoints whose latency and host memory are known")
    pool_fill: float = Field(0.8, gt=0, le=1, description="share of a pool's GPUs that a plan may fill")
    pool_prompt_tokens: float = Field(512.0, gt=0, description="mean prompt of a pooled model, while none is measured")
    pool_output_tokens: float = Field(256.0, gt=0, description="... and mean answer")
    pool_tbt_s: float = Field(0.1, gt=0, description="target for the time between tokens in a pool")
    pool_round_s: float = Field(12.0, gt=0, description="seconds between two turns of a busy model in a pool")
    plan_approval: str = Field(
        "automatic",
        pattern="^(automatic|limits|always)$",
        description="the hourly plan goes into force by itself; unless it exceeds a limit below; never",
    )
    plan_gpus_moved_max: int | None = Field(None, ge=0, description="GPUs that may hold something else after a plan")
    plan_share_moved_max: float | None = Field(0.25, ge=0, le=1, description="the same as a share of the fleet's GPUs")
    plan_cost_change_max: float | None = Field(None, ge=0, description="how far the cost per hour may rise or fall")
    plan_forecasts_s: float = Field(120.0, gt=0, description="seconds a plan takes to make late forecasts itself")
    plan_forecasts_max: int = Field(50, ge=0, description="late series that a plan forecasts itself, the busiest first")
    forecast_task_series_max: int = Field(50, ge=1, description="series that one task forecasts, one after another")
    event_keep_days: int = Field(14, ge=1, description="forget older events of instances, nodes and plans")
    usage_keep_days: int = Field(400, ge=2, description="forget older usage of tenants")
    plan_keep_days: int = Field(90, ge=2, description="forget plans that ended and are older")
    pin_days_max: int = Field(90, ge=1, le=3650, description="the longest that a pin may last")

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, value: str) -> str:
        for origin in filter(None, map(str.strip, value.split(","))):
            if origin != "*" and not re.fullmatch(r"https?://[A-Za-z0-9.:\[\]-]+", origin):
                raise ValueError(f"'{origin}' is no origin: write https://HOST[:PORT] without a path, or *")
        return value

    def origins(self) -> list[str]:
        """The parts of `cors_origins`."""
        return [origin for origin in map(str.strip, self.cors_origins.split(",")) if origin]

    @model_validator(mode="after")
    def _tls_files_are_there(self) -> Self:
        check_tls_files(self.tls_cert_file, self.tls_key_file, self.tls_ca_file)
        return self

    @model_validator(mode="after")
    def _need_a_limit(self) -> Self:
        limits = (self.plan_gpus_moved_max, self.plan_share_moved_max, self.plan_cost_change_max)
        if self.plan_approval == "limits" and all(limit is None for limit in limits):
            raise ValueError(
                "plan_approval 'limits' needs plan_gpus_moved_max, plan_share_moved_max or plan_cost_change_max"
            )
        return self

    @model_validator(mode="after")
    def _need_room(self) -> Self:
        if self.scale_room_in <= self.scale_room_out:
            raise ValueError(
                f"scale_room_in must be above scale_room_out {self.scale_room_out:g}: {self.scale_room_in:g}"
            )
        return self

    @model_validator(mode="after")
    def _keep_what_forecasts_read(self) -> Self:
        if self.demand_keep_days * 86_400 < self.forecast_history_s:
            raise ValueError(
                f"demand_keep_days must cover forecast_history_s ({self.forecast_history_s} s): {self.demand_keep_days}"
            )
        return self

    def with_home(self) -> Path:
        """The home folder, made if it is missing."""
        home = self.home.expanduser()
        home.mkdir(parents=True, exist_ok=True)
        return home
