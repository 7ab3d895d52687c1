"""From forecasts to what a plan is made for, and to what scaling compares with what arrives (SageServe 6.3, 6.4)."""

from collections.abc import Mapping, Sequence

from controlplane.policies.facts import Backlog, Endpoint

HOUR_S = 3600


def serving_model(model: str, bases: Mapping[str, str]) -> str:
    """The model whose instances serve requests for a model, so that its demand counts there. `bases`: of the LoRA
    adapters that the instances of their bases serve.
    """
    return bases.get(model, model)


def serving_backlogs(backlogs: Mapping[str, Backlog], bases: Mapping[str, str]) -> dict[str, Backlog]:
    """Backlogs by the model whose instances work them off: those of adapters add to their bases'."""
    found: dict[str, Backlog] = {}
    for model, backlog in backlogs.items():
        serving = serving_model(model, bases)
        other = found.get(serving)
        found[serving] = (
            backlog
            if other is None
            else Backlog(
                tokens=other.tokens + backlog.tokens,
                due_s=min(other.due_s, backlog.due_s),
                at_least=other.at_least or backlog.at_least,
            )
        )
    return found


def demand_to_plan(
    paths: Mapping[Endpoint, tuple[float, ...]], deferred: Mapping[Endpoint, float], *, niw_share: float
) -> dict[Endpoint, tuple[float, ...]]:
    """Input tokens/s that a plan counts on, for each window of the coming hour: the forecast, and beta of NIW (6.3).

    Args:
        paths: upper forecasts by window; a single value holds throughout.
        deferred: tokens/s of deferred requests in the past hour.
        niw_share: beta.
    """
    windows = max((len(path) for path in paths.values()), default=1)
    demand = {endpoint: path if len(path) == windows else path * windows for endpoint, path in paths.items()}
    for endpoint, tokens_per_s in deferred.items():
        path = demand.get(endpoint, (0.0,) * windows)
        demand[endpoint] = tuple(value + niw_share * tokens_per_s for value in path)
    return demand


def forecast_at(upper_path: Sequence[float], *, peak_q50: float, peak_upper: float, late_s: float) -> float | None:
    """The median forecast `late_s` seconds after its origin: the upper path has the same shape. One made shortly before
    an hour holds for all of it; None: too old, or of nothing.
    """
    if not upper_path or not 0 <= late_s < 2 * HOUR_S or peak_upper <= 0:
        return None
    width_s = HOUR_S / len(upper_path)
    return float(upper_path[min(len(upper_path) - 1, int(late_s / width_s))]) * peak_q50 / peak_upper
