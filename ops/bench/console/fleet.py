"""A large fleet, written straight into Postgres and Valkey, as if it had run for weeks."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import text
from sqlalchemy.orm import Session

from controlplane.settings import Settings
from controlplane.store.keys import make_key
from controlplane.store.objectives import BUCKET_S
from controlplane.store.redis.live import LiveStore
from controlplane.store.session import Database, lift_time_limit, make_engine
from controlplane.store.tables import Role
from dataplane.protocol.messages import Heartbeat, InstanceReport
from dataplane.protocol.pool_reports import PoolReport, RunReport
from ops.bench.queue.run import fill as fill_queue
from ops.bench.queue.run import settle

SLOTS = 8
"""Of each node, of one GPU."""
POOLED_EVERY = 10
"""Of so many nodes the slots of one are pooled: three models share each."""
SHARERS = 3
GPU_TYPE = "H800"
_DAY_S = 86_400


@dataclass(frozen=True, kw_only=True)
class FleetSize:
    """How large a fleet is. `waiting`: batch requests in the queue."""

    models: int = 1000
    regions: int = 60
    instances: int = 10_000
    events: int = 300_000
    waiting: int = 200_000

    @property
    def nodes(self) -> int:
        """So many that every instance has a place: their slots hold one instance, or several where they are pooled."""
        held = SLOTS * (1 + (SHARERS - 1) / POOLED_EVERY)
        return max(1, -(-self.instances // int(held)))


LARGE = FleetSize()
SMALL = FleetSize(models=4, regions=3, instances=12, events=500, waiting=0)


@dataclass(frozen=True, kw_only=True)
class Filled:
    """A key that may read all of it, the plan in force, and the one that waits for an operator."""

    viewer_key: str
    plan_in_force: str
    plan_drafted: str


_FLEET = (
    """
    INSERT INTO regions (name, position) SELECT 'region-' || lpad(n::text, 2, '0'), n
    FROM generate_series(0, :regions - 1) n
    """,
    "INSERT INTO gpu_types (name, memory_bytes, cost_per_hour) VALUES (:gpu_type, 80::bigint << 30, 2)",
    """
    INSERT INTO nodes (name, region, gpu_type, url, engine, last_seen_at)
    SELECT 'node-' || lpad(n::text, 5, '0'), 'region-' || lpad((n % :regions)::text, 2, '0'), :gpu_type,
        'http://10.' || n / 250 || '.0.' || n % 250 + 1, 'replay',
        CASE WHEN n % 200 = 1 THEN now() - interval '2 days' ELSE now() END
    FROM generate_series(0, :nodes - 1) n
    """,
    """
    INSERT INTO slots (node, index, gpus, memory_bytes) SELECT name, slot, 1, 80::bigint << 30
    FROM nodes, generate_series(0, :slots - 1) slot
    """,
    """
    INSERT INTO models (name, path, architecture, weights_bytes, kv_bytes_per_token, context_tokens)
    SELECT 'model-' || n, '/models/' || n, 'Llama', 14::bigint << 30, 65536, 8192 FROM generate_series(0, :models - 1) n
    """,
    """
    INSERT INTO profiles (model, gpu_type, tokens_per_s, gpus, load_time_s)
    SELECT name, :gpu_type, 5000, 1, 30 FROM models
    """,
    """
    INSERT INTO endpoints (model, region, instances_min, instances_max, unplaced)
    SELECT models.name, regions.name, 0, 20, CASE WHEN right(models.name, 2) = '07' AND regions.position % 3 = 0
        THEN jsonb_build_array(jsonb_build_object('gpu_type', null, 'count', 1, 'reason', 'no free slot')) END
    FROM models, regions
    """,
    """
    INSERT INTO instances (id, model, region, gpu_type, node, slot, gpus, pooled, desired, observed, spot_at)
    SELECT 'inst_' || lpad(n::text, 8, '0'), 'model-' || (n * 7 + n / 60) % :models, node.region, node.gpu_type,
        node.name, place.slot, CASE WHEN place.pooled THEN 0 ELSE 1 END, place.pooled, state.desired,
        CASE WHEN state.desired <> 'running' THEN state.desired WHEN n % 50 = 7 THEN 'loading'
            WHEN n % 250 = 9 THEN 'failed' ELSE 'ready' END,
        CASE WHEN state.desired = 'spot' THEN now() END
    FROM (SELECT name, region, gpu_type, split_part(name, '-', 2)::int AS number FROM nodes) node,
        LATERAL (SELECT node.number % :pooled_every = 0 AS pooled, slot, sharer
            FROM generate_series(0, :slots - 1) slot,
                generate_series(1, CASE WHEN node.number % :pooled_every = 0 THEN :sharers ELSE 1 END) sharer) place,
        LATERAL (SELECT node.number * :slots * :sharers + place.slot * :sharers + place.sharer AS n) numbered,
        LATERAL (SELECT CASE WHEN place.pooled THEN 'running' WHEN n % 40 = 3 THEN 'spot' WHEN n % 100 = 5
            THEN 'draining' ELSE 'running' END AS desired) state
    ORDER BY node.number, place.slot, place.sharer LIMIT :instances
    """,
    """
    INSERT INTO events (at, kind, what, subject, model, region, node, message)
    SELECT now() - (:events - n) * interval '6 seconds', 'instance', (ARRAY['loading', 'ready', 'failed'])[n % 3 + 1],
        id, model, region, node, 'on slot ' || slot
    FROM (SELECT *, row_number() OVER (ORDER BY id) - 1 AS place FROM instances) held
    JOIN generate_series(1, :events) n ON place = n * 7919::bigint % (SELECT count(*) FROM instances)
    ORDER BY n
    """,
    """
    INSERT INTO objective_counts (model, start_s, region, tier, answers, kept, tokens, tokens_in_time)
    SELECT '', start_s, name, tier, 1000, 950 + position % 50, 100000, 99000 FROM regions,
        unnest(ARRAY['IW-F', 'IW-N', 'NIW']) tier,
        generate_series(:now_s / :bucket_s * :bucket_s - :day_s, :now_s, :bucket_s) start_s
    """,
)
_PLAN = (
    """
    INSERT INTO plans (id, state, origin, window_start_s, fleet_index, solver, status, objective_per_hour,
        bound_per_hour, gap, solve_time_s, unserved, reason, previous_plan_id, approval_reason, created_by, applied_at)
    SELECT :plan, CAST(:state AS varchar), 'schedule', :window_s, index, 'highs', 'optimal', 20000, 19950, 0.0025, 12,
        (SELECT jsonb_agg(jsonb_build_object('model', 'model-' || n, 'region', 'region-00', 'tokens_per_s', n,
            'reason', 'no capacity at home')) FROM generate_series(1, 40) n),
        'the hour''s placement', :previous, :approval, 'schedule',
        CASE WHEN CAST(:state AS varchar) = 'applied' THEN now() END
    FROM fleet
    """,
    """
    INSERT INTO plan_entries (plan_id, model, region, gpu_type, before, after, reason, "constraint", cost_if_not)
    SELECT :plan, model, region, :gpu_type, before, before + change, 'demand of the hour',
        CASE WHEN change = 0 AND before = 0 THEN 'none' ELSE (ARRAY['home', 'global', 'capacity', 'cost'])[n % 4 + 1]
        END, abs(change) * 1.5
    FROM (SELECT *, CASE WHEN n % :changed_every = 0 THEN n % 3 + 1
            WHEN n % :changed_every = 1 AND before > 0 THEN -1 ELSE 0 END AS change
        FROM (SELECT model, region, CAST(row_number() OVER (ORDER BY model, region) AS int) AS n,
                (SELECT count(*) FROM instances WHERE instances.model = cell.model AND instances.region = cell.region)
                    AS before
            FROM endpoints cell) counted) planned
    """,
)


def fill_large(settings: Settings, size: FleetSize) -> Filled:
    """Write a fleet of that size to an empty database: with events, a day's objectives, a queue, a plan in force and a
    drafted one.
    """
    database = Database(make_engine(settings))
    with database.transaction() as session:
        lift_time_limit(session)
        filled = _write(session, size)
        beats = _heartbeats(session)
    database.close()
    url = settings.database_url.get_secret_value()
    if size.waiting:
        fill_queue(url, size.waiting)
    else:
        settle(url)
    live = LiveStore(settings)
    for beat, region in beats:
        live.write_heartbeat(beat, region=region, gpu_type=GPU_TYPE, url="http://10.0.0.1:8000")
    live.close()
    return filled


def _write(session: Session, size: FleetSize) -> Filled:
    now_s = int(session.execute(text("SELECT extract(epoch FROM now())")).scalar_one())
    values = {
        "models": size.models, "regions": size.regions, "nodes": size.nodes, "instances": size.instances,
        "events": size.events, "slots": SLOTS, "sharers": SHARERS, "pooled_every": POOLED_EVERY, "now_s": now_s,
        "bucket_s": BUCKET_S, "day_s": _DAY_S, "gpu_type": GPU_TYPE,
    }  # fmt: skip
    for statement in _FLEET:
        _run(session, statement, values)
    hour_s = now_s // 3600 * 3600
    plans = {
        "plan_" + "1".zfill(32): {"state": "applied", "window_s": hour_s, "previous": None, "approval": None},
        "plan_" + "2".zfill(32): {
            "state": "draft", "window_s": hour_s + 3600, "previous": "plan_" + "1".zfill(32),
            "approval": "it moves more GPUs than may pass without an operator",
        },
    }  # fmt: skip
    session.execute(text("ANALYZE instances"))
    for changed_every, (plan, about) in zip((20, 17), plans.items(), strict=True):
        for statement in _PLAN:
            _run(session, statement, {"plan": plan, "changed_every": changed_every, "gpu_type": GPU_TYPE, **about})
    key = make_key(session, name="viewer", role=Role.VIEWER, tenant="bench").secret
    in_force, drafted = plans
    return Filled(viewer_key=key, plan_in_force=in_force, plan_drafted=drafted)


def _run(session: Session, statement: str, values: Mapping[str, Any]) -> None:
    """Execute a statement with those of the values that it names."""
    clause = text(statement)
    session.execute(clause, {name: values[name] for name in clause.compile().params})


def _heartbeats(session: Session) -> Sequence[tuple[Heartbeat, str]]:
    """The last heartbeat of each node that is alive, and its region."""
    rows = session.execute(
        text(
            "SELECT name, nodes.region, id, model, slot, observed, pooled FROM nodes JOIN instances ON node = name"
            " WHERE last_seen_at > now() - interval '1 day' ORDER BY name, slot, id"
        )
    )
    held: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for row in rows:
        held[row.name, row.region].append(row)
    return [
        (
            Heartbeat(node=node, boot_id="b", generation=0, instances=_reports(rows), load=0.5, pools=_pools(rows)),
            region,
        )
        for (node, region), rows in held.items()
    ]


def _reports(rows: Sequence[Any]) -> tuple[InstanceReport, ...]:
    return tuple(
        InstanceReport(
            instance_id=row.id, model=row.model, slot=row.slot, state=row.observed, kv_used_bytes=30 << 30,
            kv_capacity_bytes=60 << 30, remaining_tokens=5000, running=8, waiting=1, context_tokens=8192, batch_max=64,
        )
        for row in rows
    )  # fmt: skip


def _pools(rows: Sequence[Any]) -> tuple[PoolReport, ...]:
    slots: dict[int, list[str]] = defaultdict(list)
    for row in rows:
        if row.pooled:
            slots[row.slot].append(row.model)
    return tuple(
        PoolReport(
            slot=slot, worker=0, kind="both", running_model=models[0], resident_models=tuple(models), load=0.6,
            runs=tuple(RunReport(models[n % len(models)], 40.0 - n, 1.0, True) for n in range(40)),
        )
        for slot, models in slots.items()
    )  # fmt: skip
