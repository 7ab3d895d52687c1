"""Settings that all forecasters share."""

from dataclasses import dataclass, field

DEFAULT_FORECASTERS = (
    "last hour's maximum",
    "same hour yesterday",
    "typical day's shape",
    "regression on recent hours",
    "regression on past days",
    "ARIMA",
    "Fourier + ARIMA",
    "Theta",
    "two parts",
)


@dataclass(frozen=True, kw_only=True)
class ArimaSettings:
    """Bounds of the fit. `exact_fits_max`: orders fitted by maximum likelihood; the others are ranked only."""

    p_max: int = 3
    d_max: int = 1
    q_max: int = 2
    history_s: float = 3 * 86_400.0
    exact_fits_max: int = 2
    iterations_max: int = 25


@dataclass(frozen=True, kw_only=True)
class ForecastSettings:
    """Settings of forecasts. The journal explains the choice of the defaults, which hold for all series.

    Attributes:
        quantile: of the coming hour's peak, for `peak_upper`.
        bucket_s: windows of this length are forecast.
        horizon_s: how far ahead; also the distance of past origins.
        history_min_s: with less known demand only forecasters without a fit run.
        forecasters: names of those to run, see `forecasts.models.forecasters.FORECASTERS`.
        origins_max: past origins to replay without a stored state.
        memory: number of past origins to keep.
        half_life: origins after which an error has half its weight in the long memory.
        refit_s: age at which parameters are estimated again, starting from the old ones.
        reselect_s: age at which orders are chosen again.
        ratios_min: past errors needed to combine and to calibrate; with fewer, `headroom` is the upper ratio.
        clip_ratio: no forecast above this times the maximum of the last `clip_history_s`.
    """

    quantile: float = 0.9
    bucket_s: float = 300.0
    horizon_s: float = 3600.0
    history_min_s: float = 4 * 3600.0
    forecasters: tuple[str, ...] = DEFAULT_FORECASTERS
    origins_max: int = 24
    memory: int = 168
    half_life: float = 48.0
    refit_s: float = 86_400.0
    reselect_s: float = 7 * 86_400.0
    ratios_min: int = 5
    headroom: float = 1.5
    clip_ratio: float = 3.0
    clip_history_s: float = 2 * 86_400.0
    arima: ArimaSettings = field(default_factory=ArimaSettings)

    def __post_init__(self) -> None:
        """Raises ValueError if a field is out of range."""
        if not 0.5 < self.quantile < 1:
            raise ValueError(f"quantile must be above 0.5 and below 1, got {self.quantile}")
        if self.horizon_s < self.bucket_s:
            raise ValueError(f"horizon_s {self.horizon_s} must be at least bucket_s {self.bucket_s}")
        if self.history_min_s < 2 * self.horizon_s:
            raise ValueError(f"history_min_s {self.history_min_s} must be at least twice horizon_s {self.horizon_s}")
        if self.origins_max < 0 or self.memory < self.origins_max:
            raise ValueError(f"origins_max {self.origins_max} must be 0 to memory {self.memory}")
        if self.headroom < 1 or self.clip_ratio < 1:
            raise ValueError(f"headroom {self.headroom} and clip_ratio {self.clip_ratio} must be at least 1")
        if not self.half_life > 0:
            raise ValueError(f"half_life must be positive, got {self.half_life}")

    @property
    def windows(self) -> int:
        return round(self.horizon_s / self.bucket_s)
