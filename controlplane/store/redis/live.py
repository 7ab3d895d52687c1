"""The live view and other volatile state in Redis. All its keys are defined here; all of them can be lost.

tidepool:view                  hash   node -> NodeView (JSON), rewritten by every heartbeat
tidepool:demand:<minute>       hash   kind|model|region -> input tokens, kept 2 hours
tidepool:counted:<minute>      hash   process|kind|model|region -> what that process counted of them, kept 10 minutes
tidepool:release:<model>|<region>      hash   window -> Window (JSON), dispatcher -> its requests there, and when it
                                      wrote them
tidepool:sent                  stream what each process has sent to instances in the last seconds: its id -> instance ->
                                      tokens, input tokens, requests (JSON)
tidepool:revoked               zset   hash of a secret -> when it was revoked, kept 10 minutes
"""

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import msgspec
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from controlplane.errors import UnavailableError
from controlplane.policies.facts import Endpoint, InstanceFacts, Window
from controlplane.settings import Settings
from controlplane.store.tables import Model
from dataplane.protocol.messages import Heartbeat

_VIEW = "tidepool:view"
_DEMAND = "tidepool:demand:"
_RELEASE = "tidepool:release:"
_RELEASE_KEEP_S = 600
_WINDOW = "window"
_SENT = "tidepool:sent"
_SENT_KEEP_S = 3.0
_SENT_READ_MAX = 10_000
_REVOKED = "tidepool:revoked"
_REVOKED_KEEP_S = 600
_COUNTED = "tidepool:counted:"
_COUNTED_KEEP_S = 600
_DEMAND_KEEP_S = 7200
_COUNTING = "counting"
_FORGET_NODE_S = 600
DecodedT = TypeVar("DecodedT")


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


class Sums(NamedTuple):
    """Of requests that were sent to an instance: their tokens, those of their prompts, and how many they are."""

    tokens: int = 0
    input_tokens: int = 0
    requests: int = 0


@dataclass(frozen=True, kw_only=True)
class SentElsewhere:
    """What another process told that it had sent to instances, at a moment of Redis's clock."""

    at_s: float
    instances: Mapping[str, Sums]


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
        self._demand = self._redis.register_script(_DEMAND_LUA)
        self._count = self._redis.register_script(_COUNT_LUA + "return total")
        self._take = self._redis.register_script(_TAKE_LUA)

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

    def exchange_sent(
        self, process: str, sent: Mapping[str, Sums], *, after: str, now_s: float
    ) -> tuple[str, list[SentElsewhere]]:
        """Tell other processes what this one has sent to instances, and read what they told since the entry `after`, at
        most of the last seconds. Returns the last entry. `now_s`: about Redis's time.
        """
        oldest = f"{max(0, int((now_s - _SENT_KEEP_S) * 1000))}-0"
        with _translated():
            pipe = self._redis.pipeline(transaction=False)
            if sent:
                pipe.xadd(_SENT, {process: msgspec.json.encode(sent)}, minid=oldest, approximate=True)
            pipe.xrange(_SENT, min=f"({max(after, oldest, key=_entry_number)}", count=_SENT_READ_MAX)
            entries = pipe.execute()[-1]
        told = ((entry, raw) for entry, by in entries for name, raw in by.items() if name != process)
        decoded = ((_entry_number(entry)[0] / 1000, _decoded(raw, dict[str, Sums])) for entry, raw in told)
        last = entries[-1][0] if entries else after
        return last, [SentElsewhere(at_s=at_s, instances=each) for at_s, each in decoded if each is not None]

    def count_demand(self, process: str, counts: Mapping[tuple[str, Endpoint], float], *, minute_s: int) -> None:
        """Write all input tokens that a process has counted in a minute so far, by (kind, endpoint), in place of what
        it wrote before; a repetition changes nothing. Without counts it still marks the minute as counted.
        """
        args: list[str | float] = [process, _COUNTING, _DEMAND_KEEP_S, _COUNTED_KEEP_S]
        for (kind, endpoint), tokens in counts.items():
            args += f"{kind}|{endpoint.model}|{endpoint.region}", tokens
        with _translated():
            self._demand(keys=[f"{_DEMAND}{minute_s}", f"{_COUNTED}{minute_s}"], args=args)

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

    def read_windows(self, endpoints: Collection[Endpoint]) -> tuple[float, dict[Endpoint, Window]]:
        """The time by Redis's clock, which is that of windows, for dispatchers' differ; and the windows of endpoints
        that have one. They are lost with Redis, and begin anew.
        """
        with _translated():
            pipe = self._redis.pipeline(transaction=False)
            for endpoint in endpoints:
                pipe.hget(_release(endpoint), _WINDOW)
            pipe.time()
            *raws, (seconds, micros) = pipe.execute()
        found = zip(endpoints, raws, strict=True)
        windows = ((endpoint, _decoded(str(raw), Window)) for endpoint, raw in found if raw is not None)
        return float(seconds + micros / 1e6), {endpoint: window for endpoint, window in windows if window is not None}

    def count_in_flight(self, dispatcher: str, own: Mapping[Endpoint, int], *, fresh_s: float) -> dict[Endpoint, int]:
        """Write how many deferred requests of this dispatcher are in flight at endpoints; returns those of all
        dispatchers that wrote theirs in the last `fresh_s` seconds.
        """
        with _translated():
            pipe = self._redis.pipeline(transaction=False)
            for endpoint, count in own.items():
                self._count(keys=[_release(endpoint)], args=[dispatcher, count, fresh_s, _RELEASE_KEEP_S], client=pipe)
            return {endpoint: int(total) for endpoint, total in zip(own, pipe.execute(), strict=True)}

    def take_windows(
        self, dispatcher: str, taken: Mapping[Endpoint, "WindowTaken"], *, fresh_s: float
    ) -> dict[Endpoint, int]:
        """Replace each window not stepped since `before`, and take from what is now there: how many of the
        `wanted` requests fit it, beside those of all dispatchers that are in flight. What is granted counts at once.
        """
        with _translated():
            pipe = self._redis.pipeline(transaction=False)
            for endpoint, each in taken.items():
                before = "" if each.before is None else repr(float(each.before.stepped_s))
                after = msgspec.json.encode(each.after)
                args = dispatcher, each.in_flight, fresh_s, _RELEASE_KEEP_S, before, after, each.wanted, each.urgent
                self._take(keys=[_release(endpoint)], args=args, client=pipe)
            return {endpoint: int(granted) for endpoint, granted in zip(taken, pipe.execute(), strict=True)}

    def _read_hash(self, key: str) -> dict[str, str]:
        return {str(field): str(value) for field, value in self._redis.hgetall(key).items()}

    def _now_s(self) -> float:
        seconds, micros = self._redis.time()
        return float(seconds + micros / 1e6)


@dataclass(frozen=True, kw_only=True)
class WindowTaken:
    """What a dispatcher decided for an endpoint where it has `in_flight` requests: the window `after` the one `before`
    (None: there was none), how many requests it wants within it, and how many `urgent` ones whatever it is.
    """

    before: Window | None
    after: Window
    in_flight: int
    wanted: int = 0
    urgent: int = 0


_DEMAND_LUA = """
redis.call('HSET', KEYS[1], ARGV[2], 1)
for i = 5, #ARGV, 2 do
    local own = ARGV[1] .. '|' .. ARGV[i]
    local more = ARGV[i + 1] - (redis.call('HGET', KEYS[2], own) or 0)
    if more > 0 then
        redis.call('HSET', KEYS[2], own, ARGV[i + 1])
        redis.call('HINCRBYFLOAT', KEYS[1], ARGV[i], more)
    end
end
redis.call('EXPIRE', KEYS[1], ARGV[3])
redis.call('EXPIRE', KEYS[2], ARGV[4])
"""
"""Adds what the process ARGV[1] has counted beyond what it wrote before. Its counts only grow: a smaller one was sent
earlier, and comes late.
"""
_COUNT_LUA = """
local time = redis.call('TIME')
local now_s = time[1] + time[2] / 1000000
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. ' ' .. string.format('%.6f', now_s))
redis.call('EXPIRE', KEYS[1], ARGV[4])
local total = 0
local fields = redis.call('HGETALL', KEYS[1])
for i = 1, #fields, 2 do
    local count, at_s = string.match(fields[i + 1], '^(%d+) ([%d.]+)$')
    if count then
        if now_s - tonumber(at_s) <= tonumber(ARGV[3]) then
            total = total + tonumber(count)
        else
            redis.call('HDEL', KEYS[1], fields[i])
        end
    end
end
"""
"""Writes the count ARGV[2] of the dispatcher ARGV[1]; `total` is that of all whose count is ARGV[3] seconds old or
less.
"""
_TAKE_LUA = (
    _COUNT_LUA
    + """
local stored = redis.call('HGET', KEYS[1], 'window')
if not stored or ARGV[5] == '' or cjson.decode(stored).stepped_s == tonumber(ARGV[5]) then
    stored = ARGV[6]
    redis.call('HSET', KEYS[1], 'window', stored)
end
local left = math.floor(cjson.decode(stored).requests) - total - tonumber(ARGV[8])
local granted = math.max(0, math.min(tonumber(ARGV[7]), left))
local own = tonumber(ARGV[2]) + tonumber(ARGV[8]) + granted
redis.call('HSET', KEYS[1], ARGV[1], own .. ' ' .. string.format('%.6f', now_s))
return granted
"""
)
"""Then replaces the window by ARGV[6] if it was stepped last at ARGV[5], and grants of ARGV[7] requests those that fit
the window after ARGV[8] urgent ones.
"""


def _release(endpoint: Endpoint) -> str:
    return f"{_RELEASE}{endpoint.model}|{endpoint.region}"


def of_instances(heartbeat: Heartbeat, allowed: Collection[tuple[str, str]]) -> Heartbeat:
    """The heartbeat with its reports of these instances only, by id and model."""
    kept = tuple(report for report in heartbeat.instances if (report.instance_id, report.model) in allowed)
    return msgspec.structs.replace(heartbeat, instances=kept)


def _entry_number(entry: str) -> tuple[int, int]:
    """The id of a stream's entry, by which they follow each other: the time in milliseconds, and a number."""
    time_ms, _, number = entry.partition("-")
    return int(time_ms), int(number)


def _node_view(raw: str) -> NodeView | None:
    """None for what another version wrote; the node's next heartbeat replaces it."""
    return _decoded(raw, NodeView)


def _decoded(raw: str, kind: type[DecodedT]) -> DecodedT | None:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError:
        return None


class _translated:  # noqa: N801 - reads as a statement
    """Raises Redis's errors as UnavailableError."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, redis.RedisError):
            raise UnavailableError(f"Redis does not answer: {error}") from error


def _nothing(_instance_id: str) -> Sums:
    return Sums()


def instance_facts(
    view: FleetView,
    *,
    models: Mapping[str, Model] | None = None,
    sent: Callable[[str], Sums] = _nothing,
    model: str | None = None,
) -> tuple[InstanceFacts, ...]:
    """The facts of a view's instances; those of one `model`, if it is given. `models`: for their KV bytes per token.
    `sent`: what was sent to an instance since its heartbeat.
    """
    kv_bytes = {name: known.kv_bytes_per_token for name, known in (models or {}).items()}
    endpoint_of = functools.cache(lambda model, region: Endpoint(model=model, region=region))
    facts = []
    for name, node in view.nodes.items():
        age_s = max(0.0, view.read_s - node.received_s)
        for report in node.heartbeat.instances:
            if model is not None and report.model != model:
                continue
            since = sent(report.instance_id)
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
                    sent_tokens=since.tokens,
                    sent_input_tokens=since.input_tokens,
                    requests=report.running + report.waiting,
                    waiting=report.waiting,
                    sent_requests=since.requests,
                    kv_bytes_per_token=kv_bytes.get(report.model, 0),
                    kind=report.kind,
                    prefill_wait_s=report.prefill_wait_s,
                    prefill_urgent_wait_s=report.prefill_urgent_wait_s,
                    prefill_token_s=report.prefill_token_s,
                    slot=report.slot,
                    load=node.heartbeat.load,
                    batch_max=report.batch_max,
                    input_tokens_per_s=report.input_tokens_per_s,
                    prefill_s=report.prefill_s,
                    decode_s=report.decode_s,
                    pooled=report.pooled,
                    context_tokens=report.context_tokens,
                )
            )
    return tuple(facts)
