"""Percentiles by the nearest rank."""

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that at least `share` (above 0, up to 1) of the values do not exceed: the nearest rank.

    Infinity may stand for an event that never happened.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("a percentile of no values")
    return sorted(values)[math.ceil(share * len(values)) - 1]
