"""One frozen, validated settings object per process. Every name can be set as `TIDEPOOL_<NAME>` in the environment."""

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from controlplane.database_address import psycopg_url
from dataplane.protocol.tiers import OBJECTIVE_TBT_MAX_S, OBJECTIVE_TTFT_MAX_S
from dataplane.protocol.tls import check_tls_files

_REDIS_HERE = SecretStr("redis://127.0.0.1:6379/0")
_REDIS_FORM = "must be redis://[USER:PASSWORD@]HOST[:PORT][/DATABASE], or rediss:// for TLS"


def _redis_address(url: SecretStr) -> SecretStr:
    """The address, which both Redis' own client and Celery's take; an empty one is the default. The message of the
    error holds nothing of it.
    """
    import redis  # noqa: PLC0415  (the agent reads settings without it: it belongs to an extra)

    text = url.get_secret_value()
    if not text:
        return _REDIS_HERE
    if not text.startswith(("redis://", "rediss://")):
        raise ValueError(_REDIS_FORM)
    try:
        redis.Redis.from_url(text).close()
    except ValueError:
        raise ValueError(_REDIS_FORM) from None
    return url


class Settings(BaseSettings):
    """Settings of the control plane's processes. Limits and timeouts are here and nowhere else."""

    model_config = SettingsConfigDict(
        env_prefix="TIDEPOOL_", frozen=True, extra="ignore", use_attribute_docstrings=True, hide_input_in_errors=True
    )

    database_url: Annotated[SecretStr, AfterValidator(lambda url: SecretStr(psycopg_url(url.get_secret_value())))] = (
        SecretStr("postgresql+psycopg://postgres@127.0.0.1:5432/tidepool")
    )
    """address of Postgres in libpq's form; of several hosts (A:5432,B:5432) the one that takes writes is used"""
    database_replica_url: Annotated[
        SecretStr | None, AfterValidator(lambda url: url and SecretStr(psycopg_url(url.get_secret_value())))
    ] = None
    """address of the region's own standby of Postgres, from which keys, models and endpoints are read; unset: none"""
    redis_url: Annotated[SecretStr, AfterValidator(_redis_address)] = _REDIS_HERE
    """address of Redis or Valkey"""
    home: Path = Path("~/.tidepool")
    """folder for uploaded files, logs and keys.json"""
    files_url: str | None = Field(None, pattern=r"^s3://[^/?#]+(/[^?#]*)?$")
    """bucket for uploaded files, s3://BUCKET[/PREFIX]; unset: the folder `files` of `home`"""
    files_copy_url: str | None = Field(None, pattern=r"^(s3://[^/?#]+(/[^?#]*)?|file:///[^?#]+)$")
    """second store for uploaded files, of another region: s3://BUCKET[/PREFIX], or file:///FOLDER; unset: none"""
    files_copy_endpoint: str | None = Field(None, pattern=r"^https?://[^?#]+$")
    """address of the S3 server of `files_copy_url`; unset: AWS_ENDPOINT_URL"""
    files_copy_region: str | None = None
    """region of the bucket of `files_copy_url`; unset: AWS_REGION"""
    files_copy_at_once: bool = True
    """a file is accepted when the second store has it too; false: it is copied there later, by `sweep`"""
    region: str | None = None
    """region that this gateway runs in; unset: the first region in order of preference"""
    node_key: SecretStr = SecretStr("")
    """key that gateways and dispatchers present to node agents"""
    host: str = "127.0.0.1"
    """address that a gateway listens on; 0.0.0.0 for all interfaces"""
    port: int = Field(8080, ge=0, le=65535)
    """port that a gateway listens on; 0 for a free one"""
    api_processes: int = Field(1, ge=1, le=64)
    """processes of one gateway, which share its port; other limits of a gateway hold for each of them"""
    api_process_silence_max_s: float = Field(30.0, ge=4)
    """limit for one of several processes of a gateway to answer its parent, which then kills it and starts another"""
    tls_cert_file: Path | None = None
    """certificate chain of a gateway, PEM; unset: plain HTTP"""
    tls_key_file: Path | None = None
    """private key of `tls_cert_file`, PEM"""
    tls_ca_file: Path | None = None
    """authorities that node certificates are verified against, PEM; unset: the system's"""
    cors_origins: str = Field("", max_length=4096)
    """origins of web pages that may call the API, separated by commas; *: any"""

    console_url: str | None = Field(None, max_length=1024, pattern=r"^https?://[A-Za-z0-9.:\[\]-]+(/[^?#\s]*)?$")
    """address of the API as browsers of the console reach it; unset: the one that each request names"""
    console_idle_s: int = Field(3600, ge=60)
    """a console session ends after this long in which the person did nothing"""
    console_session_s: int = Field(12 * 3600, ge=60)
    """a console session ends after this long"""
    console_sign_ins_per_minute: int = Field(20, ge=1)
    """attempts per minute to sign in to the console from one address"""
    console_sign_ins_all_per_minute: int = Field(600, ge=1)
    """attempts per minute to sign in to the console from all addresses"""
    oidc_issuer: str | None = Field(None, max_length=1024, pattern=r"^https?://[^?#\s]+$")
    """OpenID provider at which people sign in to the console; unset: they need keys or links"""
    oidc_client_id: str = ""
    """what the OpenID provider calls the console"""
    oidc_client_secret: SecretStr = SecretStr("")
    """secret of `oidc_client_id`; unset: it is a public client"""
    oidc_name: str = Field("single sign-on", min_length=1, max_length=60)
    """what the sign-in page calls the OpenID provider"""
    oidc_scopes: str = "openid profile email"
    """what the OpenID provider is asked for, separated by spaces"""
    oidc_role_claim: str = Field("groups", min_length=1)
    """claim of the ID token with a person's groups; dots lead into objects"""
    oidc_roles: dict[Literal["viewer", "operator", "admin"], list[str]] = {}
    """groups of each role, such as {"admin": ["sre"], "viewer": ["staff"]}; who is in none may not sign in"""
    oidc_name_claim: str = Field("preferred_username", min_length=1)
    """claim of the ID token that names a person in the audit; where it is absent, the subject does"""
    oidc_tenant: str = Field("default", pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")
    """tenant of the people who sign in at the OpenID provider"""

    database_pool_size: int = Field(10, ge=1, le=200)
    """Postgres connections that one process keeps open at most"""
    database_timeout_s: int = Field(10, ge=1, le=300)
    """limit for connecting to Postgres, and for one statement"""

    node_connections_max: int = Field(2000, ge=1, le=60_000)
    """connections to nodes that a gateway or dispatcher may have open; each request takes one"""
    view_refresh_s: float = Field(0.25, gt=0, le=1)
    """interval at which a process reads the live state of instances from Redis"""
    sent_share_every_s: float = Field(0.03, ge=0, le=1)
    """interval at which a gateway or dispatcher that sends requests tells the others to which instances, and hears what
    they send; 0: never, so that they know of each other's requests by the nodes' reports alone
    """
    node_replace_s: float = Field(20.0, gt=0)
    """after this long without a heartbeat a node's instances are started elsewhere, if there is capacity"""
    regroup_patience_s: float = Field(120.0, ge=0)
    """how long slots that are to be regrouped keep instances that have no place elsewhere, before these are drained"""
    heartbeat_stale_s: float = Field(5.0, gt=1)
    """after this long without a heartbeat a node's state is unknown and it receives no requests"""
    key_cache_s: float = Field(5.0, ge=0)
    """how long a verified API key is accepted without asking Postgres again"""
    key_wait_s: float = Field(1.0, gt=0)
    """how long a request waits for Postgres to verify a key before the last known answer is used"""
    replica_lag_max_s: float = Field(5.0, ge=2)
    """a standby that may be further behind is read only while no primary answers"""
    key_revocation_max_age_s: float = Field(6 * 3600.0, ge=1)
    """while no primary answers, keys of a standby that may be further behind are refused; the longest that a region
    which is cut off accepts a key that was revoked elsewhere"""
    node_keys_unbound: bool = False
    """accept node keys that are bound to no node; for a stack on one machine"""

    tenant_requests_per_minute: int | None = Field(None, ge=1)
    """requests per minute of a tenant without a limit of its own; unset: unlimited"""
    tenant_tokens_per_minute: int | None = Field(None, ge=1)
    """tokens per minute of a tenant without a limit of its own; unset: unlimited"""
    tenant_concurrent_max: int | None = Field(None, ge=1)
    """concurrent requests of a tenant without a limit of its own; unset: unlimited"""
    tenant_queued_batch_tokens_max: int | None = Field(None, ge=0)
    """queued batch tokens of a tenant without a limit of its own; unset: unlimited"""
    tenant_tokens_per_day: int | None = Field(None, ge=1)
    """tokens that a tenant without limits of its own may use in a day (UTC); unset: unlimited"""
    tenant_tokens_per_month: int | None = Field(None, ge=1)
    """tokens that a tenant without limits of its own may use in a month (UTC); unset: unlimited"""
    tenant_tokens_total: int | None = Field(None, ge=1)
    """tokens that a tenant without limits of its own may ever use; unset: unlimited"""
    limit_shares: bool = False
    """each region has a Redis of its own, so that tenants' limits are divided between regions; needs region"""
    limit_share_lease_s: float = Field(600.0, ge=180)
    """how long a region that cannot reach Postgres keeps its shares of limits; then only their guaranteed part"""
    limit_share_every_s: float = Field(5.0, ge=1, le=30)
    """how often a region asks for its shares of limits"""
    limit_lease_s: float = Field(30.0, ge=1)
    """after this long the requests of a gateway that was killed no longer count against limits"""
    limit_timeout_s: float = Field(0.5, gt=0)
    """how long Redis may take to count before a gateway counts limits by itself"""

    header_bytes_max: int = Field(32 * 2**10, ge=1024)
    """size of a request's line and headers"""
    header_count_max: int = Field(100, ge=10)
    """headers of a request"""
    header_timeout_s: float = Field(10.0, gt=0)
    """limit for a request's line and headers to arrive"""
    body_idle_timeout_s: float = Field(30.0, gt=0)
    """limit between two pieces of a request's body"""
    body_timeout_s: float = Field(900.0, gt=0)
    """limit for an uploaded file to arrive"""
    request_body_timeout_s: float = Field(120.0, gt=0)
    """limit for any other request's body to arrive"""
    client_idle_timeout_s: float = Field(30.0, gt=0)
    """a client that reads nothing for this long is disconnected"""
    request_body_bytes_max: int = Field(4 * 2**20, ge=1024)
    """size of a request's body, and of one line of a batch input file"""
    file_bytes_max: int = Field(200 * 2**20, ge=1024)
    """size of a batch input file"""
    file_keep_days: int = Field(30, ge=1)
    """uploaded files and batch results are deleted after this long"""
    response_keep_days: int = Field(30, ge=1)
    """stored responses are deleted after this long"""
    background_responses_max: int = Field(1000, ge=0)
    """responses that one gateway runs in the background"""
    conversation_responses_max: int = Field(500, ge=1)
    """stored responses that may precede a response (`previous_response_id`)"""
    conversation_bytes_max: int = Field(8 * 2**20, ge=1024)
    """size of the stored responses that precede a response"""
    batch_lines_max: int = Field(50_000, ge=1)
    """requests in one batch"""
    batch_attempts_max: int = Field(10, ge=1)
    """attempts to validate or to finalize a batch before it fails"""
    request_attempts_max: int = Field(3, ge=1)
    """instances tried before an interactive request fails"""
    request_start_wait_s: float = Field(15.0, ge=0)
    """how long an interactive request waits for an instance of its model that is starting"""
    first_token_timeout_s: float = Field(60.0, gt=0)
    """limit for an instance to send the first token; then another instance is tried"""
    stream_idle_timeout_s: float = Field(60.0, gt=0)
    """limit between two tokens; then the stream is continued on another instance"""
    prefix_cache_shared: bool = False
    """let tenants share cached prefixes; then the time to the first token tells what others asked"""
    prefix_index_keys_max: int = Field(100_000, ge=1000)
    """pieces of prompts of which a process knows which instances have cached them; about 0.5 kB each"""
    reroute_wait_s: float = Field(1.0, ge=0)
    """requests leave instances where a new one would wait longer for those that are idle (0: none does)"""
    circuit_open_max_s: float = Field(60.0, ge=1)
    """longest time that a failing instance receives no requests (circuit breaker)"""
    stream_continuations_max: int = Field(5, ge=0)
    """instances that may continue one broken stream"""
    stream_continue_wait_s: float = Field(30.0, ge=0)
    """how long a broken stream waits for an instance that can continue it"""

    request_log: Literal["all", "errors", "off"] = "all"
    """interactive requests that are logged; errors: those that failed or were slow"""
    request_log_lines: Literal["all", "errors", "off"] = "errors"
    """logged requests that are also written to the process log; a line costs as much as the row"""
    request_log_sample: float = Field(1.0, ge=0, le=1)
    """share of the requests without errors that is logged"""
    request_log_slow_s: float = Field(10.0, ge=0)
    """a request whose first token takes longer is slow"""
    request_log_keep_s: float = Field(86_400.0, ge=60)
    """how long `tidepool request show` finds a request"""
    request_log_waiting_max: int = Field(10_000, ge=1)
    """log records that a gateway buffers while Postgres is unavailable; older ones are dropped"""
    trace_url: str | None = Field(None, max_length=2000, pattern=r"^https?://[^\s{}]*\{trace_id\}[^\s{}]*$")
    """address at which the console links the trace of a request, with {trace_id} in it; unset: no link"""

    release_below_one: float = Field(0.6, gt=0, lt=1)
    """KV utilization up to which instances are filled with batch requests; an endpoint below it takes one at least"""
    release_below_two: float = Field(0.5, gt=0, lt=1)
    """utilization below which an endpoint takes two batch requests at least"""
    release_signal_s: float = Field(1.0, gt=0)
    """beside interactive requests, an endpoint below these takes one or two batch requests in each such interval"""
    release_queue_share: float = Field(0.25, ge=0, le=4)
    """batch requests that may wait at an instance, as a share of the sequences that it runs at once"""
    release_tokens_guess: float = Field(2048, gt=0)
    """tokens that a batch request is expected to take in KV memory until the first of its batch have ended"""
    release_growth: float = Field(32.0, gt=0)
    """batch requests a second by which those in flight at an endpoint grow, for each of its instances"""
    release_growth_after_cut: float = Field(2.0, gt=0)
    """the same while the last sign of trouble is recent"""
    release_calm_s: float = Field(60.0, ge=0)
    """how long a sign of trouble is recent"""
    release_cut: float = Field(0.5, ge=0, lt=1)
    """factor that cuts the batch requests in flight at an endpoint at a sign of trouble"""
    release_hold_s: float = Field(2.0, ge=0)
    """how long an endpoint receives no batch requests after a cut"""
    release_late_share: float = Field(0.5, gt=0)
    """an interactive request that would wait longer than this share of its TTFT objective is a sign of trouble"""
    release_beside_share: float = Field(0.05, gt=0)
    """share of an instance's time for prefills of batch requests beside interactive ones; above 1, there is no limit"""
    release_load_max: float = Field(1.0, gt=0)
    """a higher load of a node's busiest worker group is a sign of trouble"""
    release_rise_max: float = Field(0.1, gt=0, lt=1)
    """a faster rise of an endpoint's utilization by other requests between two reports is a sign of trouble"""
    release_turn_s: float = Field(30.0, gt=0)
    """interval for which one model of a shared GPU pool receives batch requests, in rotation"""
    niw_age_priority_s: float = Field(10 * 3600.0, gt=0)
    """batch requests older than this are treated as interactive"""
    niw_left_priority: float = Field(0.25, gt=0, lt=1)
    """batch requests with less than this share of their completion window left are treated as interactive"""
    niw_lease_s: int = Field(120, ge=5)
    """lease of a batch request that a dispatcher has claimed"""
    niw_attempts_max: int = Field(5, ge=1)
    """claims of a batch request in which a node may have run it, or a dispatcher died, before it fails"""
    dispatcher_concurrency_max: int = Field(1500, ge=1)
    """batch requests that one dispatcher has in flight"""

    slo_iw_f_ttft_s: float = Field(1.0, gt=0, le=OBJECTIVE_TTFT_MAX_S)
    """time to first token of tier IW-F, for models without objectives of their own"""
    slo_iw_f_tbt_s: float = Field(0.1, gt=0, le=OBJECTIVE_TBT_MAX_S)
    """time between tokens of tier IW-F, for models without objectives of their own"""
    slo_iw_n_ttft_s: float = Field(60.0, gt=0, le=OBJECTIVE_TTFT_MAX_S)
    """time to first token of tier IW-N, for models without objectives of their own"""
    slo_iw_n_tbt_s: float = Field(0.1, gt=0, le=OBJECTIVE_TBT_MAX_S)
    """time between tokens of tier IW-N, for models without objectives of their own"""
    admission_iw_f_margin: float = Field(1.2, gt=0)
    """IW-F requests are refused if their expected wait exceeds this times their TTFT objective"""
    admission_iw_n_margin: float = Field(0.8, gt=0)
    """IW-N requests are refused if their expected wait exceeds this times their TTFT objective"""
    flex_wait_s: float = Field(60.0, ge=0)
    """how long a flex request waits for capacity before it is refused"""
    flex_waiting_max: int = Field(1000, ge=0)
    """flex requests that may wait in one gateway"""

    route_utilization_max: float = Field(0.7, gt=0, lt=1)
    """effective memory utilization above which the next preferred region is tried"""
    route_timely_share: float = Field(0.5, gt=0, le=1)
    """share of the TTFT objective within which an instance must make the first token to go before others"""
    scale_out_above: float = Field(0.7, gt=0, lt=1)
    """utilization above which an endpoint gets another instance"""
    scale_in_below: float = Field(0.3, gt=0, lt=1)
    """utilization below which an endpoint gives up an instance"""
    scale_cooldown_s: float = Field(15.0, ge=0)
    """shortest interval between two changes of an endpoint's instance count"""
    scale_strategy: str = Field("lt-i", pattern="^(lt-i|lt-u|lt-ua|lt-d|reactive|siloed|chiron)$")
    """policy that chooses the instance counts of endpoints"""
    scale_room_out: float = Field(1.1, ge=1)
    """strategy lt-d: scale out to capacity for this times the arriving load"""
    scale_room_in: float = Field(1.4, gt=1)
    """strategy lt-d: scale in above capacity for this times the load; must exceed `scale_room_out`"""
    scale_start_patience_s: float = Field(900.0, gt=0)
    """an instance that is not ready after this long is replaced"""
    scale_failed_patience_s: float = Field(10.0, ge=0)
    """a failed instance is replaced after this long; its worker may recover before"""
    scale_retry_s: float = Field(600.0, gt=0)
    """an instance is replaced again after this long if its replacement failed too"""
    instance_keep_days: int = Field(7, ge=1)
    """stopped instances and ended leases are deleted after this long"""
    spot_enabled: bool = True
    """lend out instances that are scaled in as spot instances instead of stopping them"""
    spot_max_age_s: float | None = Field(6 * 3600.0, gt=0)
    """a spot instance that is not leased is stopped after this long; unset: never"""
    spot_notice_s: float = Field(30.0, ge=0, le=45)
    """notice before a spot lease ends because its GPUs are needed"""
    spot_lease_min_s: float = Field(60.0, gt=0)
    """shortest lease of a spot instance"""
    spot_lease_max_s: float = Field(86_400.0, gt=0)
    """longest lease of a spot instance"""
    engine_retry_s: float = Field(600.0, gt=0)
    """an engine on which a model failed is tried again for it after this long"""
    engine_retry_max_s: float = Field(86_400.0, gt=0)
    """longest such delay; it doubles with each failure"""
    scale_every_s: float = Field(15.0, gt=0)
    """interval of the scaling loop"""
    predict_every_s: float = Field(15.0, gt=0)
    """interval of the loop that predicts when batches will end"""
    rollout_every_s: float = Field(5.0, gt=0)
    """interval of the loop that moves roll-outs on"""
    expire_every_s: float = Field(30.0, gt=0)
    """interval of the loop that expires leases, lost nodes and retained data"""
    pulse_every_s: float = Field(15.0, gt=0)
    """interval at which workers, beat and dispatchers record that they are alive"""

    forecast_history_s: int = Field(7 * 86_400, ge=3600)
    """demand history that forecasts read"""
    demand_keep_days: int = Field(90, ge=8, le=36_500)
    """demand is deleted after this long, imported demand counted from its import; covers `forecast_history_s`"""
    forecast_keep_days: int = Field(90, ge=8)
    """forecasts are deleted after this long"""
    forecast_origins_max: int = Field(12, ge=1, le=168)
    """past hours that are replayed for a series without earlier forecasts"""
    forecast_quantile: float = Field(0.9, gt=0.5, lt=1)
    """quantile of the peak demand that plans provide capacity for"""
    niw_demand_share: float = Field(0.1, ge=0, le=1)
    """share of the last hour's batch demand that is added to the interactive forecast (beta of SageServe 6.3)"""
    placement_epsilon: float = Field(0.8, ge=0, le=1)
    """share of a region's demand that must be served in that region"""
    placement_time_limit_s: float = Field(30.0, gt=0)
    """time limit of a placement; the exact integer program takes at most half of it, and does work in proportion"""
    placement_gap: float = Field(0.001, ge=0, lt=1)
    """relative optimality gap at which the integer program stops"""
    pools_enabled: bool = True
    """let plans put endpoints whose latency and host memory are known into shared GPU pools"""
    pool_fill: float = Field(0.8, gt=0, le=1)
    """share of a shared pool's GPUs that a plan may fill"""
    pool_prompt_tokens: float = Field(512.0, gt=0)
    """mean prompt length of a pooled model before it is measured"""
    pool_output_tokens: float = Field(256.0, gt=0)
    """mean output length of a pooled model before it is measured"""
    pool_tbt_s: float = Field(0.1, gt=0)
    """objective for the time between tokens in a shared pool"""
    pool_round_s: float = Field(12.0, gt=0)
    """interval at which a busy model of a shared pool is scheduled again"""
    profile_correction: bool = True
    """correct the profiles' tokens/s by what instances do; false: they count as stated"""
    profile_correction_max: float = Field(2.0, ge=1, le=10)
    """a corrected profile is at most so many times what is stated, and at least that part of it"""
    plan_reserve: bool = False
    """let the models of a region that are not pooled share a reserve instead of an upper quantile and a minimum each"""
    plan_reserve_quantile: float = Field(0.9, ge=0.5, lt=1)
    """quantile of the demand beyond own instances, of all models together, that a shared reserve provides for"""
    plan_reserve_correlation: float = Field(0.2, ge=0, le=1)
    """correlation of the errors of different endpoints' forecasts, where past ones say nothing; counts as 48 hours"""
    plan_layouts: bool = False
    """let plans group the GPUs of nodes into the slots that they need, where an agent regroups and no operator chose"""
    plan_layout_hold_s: float = Field(5400.0, ge=0)
    """how long a node keeps the slots that were chosen for it before a plan may choose others"""
    plan_approval: str = Field("automatic", pattern="^(automatic|limits|always)$")
    """automatic: hourly plans apply by themselves; limits: unless they exceed a limit below; always: approve each"""
    plan_gpus_moved_max: int | None = Field(None, ge=0)
    """GPUs whose contents a plan may change without approval; unset: no such limit"""
    plan_share_moved_max: float | None = Field(0.25, ge=0, le=1)
    """share of the fleet's GPUs whose contents a plan may change without approval; unset: no such limit"""
    plan_cost_change_max: float | None = Field(None, ge=0)
    """change of the hourly cost, up or down, that a plan may make without approval; unset: no such limit"""
    plan_forecasts_s: float = Field(120.0, gt=0)
    """time that a plan may spend on computing overdue forecasts itself"""
    plan_forecasts_max: int = Field(50, ge=0)
    """overdue series that a plan forecasts itself, the busiest first"""
    forecast_task_series_max: int = Field(50, ge=1)
    """series that one forecast task processes, one after another"""
    event_keep_days: int = Field(14, ge=1)
    """events of instances, nodes and plans are deleted after this long"""
    usage_keep_days: int = Field(400, ge=2)
    """usage records of tenants are deleted after this long"""
    plan_keep_days: int = Field(90, ge=2)
    """plans that have ended are deleted after this long"""
    pin_days_max: int = Field(90, ge=1, le=3650)
    """longest duration of a pinned instance count"""

    what_if_running_max: int = Field(1, ge=0, le=16)
    """what-if runs (simulations) at once, each in a process of a forecaster; 0: none is begun"""
    what_if_queued_max: int = Field(20, ge=1)
    """what-if runs that may wait"""
    what_if_time_max_s: int = Field(1800, ge=10, le=86_400)
    """a what-if run that takes longer fails"""
    what_if_memory_bytes_max: int = Field(4 * 2**30, ge=2**30)
    """address space of a what-if run; one that needs more fails"""
    what_if_demand_minutes_max: int = Field(5_000_000, ge=1000)
    """minutes of demand of all endpoints that a what-if run may replay; what it leaves is what forecasts learn from"""
    what_if_keep_days: int = Field(30, ge=1)
    """what-if runs are deleted after this long"""

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
    def _knows_the_provider(self) -> Self:
        if self.oidc_issuer is None:
            return self
        if not re.match(r"https://|http://(localhost|127\.0\.0\.1|\[::1\])[:/]", self.oidc_issuer + "/"):
            raise ValueError(f"oidc_issuer must be https: {self.oidc_issuer}")
        if not self.oidc_client_id:
            raise ValueError("oidc_issuer needs oidc_client_id")
        if not any(self.oidc_roles.values()):
            raise ValueError("oidc_issuer needs oidc_roles: without a group that has a role nobody could sign in")
        if "openid" not in self.oidc_scopes.split():
            raise ValueError("oidc_scopes must contain openid")
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
    def _shares_are_a_regions(self) -> Self:
        if self.limit_shares and self.region is None:
            raise ValueError("limit_shares needs region: a share of a limit is a region's")
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
