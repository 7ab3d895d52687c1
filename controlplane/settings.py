"""One frozen, validated settings object per process. Every name can be set as `TIDEPOOL_<NAME>` in the environment."""

from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Settings of the control plane's processes. Limits and timeouts are here and nowhere else."""

    model_config = SettingsConfigDict(env_prefix="TIDEPOOL_", frozen=True, extra="ignore")

    database_url: SecretStr = Field(SecretStr("postgresql+psycopg://postgres@127.0.0.1:5432/tidepool"))
    redis_url: SecretStr = Field(SecretStr("redis://127.0.0.1:6379/0"))
    home: Path = Field(Path("~/.tidepool"), description="where uploaded files and keys.json live")
    region: str | None = Field(None, description="region this gateway stands in; default: the first by preference")
    node_key: SecretStr = Field(SecretStr(""), description="what we show to node agents")
    host: str = "127.0.0.1"
    port: int = Field(8080, ge=0, le=65535)

    database_pool_size: int = Field(10, ge=1, le=200)
    database_timeout_s: int = Field(10, ge=1, le=300, description="to connect, and for one statement")

    view_refresh_s: float = Field(0.25, gt=0, le=1)
    heartbeat_stale_s: float = Field(5.0, gt=1, description="a node silent for longer is unknown")
    key_cache_s: float = Field(5.0, ge=0)

    request_body_bytes_max: int = Field(4 * 2**20, ge=1024)
    file_bytes_max: int = Field(200 * 2**20, ge=1024, description="a batch input file")
    file_keep_days: int = Field(30, ge=1)
    batch_lines_max: int = Field(50_000, ge=1)
    request_attempts_max: int = Field(3, ge=1, description="instances tried before an interactive request fails")
    first_token_timeout_s: float = Field(60.0, gt=0)
    stream_idle_timeout_s: float = Field(60.0, gt=0)

    release_below_one: float = Field(0.6, gt=0, lt=1, description="utilization for 1 NIW request a signal")
    release_below_two: float = Field(0.5, gt=0, lt=1, description="... and 2")
    release_signal_s: float = Field(1.0, gt=0, description="an endpoint signals room at most this often")
    niw_age_priority_s: float = Field(10 * 3600.0, gt=0)
    niw_lease_s: int = Field(120, ge=5)
    niw_attempts_max: int = Field(5, ge=1)
    dispatcher_concurrency_max: int = Field(64, ge=1)

    route_utilization_max: float = Field(0.7, gt=0, lt=1)
    scale_out_above: float = Field(0.7, gt=0, lt=1)
    scale_in_below: float = Field(0.3, gt=0, lt=1)
    scale_cooldown_s: float = Field(15.0, ge=0)
    scale_strategy: str = Field("lt-i", pattern="^(lt-i|reactive)$")
    scale_every_s: float = Field(15.0, gt=0)
    expire_every_s: float = Field(30.0, gt=0)

    forecast_history_s: int = Field(7 * 86_400, ge=3600)
    demand_keep_days: int | None = Field(None, ge=8, description="forget older demand; none: keep all")
    forecast_quantile: float = Field(0.9, gt=0.5, lt=1)
    niw_demand_share: float = Field(0.1, ge=0, le=1, description="beta of SageServe 6.3")
    placement_epsilon: float = Field(0.8, ge=0, le=1, description="share of demand that must be served at home")
    placement_time_limit_s: float = Field(30.0, gt=0)
    placement_gap: float = Field(0.001, ge=0, lt=1)
    plan_automatic: bool = Field(True, description="apply the hourly plan without asking")

    def with_home(self) -> Path:
        """The home folder, made if it is missing."""
        home = self.home.expanduser()
        home.mkdir(parents=True, exist_ok=True)
        return home
