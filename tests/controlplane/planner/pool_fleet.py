"""A fleet that can pool: models with a latency, nodes with slots of one GPU, forecasts as a test wants them."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import select

from controlplane.store import fleet
from controlplane.store.demand import Forecast, put_forecasts
from controlplane.store.joining import join_node
from controlplane.store.tables import Instance, Profile
from dataplane.protocol.joining import Join, SlotSpec
from tests.controlplane.world import World

LATENCY: dict[str, Any] = {
    "prefill_base_s": 5.7e-3,
    "prefill_per_token_s": 2.3e-5,
    "prefill_per_token2_s": 2.1e-10,
    "decode_base_s": 8.5e-3,
    "decode_per_context_token_s": 4.4e-8,
    "decode_per_sequence_s": 1.1e-4,
    "switch_s": 0.9,
    "source": "7B on H800, rounded; a switch of twice its weights",
}
HOST_BYTES = 1 << 20


def add_models(world: World, *names: str, latency: dict[str, Any] | None = LATENCY) -> None:
    """Models that do 1,000 tokens/s on one GPU, at most four instances in each region."""
    for name in names:
        world.add_model(name)
        with world.database.transaction() as session:
            profile = Profile(
                model=name, gpu_type="H800", tokens_per_s=1000.0, gpus=1, load_time_s=30.0, latency=latency
            )
            fleet.put_profile(session, profile)


def join(
    world: World,
    name: str,
    *,
    url: str = "http://127.0.0.1:9",
    slots: int = 1,
    gpus: int = 1,
    workers: int = 1,
    host_bytes: int | None = HOST_BYTES,
) -> None:
    """A node of us-east with slots of so many GPUs, shared by so many workers."""
    specs = tuple(SlotSpec(gpus=gpus, memory_bytes=80 << 30, workers=workers) for _ in range(slots))
    request = Join(
        node=name, region="us-east", gpu_type="H800", url=url, slots=specs, engine="replay", host_bytes=host_bytes
    )
    with world.database.transaction() as session:
        join_node(session, request)
        fleet.touch_node(session, name)


def expect(world: World, tokens_per_s: Mapping[str, float], *, origin_s: int) -> None:
    """Forecasts for us-east, flat."""
    rows = [
        Forecast(
            model=name,
            region="us-east",
            origin_s=origin_s,
            forecaster="flat",
            peak_q50=value,
            peak_upper=value,
            quantile=0.9,
            path=[value] * 12,
            candidates={},
            reason="of the test",
        )
        for name, value in tokens_per_s.items()
    ]
    with world.database.transaction() as session:
        put_forecasts(session, rows)


def live_rows(world: World) -> list[Instance]:
    """Instances that are not stopped, the oldest first."""
    with world.database.transaction() as session:
        return list(session.scalars(select(Instance).where(Instance.desired != "stopped").order_by(Instance.id)))
