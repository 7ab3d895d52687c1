"""What a switch costs beside its bytes: the place, evictions, submitting parts, pointing the model at them."""

from ops.profiling.checkpoints import BenchModel, DtypeName
from ops.profiling.figures import Figure, interleaved, medians, seconds
from ops.profiling.slot import open_slot

CONTROL_MAX_MS = 5.0
SWITCHES = 10


def measure_control(models: list[BenchModel], *, device: str, dtype: DtypeName, rounds: int) -> Figure:
    """Two models take turns in an arena that holds one, and no byte moves: milliseconds a switch."""
    with open_slot(models[:2], device=device, dtype=dtype, residents=1, moves=False) as slot:

        def switch_repeatedly() -> None:
            for number in range(SWITCHES):
                slot.switch(slot.models[number % 2])

        times_s = interleaved({"switch": lambda: seconds(switch_repeatedly, slot.device) / SWITCHES}, rounds=rounds)
        return Figure(
            name="control overhead of a switch",
            value=1e3 * medians(times_s)["switch"],
            unit="ms",
            bound="at most",
            target=CONTROL_MAX_MS,
            details={
                "layers": slot.models[0].skeleton.geometry.layers,
                "best_ms": 1e3 * min(times_s["switch"]),
                "parts": len(slot.models[0].skeleton.parts),
            },
        )
