"""The settings of the running service that a scenario has keys for."""

from collections.abc import Mapping
from typing import Any

SETTINGS: Mapping[str, str] = {
    "targets.IW-F.ttft_s": "slo_iw_f_ttft_s",
    "targets.IW-F.tbt_s": "slo_iw_f_tbt_s",
    "targets.IW-N.ttft_s": "slo_iw_n_ttft_s",
    "targets.IW-N.tbt_s": "slo_iw_n_tbt_s",
    "policy.region_utilization_max": "route_utilization_max",
    "policy.timely_share": "route_timely_share",
    "scaling.strategy": "scale_strategy",
    "scaling.every_s": "scale_every_s",
    "scaling.out_above": "scale_out_above",
    "scaling.in_below": "scale_in_below",
    "scaling.cooldown_s": "scale_cooldown_s",
    "scaling.room_out": "scale_room_out",
    "scaling.room_in": "scale_room_in",
    "scaling.spot": "spot_enabled",
    "scaling.spot_max_age_s": "spot_max_age_s",
    "planning.quantile": "forecast_quantile",
    "planning.origins_max": "forecast_origins_max",
    "planning.niw_share": "niw_demand_share",
    "planning.epsilon": "placement_epsilon",
    "planning.correct_profiles": "profile_correction",
    "planning.layouts": "plan_layouts",
    "planning.layout_hold_s": "plan_layout_hold_s",
    "planning.layout_patience_s": "regroup_patience_s",
}
"""The name of the setting for each key. Pools and reserves are as in the plan in force, not as set."""


def add_settings(document: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Set the keys of a scenario to what the service has. Settings that are unset or not known leave their keys."""
    for key, name in SETTINGS.items():
        if settings.get(name) is None:
            continue
        *tables, last = key.split(".")
        table = document
        for each in tables:
            table = table.setdefault(each, {})
        table[last] = settings[name]
