"""What a heartbeat says of workers that several models share."""

import msgspec


class KvReport(msgspec.Struct, frozen=True, array_like=True):
    """KV of one shape in a worker's memory. `held_bytes`: of its slabs."""

    shape: str
    used_bytes: int
    held_bytes: int


class RunReport(msgspec.Struct, frozen=True, array_like=True):
    """Time slices of one model that followed each other: how long ago the first began, how long they took together, and
    whether a switch began them.
    """

    model: str
    began_ago_s: float
    lasted_s: float
    switched: bool


class SwitchReport(msgspec.Struct, frozen=True, kw_only=True):
    """The switches of a worker in its last `window_s` seconds. What each cost is how long the weights that were missing
    took to load, which is nothing where they were prefetched: their median, and their sum.
    """

    window_s: float
    switches: int
    median_s: float
    total_s: float


class PoolReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker whose models share its memory. `load`: as in the heartbeat. `slabs`: by what they hold. `switching`:
    None before the first slice. `offloaded_layers`: weight layers evicted for KV, by model. `runs`: the oldest first.
    """

    slot: int
    worker: int
    kind: str
    running_model: str | None = None
    next_model: str | None = None
    resident_models: tuple[str, ...] = ()
    load: float = 0.0
    switches_total: int = 0
    prefills_waiting: int = 0
    slabs: dict[str, int] = {}
    kv: tuple[KvReport, ...] = ()
    offloaded_layers: dict[str, int] = {}
    runs: tuple[RunReport, ...] = ()
    switching: SwitchReport | None = None
