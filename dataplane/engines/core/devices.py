"""Devices: which GPUs a worker process sees, those of its slot alone, on one host or several, and how much one step may
hold on a card.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from dataplane.protocol.errors import ModelLoadError

VISIBLE = "CUDA_VISIBLE_DEVICES"


class StepLimits(NamedTuple):
    """The sequences that one step runs at most, and the tokens that it prefills."""

    batch_max: int
    prefill_tokens_max: int


class HostSpan(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a process in a slot whose GPUs are of several `hosts`, each with as many: it is on the `host`-th.
    Host 0 is the head, whose first rank is met by all others at `address` and `port`; `own_address`: of this host, in
    the network of these hosts.
    """

    hosts: int
    host: int
    address: str
    port: int
    own_address: str


_CPU = StepLimits(32, 2048)
_CARDS = ((64 * 10**9, StepLimits(256, 8192)), (32 * 10**9, StepLimits(128, 4096)), (0, StepLimits(64, 2048)))
"""By the memory that a card has at least: those of 80 and more GB, those of 40 and 48, and smaller ones."""


def step_limits(device: str, memory_bytes: int) -> StepLimits:
    """What a step may hold unless the settings say otherwise; `memory_bytes`: of one GPU, as far as a slot has it."""
    if device == "cpu":
        return _CPU
    return next(limits for least, limits in _CARDS if memory_bytes >= least)


def visible_gpus(indices: Iterable[int], environment: Mapping[str, str]) -> str:
    """The value of CUDA_VISIBLE_DEVICES for a process that may see these of the GPUs that `environment` shows. Names
    such as UUIDs are kept.

    Raises:
        ModelLoadError: `environment` shows fewer.
    """
    visible = environment.get(VISIBLE)
    if visible is None:
        return ",".join(str(index) for index in indices)
    names = [name.strip() for name in visible.split(",") if name.strip()]
    chosen = []
    for index in indices:
        if index >= len(names):
            raise ModelLoadError(f"device cuda:{index} is not among {VISIBLE}={visible}")
        chosen.append(names[index])
    return ",".join(chosen)
