"""The tables of a scenario whose instances or slots come and go: nodes, scaling, planning, failures and so on."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from controlplane.policies.placement.facts import StartTimes
from controlplane.policies.placement.poolable import PoolableSettings
from controlplane.policies.placement.reserve_facts import ReserveSettings
from controlplane.policies.scaling.facts import ScalingSettings, StrategyName
from dataplane.protocol.layouts import check_layout
from forecasts.models.forecasters import FORECASTERS
from forecasts.settings import DEFAULT_FORECASTERS
from ops.simulator.kernel.scenario_values import Count, Part, Positive, Share

Strategy = Literal["lt-i", "lt-u", "lt-ua", "lt-d", "reactive", "siloed", "chiron", "oracle"]


class NodesPart(Part):
    """Nodes of a region, each with so many slots of so many GPUs, or with the slots of a `layout`, in the order of
    their GPUs, which plans may regroup (`planning.layouts`) unless `regroups` is false. They are called REGION-0,
    REGION-1 and so on. `profile` says of which GPU type they are, `kv_bytes` what each GPU has for KV, `weights_bytes`
    for weights where it is pooled; left out, they are the fleet's. `host_bytes`: host memory of each node for the
    models of its pools, needed where `planning.pools` is set.
    """

    region: str
    count: Count = 1
    slots: Count = 8
    gpus: Count = 1
    layout: tuple[Count, ...] | None = None
    regroups: bool = True
    profile: str | None = None
    kv_bytes: Count | None = None
    weights_bytes: Count | None = None
    host_bytes: Count | None = None

    @model_validator(mode="after")
    def _grouped(self) -> "NodesPart":
        if self.layout is None:
            return self
        if self.model_fields_set & {"slots", "gpus"}:
            raise ValueError("layout: says what slots and gpus say, which must be left out")
        try:
            check_layout(self.layout, sum(self.layout))
        except ValueError as error:
            raise ValueError(f"layout: {error}") from error
        return self


class RegroupPart(Part):
    """When the GPUs of nodes are regrouped: the policy is asked every `every_s` seconds with the demand of the last
    `window_s`. `fill`: share of a slot's GPUs that may be taken; `margin`, `hold_s`: see `LayoutSettings`. `start_s`:
    until the processes of new slots serve. `prompt_tokens`, `output_tokens`: means of a request.
    """

    every_s: Positive = 60.0
    window_s: Positive = 300.0
    fill: Annotated[Positive, Field(le=1)] = 0.8
    margin: Share = 0.1
    hold_s: Annotated[float, Field(ge=0)] = 1800.0
    start_s: Annotated[float, Field(ge=0)] = 15.0
    prompt_tokens: Positive = 512.0
    output_tokens: Positive = 256.0


class ScalingPart(Part):
    """How endpoints are scaled; see `ScalingSettings`. `oracle` is LT-I on plans that know the coming hour's demand.
    `instances_min`, `instances_max`: of each model in each region. `spot`: whether what is let go is kept as spot.
    """

    strategy: Strategy = "lt-i"
    instances_min: Annotated[int, Field(ge=0)] = 2
    instances_max: Count = 20
    every_s: Positive = 15.0
    out_above: Share = 0.7
    in_below: Share = 0.3
    cooldown_s: Share = 15.0
    beyond_at: Positive = 5.0
    below_at: Share = 0.5
    room_out: Positive = 1.1
    room_in: Positive = 1.4
    chiron_theta: Positive = 0.6
    spot: bool = True
    spot_max_age_s: Positive | None = 6 * 3600.0

    @model_validator(mode="after")
    def _sound(self) -> "ScalingPart":
        if self.instances_min > self.instances_max:
            raise ValueError(f"instances_min {self.instances_min} is above instances_max {self.instances_max}")
        self.settings()
        return self

    def settings(self) -> ScalingSettings:
        return ScalingSettings(
            strategy=StrategyName.LT_I if self.strategy == "oracle" else self.strategy,
            out_above=self.out_above,
            in_below=self.in_below,
            cooldown_s=self.cooldown_s,
            beyond_at=self.beyond_at,
            below_at=self.below_at,
            room_out=self.room_out,
            room_in=self.room_in,
            chiron_theta=self.chiron_theta,
        )


class PlanningPart(Part):
    """How each hour is planned. Requests of the first `learn_s` seconds are not served, only counted: forecasts learn
    from them. `quantile`: of the hour's peak. `origins_max`: past hours on which the first forecast tries itself; few
    make its upper quantile a guess. `niw_share`: beta of SageServe 6.3. `epsilon`: share served at home.
    `correct_profiles`: whether the models' `tokens_per_s` are corrected by what instances do, each hour.

    `pools`: whether endpoints may share GPUs where that is cheaper; a model larger than `fleet.weights_bytes` is left
    out. The keys after it, `pool_*`, are as in the service's settings: see `PoolableSettings`.

    `reserve`: whether the endpoints of a region share a reserve instead; see `ReserveSettings`.

    `layouts`: whether plans regroup nodes that have a layout, and keep each for `layout_hold_s`. `layout_patience_s`:
    how long a slot that goes keeps instances that have no place elsewhere.
    """

    learn_s: Annotated[float, Field(ge=0, multiple_of=60, allow_inf_nan=False)] = 0.0
    quantile: Annotated[float, Field(gt=0.5, lt=1)] = 0.9
    forecasters: Annotated[tuple[str, ...], Field(min_length=1)] = DEFAULT_FORECASTERS
    origins_max: Annotated[int, Field(ge=1, le=168)] = 12
    niw_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    epsilon: Annotated[float, Field(ge=0, le=1)] = 0.8
    correct_profiles: bool = False
    pools: bool = False
    pool_fill: Annotated[float, Field(gt=0, le=1)] = 0.8
    pool_prompt_tokens: Positive = 512.0
    pool_output_tokens: Positive = 256.0
    pool_tbt_s: Positive = 0.1
    pool_round_s: Positive = 12.0
    reserve: bool = False
    reserve_quantile: Annotated[float, Field(ge=0.5, lt=1)] = 0.9
    reserve_correlation: Annotated[float, Field(ge=0, le=1)] = 0.2
    layouts: bool = False
    layout_hold_s: Annotated[float, Field(ge=0)] = 5400.0
    layout_patience_s: Annotated[float, Field(ge=0)] = 120.0

    @property
    def shares_gpus(self) -> bool:
        """Whether plans let models share GPUs."""
        return self.pools or self.reserve

    def sharing(self) -> ReserveSettings:
        return ReserveSettings(
            enabled=self.reserve,
            quantile=self.reserve_quantile,
            upper_quantile=self.quantile,
            correlation=self.reserve_correlation,
            fill=self.pool_fill,
            epsilon=self.epsilon,
        )

    def poolable(self) -> PoolableSettings:
        return PoolableSettings(
            enabled=self.pools,
            fill=self.pool_fill,
            prompt_tokens=self.pool_prompt_tokens,
            output_tokens=self.pool_output_tokens,
            tbt_s=self.pool_tbt_s,
            round_s=self.pool_round_s,
        )

    @model_validator(mode="after")
    def _known(self) -> "PlanningPart":
        for name in self.forecasters:
            if name not in FORECASTERS:
                raise ValueError(f"forecasters: {name!r} is none of {', '.join(FORECASTERS)}")
        return self


class ProvisioningPart(Part):
    """Seconds until an instance serves: from spot of the same model, or pooled on a node that has it loaded; in the
    place of another model's spot; with the weights in the region; and without. `weights`: regions that hold a model's
    from the beginning; not named: all.

    The first is drawn, `spot_same_s` being the median, `spot_same_spread` the deviation of its logarithm (0: always the
    median), and `spot_same_most_s` its limit; plans count the median.
    """

    spot_same_s: Share = 60.0
    spot_same_spread: Annotated[float, Field(ge=0, le=3)] = 0.5
    spot_same_most_s: Share = 300.0
    spot_other_s: Share = 600.0
    local_s: Share = 600.0
    remote_s: Share = 7200.0
    weights: dict[str, list[str]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _cut_above_the_median(self) -> "ProvisioningPart":
        if self.spot_same_s > self.spot_same_most_s:
            raise ValueError(f"spot_same_s {self.spot_same_s:g} is above spot_same_most_s {self.spot_same_most_s:g}")
        return self

    def times(self) -> StartTimes:
        return StartTimes(
            local_s=self.local_s,
            remote_s=self.remote_s,
            donated_same_s=self.spot_same_s,
            donated_other_s=self.spot_other_s,
        )


class FailurePart(Part):
    """Nodes of a region that fail for `down_s` seconds: `node` alone or all of them, at a moment or at a rate each.

    What such a node holds is gone; it is missed after `noticed_s` seconds.
    """

    region: str
    node: Annotated[int, Field(ge=0)] | None = None
    at_s: Share | None = None
    rate_per_day: Positive | None = None
    down_s: Positive
    noticed_s: Share = 80.0

    @model_validator(mode="after")
    def _one_of(self) -> "FailurePart":
        if (self.at_s is None) == (self.rate_per_day is None):
            raise ValueError("exactly one of at_s and rate_per_day is needed")
        return self
