"""What pools save in GPUs by the way plans are really made: `python -m ops.bench.planner.plan_pools --help`.

A fleet with a long tail of demand is written into a database of its own, as nodes and operators would write it; then
the hour is drafted twice, without pools and with them. An instance alone is taken to do as much as leaves a GPU 80 %
busy by the same latency model that tells what an endpoint takes of a pool, so that neither way has the better numbers.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import SecretStr

import migrations
from controlplane.planner.draft import DraftOf
from controlplane.planner.plan import draft_plan
from controlplane.policies.placement.pools import PoolLoad, occupancy_of
from controlplane.settings import Settings
from controlplane.store import fleet
from controlplane.store.demand import Forecast, put_forecasts
from controlplane.store.joining import join_node
from controlplane.store.session import Database, make_engine
from controlplane.store.tables import Model, Profile
from dataplane.protocol.messages import Join, SlotSpec
from dataplane.scheduling.profile import GpuProfile, ModelProfile, load_gpu_profile
from ops.client.screen import AsJson, print_json, print_table
from ops.local.embedded import EmbeddedPostgres
from ops.local.ports import free_port
from ops.local.supervisor import Supervisor

PROFILES = Path(__file__).parents[2] / "profiles"
NOW_S = 1_000_000_800
BUSY = 0.8
SLOTS = 8
LOAD_TIME_S = 60.0


@dataclass(frozen=True, kw_only=True)
class FleetShape:
    """A long-tailed fleet. `tail_models` share of the models make `tail_requests` share of `requests_per_s` in each
    region; within head and tail the n-th model has 1/n of the first one's.
    """

    models: int = 100
    regions: int = 2
    nodes: int = 20
    requests_per_s: float = 400.0
    tail_models: float = 0.94
    tail_requests: float = 0.0135
    host_gib: int = 1024
    minimum: int = 0

    def region_names(self) -> list[str]:
        return [f"region-{number}" for number in range(self.regions)]

    def node_names(self, region: str) -> list[str]:
        return [f"{region}-{number}" for number in range(self.nodes)]

    def rates(self) -> list[float]:
        """Requests per second of each model in one region, the busiest first."""
        tail = round(self.tail_models * self.models)
        head = self.models - tail
        return [
            *_zipf(head, self.requests_per_s * (1 - self.tail_requests)),
            *_zipf(tail, self.requests_per_s * self.tail_requests),
        ]


@dataclass(frozen=True, kw_only=True)
class Saving:
    """One draft. `gpus`: of instances and pools together."""

    pools: bool
    gpus: int
    pool_gpus: int
    pooled_endpoints: int
    objective_per_hour: float
    unserved: int
    gap: float
    solve_s: float


def main(
    models: Annotated[int, typer.Option(min=10)] = 100,
    regions: Annotated[int, typer.Option(min=1)] = 2,
    nodes: Annotated[int, typer.Option(min=1, help="Of 8 GPUs, in each region.")] = 20,
    requests_per_s: Annotated[float, typer.Option(min=1, help="In each region.")] = 400.0,
    host_gib: Annotated[int, typer.Option(min=16, help="Host memory for models of a node.")] = 1024,
    minimum: Annotated[int, typer.Option(min=0, help="Least instances of every endpoint.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Draft an hour of a long-tailed fleet of H800s without pools and with them."""
    shape = FleetShape(
        models=models,
        regions=regions,
        nodes=nodes,
        requests_per_s=requests_per_s,
        host_gib=host_gib,
        minimum=minimum,
    )
    savings = measure(shape)
    if as_json:
        print_json({"shape": asdict(shape), "drafts": [asdict(each) for each in savings]})
        return
    columns = {name: name for name in ("pools", "gpus", "pool_gpus", "pooled_endpoints", "unserved", "gap", "solve_s")}
    print_table(f"{models} models x {regions} regions, {regions * nodes * SLOTS} GPUs", columns, map_rows(savings))


def map_rows(savings: Sequence[Saving]) -> list[dict[str, Any]]:
    """Rows of the table."""
    return [asdict(each) | {"gap": f"{each.gap:.3%}", "solve_s": f"{each.solve_s:.1f}"} for each in savings]


def measure(shape: FleetShape) -> list[Saving]:
    """Both drafts: without pools, then with them."""
    with _database() as (database, settings):
        _write_fleet(database, settings, shape)
        return [_drafted(database, settings, shape, pools=pools) for pools in (False, True)]


def _zipf(count: int, total: float) -> list[float]:
    weights = [1 / n for n in range(1, count + 1)]
    return [total * weight / sum(weights) for weight in weights]


@contextmanager
def _database() -> Iterator[tuple[Database, Settings]]:
    with tempfile.TemporaryDirectory(prefix="tidepool-bench-") as folder:
        server = EmbeddedPostgres(Path(folder), free_port(), fsync=False)
        server.prepare()
        with Supervisor([server.child()], report=lambda _: None):
            migrations.upgrade(server.url())
            settings = Settings(database_url=SecretStr(server.url()), home=Path(folder))
            database = Database(make_engine(settings))
            try:
                yield database, settings
            finally:
                database.close()


def _write_fleet(database: Database, settings: Settings, shape: FleetShape) -> None:
    gpu = load_gpu_profile(PROFILES / "h800.toml")
    measured = [each for each in gpu.models if each.gpus == 1]
    regions = shape.region_names()
    with database.transaction() as session:
        for region in regions:
            fleet.put_region(session, name=region, position=None)
        fleet.put_gpu_type(session, name="H800", memory_bytes=gpu.memory_bytes, cost_per_hour=gpu.cost_per_hour)
        for number, rate in enumerate(shape.rates()):
            model = measured[number % len(measured)]
            name = f"m{number:03d}"
            row = Model(
                name=name,
                path=f"/models/{name}",
                architecture="Llama",
                weights_bytes=model.weights_bytes,
                kv_bytes_per_token=100_000,
                context_tokens=8192,
            )
            fleet.put_model(session, row)
            fleet.put_profile(session, _profile(name, gpu, model, settings))
            for region in regions:
                fleet.put_endpoint(session, model=name, region=region, minimum=shape.minimum, maximum=64)
            put_forecasts(session, [_forecast(name, region, rate * settings.pool_prompt_tokens) for region in regions])
        slots = tuple(SlotSpec(gpus=1, memory_bytes=gpu.memory_bytes) for _ in range(SLOTS))
        for region in regions:
            for node in shape.node_names(region):
                join = Join(
                    node=node,
                    region=region,
                    gpu_type="H800",
                    url="http://127.0.0.1:9",
                    slots=slots,
                    engine="replay",
                    host_bytes=shape.host_gib << 30,
                )
                join_node(session, join)


def _profile(name: str, gpu: GpuProfile, model: ModelProfile, settings: Settings) -> Profile:
    switch_s = model.weights_bytes / (gpu.pcie_bytes_per_s * gpu.transfer_efficiency)
    latency: dict[str, Any] = asdict(model.latency) | {"switch_s": switch_s, "source": model.source}
    return Profile(
        model=name,
        gpu_type="H800",
        tokens_per_s=_alone_tokens_per_s(model, settings),
        gpus=1,
        load_time_s=LOAD_TIME_S,
        latency=latency,
    )


def _alone_tokens_per_s(model: ModelProfile, settings: Settings) -> float:
    """Input tokens per second that keep a GPU of a model's own busy for `BUSY` of the time: no switches."""
    load = PoolLoad(
        **asdict(model.latency),
        switch_s=0.0,
        requests_per_s=0.0,
        input_tokens=settings.pool_prompt_tokens,
        output_tokens=settings.pool_output_tokens,
        tbt_s=settings.pool_tbt_s,
    )
    low, high = 0.0, 1e4
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if occupancy_of(replace(load, requests_per_s=middle)).total < BUSY else (low, middle)
    return low * settings.pool_prompt_tokens


def _forecast(model: str, region: str, tokens_per_s: float) -> Forecast:
    return Forecast(
        model=model,
        region=region,
        origin_s=NOW_S,
        forecaster="given",
        peak_q50=tokens_per_s,
        peak_upper=tokens_per_s,
        quantile=0.9,
        path=[tokens_per_s],
        candidates={},
        reason="given",
    )


def _drafted(database: Database, settings: Settings, shape: FleetShape, *, pools: bool) -> Saving:
    with database.transaction() as session:  # a plan counts on nodes that were heard of lately
        for region in shape.region_names():
            for node in shape.node_names(region):
                fleet.touch_node(session, node)
    of = DraftOf(window_start_s=NOW_S // 3600 * 3600 + 3600, origin="operator", created_by="bench")
    changed = settings.model_copy(update={"pools_enabled": pools})
    draft = draft_plan(database, changed, of, now_s=NOW_S, keep_forecasts=False)
    pool_gpus = sum(pool["after"] for pool in draft.plan.pools)
    return Saving(
        pools=pools,
        gpus=pool_gpus + sum(entry.after for entry in draft.entries),
        pool_gpus=pool_gpus,
        pooled_endpoints=sum(len(pool["pooled"]) for pool in draft.plan.pools),
        objective_per_hour=_number(draft.plan.objective_per_hour),
        unserved=len(draft.plan.unserved),
        gap=_number(draft.plan.gap),
        solve_s=draft.plan.solve_time_s,
    )


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


if __name__ == "__main__":
    typer.run(main)
