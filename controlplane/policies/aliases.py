"""Which model a request for an alias gets: rendezvous hashing by weight.

A key always gets the same model while the weights are the same, and a weight that rises takes keys from other models
only, so that a conversation changes its model at most once in the course of a roll-out.
"""

import hashlib
import math
from collections.abc import Collection, Mapping

_HASHES = 2**64


def choose_model(weights: Mapping[str, int], key: bytes, *, absent: Collection[str] = ()) -> str:
    """The model for a key. Over many keys each model gets its weight's share of the sum. `absent`: models that nothing
    runs of; they get requests only where all models with a weight are absent.

    Raises:
        ValueError: no weight is above zero.
    """
    positive = {model: weight for model, weight in weights.items() if weight > 0}
    if not positive:
        raise ValueError("an alias needs a model whose weight is above zero")
    present = {model: weight for model, weight in positive.items() if model not in absent}
    candidates = present or positive
    if len(candidates) == 1:
        return next(iter(candidates))
    # The smallest of independent exponential variables with these rates falls on each model by its rate's share.
    return min(sorted(candidates), key=lambda model: -math.log(_uniform(model, key)) / candidates[model])


def main_model(weights: Mapping[str, int]) -> str:
    """The model with the largest weight, of equal ones the first by name: deferred requests, which nobody watches, are
    no part of a trial.
    """
    return min(weights, key=lambda model: (-weights[model], model))


def _uniform(model: str, key: bytes) -> float:
    """A number above 0 and at most 1 that depends on the model and the key alone."""
    digest = hashlib.blake2b(key, digest_size=8, salt=hashlib.blake2b(model.encode(), digest_size=16).digest())
    return (int.from_bytes(digest.digest()) + 1) / _HASHES
