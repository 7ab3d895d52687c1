"""The live view and other volatile state in Redis. All its keys are defined here; all of them can be lost.

tidepool:view                  hash   node -> NodeView (JSON), rewritten by every heartbeat
tidepool:demand:<minute>       hash   kind|model|region -> input tokens, kept 2 hours
tidepool:signal:<model>|<region>      set while an endpoint may not signal capacity again; also slot|<node>|<number>
tidepool:revoked               zset   hash of a secret -> when it was revoked, kept 10 minutes
"""

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import msgspec
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from controlplane.errors import UnavailableError
from controlplane.policies.facts import Endpoint, InstanceFacts, SlotId
from controlplane.settings import Settings
from controlplane.store.tables import Model
from dataplane.protocol.messages import Heartbeat

_VIEW = "tidepool:view"
_DEMAND = "tidepool:demand:"
_SIGNAL = "tidepool:signal:"
_REVOKED = "tidepool:revoked"
_REVOKED_KEEP_S = 600
_COUNTING = "counting"
_DEMAND_KEEP_S = 7200
_FORGET_NODE_S = 600


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node's last heartbeat and its location. `received_s`: when it arrived, by Redis's clock."""

    region: str
    gpu_type: str
    url: str
    received_s: float
    heartbeat: Heartbeat


@dataclass(frozen=True, kw_only=True)
class FleetView:
    """All nodes at one moment, `read_s` on Redis's clock."""

    read_s: float
    nodes: Mapping[str, NodeView]


@dataclass(frozen=True, kw_only=True)
class DemandCount:
    """Input tokens that arrived in one minute. `kind`: IW or NIW."""

    kind: str
    endpoint: Endpoint
    start_s: int
    tokens: float


EMPTY_VIEW = FleetView(read_s=0.0, nodes={})


class LiveStore:
    """The synchronous Redis client. Every call raises UnavailableError while Redis is unavailable."""

    def __init__(self, settings: Settings) -> None:
        self._redis = redis.Redis.from_url(
            settings.redis_url.get_secret_value(),
            decode_responses=True,
            socket_timeout=2,
            socket_connect_timeout=2,
            health_check_interval=15,
            retry=Retry(NoBackoff(), 1),
        )

    def close(self) -> None:
        self._redis.close()

    def ping(self) -> None:
        """Raise UnavailableError unless Redis answers."""
        with _translated():
            self._redis.ping()

    def write_heartbeat(
        self, heartbeat: Heartbeat, *, region: str, gpu_type: str, url: str, renewed: NodeView | None = None
    ) -> None:
        """Replace the view of a node, unless `renewed` is already equal to it."""
        with _translated():
            received_s = self._now_s() if renewed is None else renewed.received_s
            view = NodeView(region=region, gpu_type=gpu_type, url=url, received_s=received_s, heartbeat=heartbeat)
            if view != renewed:
                self._redis.hset(_VIEW, heartbeat.node, msgspec.json.encode(view))

    def renew_heartbeat(self, heartbeat: Heartbeat) -> NodeView | None:
        """Replace the heartbeat of a node that is in the view, and return its new view; its location is kept, and
        reports of instances that are not in its view are dropped.
        """
        with _translated():
            pipe = self._redis.pipeline(transaction=False)
            pipe.hget(_VIEW, heartbeat.node)
            pipe.time()
            raw, (seconds, micros) = pipe.execute()
            known = _node_view(str(raw)) if raw is not None else None
            if known is None:
                return None
            there = {(report.instance_id, report.model) for report in known.heartbeat.instances}
            renewed = of_instances(heartbeat, there)
            view = msgspec.structs.replace(known, received_s=float(seconds + micros / 1e6), heartbeat=renewed)
            self._redis.hset(_VIEW, heartbeat.node, msgspec.json.encode(view))
            return view

    def read_view(self) -> FleetView:
        """All nodes that reported in the last ten minutes; older ones are deleted."""
        with _translated():
            now_s = self._now_s()
            found = {name: _node_view(raw) for name, raw in self._read_hash(_VIEW).items()}
            nodes = {n: view for n, view in found.items() if view and now_s - view.received_s <= _FORGET_NODE_S}
            if gone := found.keys() - nodes.keys():
                self._redis.hdel(_VIEW, *gone)
        return FleetView(read_s=now_s, nodes=nodes)

    def count_demand(self, counts: Mapping[tuple[str, Endpoint], float], *, minute_s: int) -> None:
        """Add input tokens to a minute, by (kind, endpoint). Without counts it still marks the minute as counted."""
        with _translated():
            pipe = self._redis.pipeline(transaction=True)
            pipe.hset(f"{_DEMAND}{minute_s}", _COUNTING, 1)
            for (kind, endpoint), tokens in counts.items():
                pipe.hincrbyfloat(f"{_DEMAND}{minute_s}", f"{kind}|{endpoint.model}|{endpoint.region}", tokens)
            pipe.expire(f"{_DEMAND}{minute_s}", _DEMAND_KEEP_S)
            pipe.execute()

    def read_demand(self, minute_s: int) -> list[DemandCount] | None:
        """The counts of a minute so far; None: no process was counting, so the minute is missing data."""
        with _translated():
            raw = self._read_hash(f"{_DEMAND}{minute_s}")
        if raw.pop(_COUNTING, None) is None:
            return None
        counts = []
        for field, tokens in raw.items():
            kind, model, region = field.split("|")
            endpoint = Endpoint(model=model, region=region)
            counts.append(DemandCount(kind=kind, endpoint=endpoint, start_s=minute_s, tokens=float(tokens)))
        return counts

    def note_revoked(self, hashes: Iterable[str]) -> None:
        """Tell every gateway that these secrets, by their hashes, are revoked."""
        with _translated():
            now_s = self._now_s()
            pipe = self._redis.pipeline(transaction=True)
            pipe.zadd(_REVOKED, dict.fromkeys(hashes, now_s))
            pipe.zremrangebyscore(_REVOKED, "-inf", now_s - _REVOKED_KEEP_S)
            pipe.execute()

    def read_revoked(self) -> frozenset[str]:
        """Hashes of secrets revoked in the last ten minutes, longer than gateways cache keys."""
        with _translated():
            return frozenset(str(hashed) for hashed in self._redis.zrange(_REVOKED, 0, -1))

    def take_signal(self, of: Endpoint | SlotId, *, every_s: float) -> bool:
        """Whether an endpoint or a slot may signal capacity now: once in `every_s` seconds, to one dispatcher."""
        with _translated():
            return bool(self._redis.set(_signal(of), b"1", nx=True, px=int(every_s * 1000)))

    def hold_signal(self, of: Endpoint, *, for_s: float) -> None:
        """Let an endpoint signal no capacity for `for_s` seconds."""
        with _translated():
            self._redis.set(_signal(of), b"1", px=int(for_s * 1000))

    def _read_hash(self, key: str) -> dict[str, str]:
        return {str(field): str(value) for field, value in self._redis.hgetall(key).items()}

    def _now_s(self) -> float:
        seconds, micros = self._redis.time()
        return float(seconds + micros / 1e6)


def _signal(of: Endpoint | SlotId) -> str:
    name = f"slot|{of.node_id}|{of.number}" if isinstance(of, SlotId) else f"{of.model}|{of.region}"
    return f"{_SIGNAL}{name}"


def of_instances(heartbeat: Heartbeat, allowed: Collection[tuple[str, str]]) -> Heartbeat:
    """The heartbeat with its reports of these instances only, by id and model."""
    kept = tuple(report for report in heartbeat.instances if (report.instance_id, report.model) in allowed)
    return msgspec.structs.replace(heartbeat, instances=kept)


def _node_view(raw: str) -> NodeView | None:
    """None for what another version wrote; the node's next heartbeat replaces it."""
    try:
        return msgspec.json.decode(raw, type=NodeView)
    except msgspec.DecodeError:
        return None


class _translated:  # noqa: N801 - reads as a statement
    """Raises Redis's errors as UnavailableError."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, redis.RedisError):
            raise UnavailableError(f"Redis does not answer: {error}") from error


def _nothing(_instance_id: str) -> tuple[int, int, int]:
    return 0, 0, 0


def instance_facts(
    view: FleetView,
    *,
    models: Mapping[str, Model] | None = None,
    sent: Callable[[str], tuple[int, int, int]] = _nothing,
    model: str | None = None,
) -> tuple[InstanceFacts, ...]:
    """The facts of a view's instances; those of one `model`, if it is given. `models`: for their KV bytes per token.
    `sent`: tokens, input tokens and requests that this process has sent to an instance since its heartbeat.
    """
    kv_bytes = {name: known.kv_bytes_per_token for name, known in (models or {}).items()}
    endpoint_of = functools.cache(lambda model, region: Endpoint(model=model, region=region))
    facts = []
    for name, node in view.nodes.items():
        age_s = max(0.0, view.read_s - node.received_s)
        for report in node.heartbeat.instances:
            if model is not None and report.model != model:
                continue
            sent_tokens, sent_input_tokens, sent_requests = sent(report.instance_id)
            facts.append(
                InstanceFacts(
                    instance_id=report.instance_id,
                    node_id=name,
                    endpoint=endpoint_of(report.model, node.region),
                    gpu_type=node.gpu_type,
                    accepting=report.state == "ready",
                    age_s=age_s,
                    kv_used_bytes=report.kv_used_bytes,
                    kv_capacity_bytes=report.kv_capacity_bytes,
                    remaining_tokens=report.remaining_tokens,
                    sent_tokens=sent_tokens,
                    sent_input_tokens=sent_input_tokens,
                    requests=report.running + report.waiting,
                    sent_requests=sent_requests,
                    kv_bytes_per_token=kv_bytes.get(report.model, 0),
                    kind=report.kind,
                    prefill_wait_s=report.prefill_wait_s,
                    prefill_urgent_wait_s=report.prefill_urgent_wait_s,
                    prefill_token_s=report.prefill_token_s,
                    slot=report.slot,
                    load=node.heartbeat.load,
                )
            )
    return tuple(facts)
