"""How many deferred requests (NIW) are released to which endpoint, and whose: as many as there is room for.

An instance has room for one more request of `expected` KV bytes while

    used + expected of what is deferred there  <  threshold x capacity           (and the request fits the capacity)
    requests there                             <  (1 + queue_share) x batch_max

The threshold is `below_one`; near its deadline a request counts as interactive, up to `urgent_utilization_max`.
Reports are about a second old, so the caller itself counts what it has released, and what of that has ended.

Room says what memory holds, not what interactive requests bear. So each endpoint has a window, the most deferred
requests in flight there, one for all dispatchers (additive increase, multiplicative decrease):

    window += growth x instances x seconds     while half of it is in use
    window *= cut, and nothing for hold_s      at a sign of trouble: a refusal, a load above 1, utilization by others
                                               that rises, or, beside interactive requests, a first token that
                                               would be late

It is at least the paper's signals (SageServe 6.2): one request below 60 % utilization, two below 50 %. An interactive
request waits for the prefill that runs when it arrives. So beside interactive requests, batches have `beside_share` of
the time for prefills, at most that of two signals at once, or the signals each second if these are more; or as many
begin each second as have to, so that no batch becomes urgent: its lines left divided by the time left until then, a
rate that rises while it is not reached. An urgent request needs room but no window.

Then order: urgent requests before others, tenants in rotation, and of a tenant the nearest deadline. Models that share
a slot share its memory, and have it in time slices.
"""

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from msgspec.structs import replace

from controlplane.policies.decisions import Release
from controlplane.policies.facts import Endpoint, GroupFacts, InstanceFacts, ReleaseFacts, SlotId, Window
from controlplane.policies.routing import is_usable, predicted_wait_s
from dataplane.protocol.tiers import Tier

_ROUNDING = 1e-6
_GUESS_SHARE = 0.25
"""A request of unknown size is expected to take at most this share of an instance's KV memory."""


@dataclass(frozen=True, kw_only=True)
class ReleaseSettings:
    """The thresholds and the controller of the module's docstring.

    Requests are urgent that are older than `aged_s` or have less than `left_share` of their window left. An instance
    that does not report how many sequences it runs at once is taken to run `batch_max`. Requests of a batch of which
    none has ended are expected to take `tokens_guess` tokens of KV memory, or less on small instances.

    A window grows by `growth` requests a second and instance, and by `growth_after_cut` for `calm_s` after a cut. A
    first token would be late if an interactive request waited for over `late_share` of its objective. Utilization rises
    if others take `rise_max` more between two steps, to above `below_two`. A window that has rested for `forget_s`
    begins anew. `beside_share`: of an instance's time, for prefills of batches beside interactive requests;
    or an endpoint's signals in each `signal_s`, if these are more.
    """

    below_one: float = 0.6
    below_two: float = 0.5
    urgent_utilization_max: float = 0.7
    aged_s: float = 36_000.0
    left_share: float = 0.25
    stale_s: float = 5.0
    batch_max: int = 32
    queue_share: float = 0.25
    tokens_guess: float = 2048.0
    growth: float = 32.0
    growth_after_cut: float = 2.0
    calm_s: float = 60.0
    cut: float = 0.5
    hold_s: float = 2.0
    forget_s: float = 10.0
    beside_share: float = 0.05
    signal_s: float = 1.0
    late_share: float = 0.5
    iw_f_ttft_s: float = 1.0
    iw_n_ttft_s: float = 60.0
    load_max: float = 1.0
    rise_max: float = 0.1
    time_slice_s: float = 30.0


def choose_windows(
    facts: ReleaseFacts, refused: frozenset[Endpoint], now_s: float, settings: ReleaseSettings
) -> Mapping[Endpoint, Window]:
    """The next windows, of the models that wait. `refused`: endpoints whose nodes have refused a deferred request since
    the last step.
    """
    endpoints = _endpoints(facts.instances, settings)
    waiting = {group.model for group in facts.groups}
    beside = {slot for endpoint in facts.interactive for slot in map(_slot, endpoints.get(endpoint, ()))}
    counts: Counter[str] = Counter()
    for endpoint, instances in endpoints.items():
        counts[endpoint.model] += len(instances)
    windows = {}
    for endpoint, instances in endpoints.items():
        if endpoint.model not in waiting:
            continue
        is_beside = not beside.isdisjoint(map(_slot, instances))
        trouble = (
            endpoint in refused
            or any(instance.load > settings.load_max for instance in instances)
            or (is_beside and any(_would_be_late(instance, settings) for instance in instances))
        )
        utilization = _utilization(instances)
        window = _step(facts, endpoint, instances, utilization, trouble, now_s, settings)
        if is_beside and not _is_held(window, now_s, settings):
            needed_per_s = _needed_per_s(facts, endpoint.model, settings) * len(instances) / counts[endpoint.model]
            least_per_s = max(needed_per_s, _signals(utilization, settings) / settings.signal_s)
            window = _beside_interactive(window, facts, endpoint, instances, least_per_s, now_s, settings)
        windows[endpoint] = window
    return windows


def choose_releases(facts: ReleaseFacts, now_s: float, settings: ReleaseSettings) -> tuple[Release, ...]:
    """What to release by the windows of `facts`, a request each, in an order that may be cut off anywhere without a
    loss to a tenant: urgent ones first, and first to the least utilized endpoint. Endpoints take turns, each with a
    request for each of its instances. One that is stale or held by its window gets none, and one whose model has the
    time slice of none of its slots urgent requests alone.
    """
    endpoints = _endpoints(facts.instances, settings)
    queues = {name: _Queue(groups, facts, settings) for name, groups in _by_model(facts.groups).items()}
    rooms = _Rooms(endpoints, settings)
    scheduled = _scheduled_slots(endpoints, queues.keys(), now_s, settings)
    takers = [
        _Taker(endpoint, queues[endpoint.model], rooms, scheduled[endpoint], facts, settings)
        for endpoint in endpoints
        if endpoint.model in queues and not _is_held(facts.windows.get(endpoint, Window()), now_s, settings)
    ]
    takers.sort(key=lambda t: (not t.scheduled, rooms.utilization(t.endpoint), t.endpoint))
    urgent = _taken_in_turns(takers, _Taker.take_urgent)
    others = _taken_in_turns(takers, _Taker.take_other)
    return tuple(islice(chain(urgent, others), facts.count_max))


def has_room(instances: Iterable[InstanceFacts], settings: ReleaseSettings) -> bool:
    """Whether any instance might take a request, be it urgent."""
    return any(
        room.takes(0, settings.urgent_utilization_max)
        for rooms in _Rooms(_endpoints(instances, settings), settings).by_endpoint.values()
        for room in rooms
    )


def expected_tokens(group: GroupFacts, settings: ReleaseSettings) -> float:
    """KV tokens that a request of the group takes in the end."""
    return settings.tokens_guess if group.tokens is None else group.tokens


def _taken_in_turns(takers: Iterable["_Taker"], take: Callable[["_Taker"], Release | None]) -> Iterator[Release]:
    left = list(takers)
    while left:
        for taker in tuple(left):
            for _ in range(taker.instances):
                release = take(taker)
                if release is None:
                    left.remove(taker)
                    break
                yield release


def _is_held(window: Window, now_s: float, settings: ReleaseSettings) -> bool:
    return now_s < window.cut_s + settings.hold_s


def _step(
    facts: ReleaseFacts,
    endpoint: Endpoint,
    instances: list[InstanceFacts],
    utilization: float,
    trouble: bool,
    now_s: float,
    settings: ReleaseSettings,
) -> Window:
    before = facts.windows.get(endpoint, Window())
    elapsed_s = now_s - before.stepped_s
    if elapsed_s > settings.forget_s:
        before, elapsed_s = Window(), 0.0
    others = _utilization_by_others(facts, endpoint, instances, settings)
    now = replace(before, utilization=others, stepped_s=max(now_s, before.stepped_s))
    if _is_held(before, now_s, settings):
        return now
    rises = others - before.utilization > settings.rise_max and utilization > settings.below_two
    in_flight = facts.in_flight.get(endpoint, 0)
    if trouble or rises:
        return replace(now, requests=settings.cut * min(before.requests, in_flight), cut_s=now_s)
    requests = before.requests
    if 2 * in_flight >= requests:
        growth = settings.growth_after_cut if now_s < before.cut_s + settings.calm_s else settings.growth
        requests += growth * len(instances) * min(max(0.0, elapsed_s), 1.0)
    most = sum(_batch_places(instance, settings) for instance in instances)
    return replace(now, requests=float(max(min(requests, most), _signals(utilization, settings))))


def _beside_interactive(
    window: Window,
    facts: ReleaseFacts,
    endpoint: Endpoint,
    instances: list[InstanceFacts],
    least_per_s: float,
    now_s: float,
    settings: ReleaseSettings,
) -> Window:
    """The window with as many more requests in flight as may begin now. What ends is not replaced before."""
    in_flight = facts.in_flight.get(endpoint, 0)
    tokens = _mean_input_tokens(facts, endpoint.model, settings)
    prefills_s = [tokens * each.prefill_token_s for each in instances if each.prefill_token_s]
    per_s = max(least_per_s, sum(settings.beside_share / prefill_s for prefill_s in prefills_s))
    saved_s = min(now_s - window.begun_s, 2 * settings.signal_s)
    begin = int(per_s * saved_s + _ROUNDING)
    if begin < 1:
        return replace(window, requests=min(window.requests, float(in_flight)))
    requests = min(max(window.requests, in_flight + 1.0), float(in_flight + begin))
    return replace(window, requests=requests, begun_s=now_s - saved_s + begin / per_s)


def _needed_per_s(facts: ReleaseFacts, model: str, settings: ReleaseSettings) -> float:
    """The least steady rate, over all endpoints of the model, at which its batches end before they become urgent."""
    lines, per_s = 0, 0.0
    for calm_s, left in sorted((_calm_s(each, settings), each.left) for each in facts.groups if each.model == model):
        if calm_s > 0:
            lines += left
            per_s = max(per_s, lines / calm_s)
    return per_s


def _mean_input_tokens(facts: ReleaseFacts, model: str, settings: ReleaseSettings) -> float:
    """Of the prompt of a request of the model, over its groups; at most all that it takes, where that is not known."""
    sizes = [
        expected_tokens(group, settings) if group.input_tokens is None else group.input_tokens
        for group in facts.groups
        if group.model == model
    ]
    return max(1.0, sum(sizes) / len(sizes)) if sizes else settings.tokens_guess


def _mean_tokens(facts: ReleaseFacts, model: str, settings: ReleaseSettings) -> float:
    """What a request of the model is expected to take, over its groups."""
    sizes = [expected_tokens(group, settings) for group in facts.groups if group.model == model]
    return sum(sizes) / len(sizes) if sizes else settings.tokens_guess


def _would_be_late(instance: InstanceFacts, settings: ReleaseSettings) -> bool:
    """Whether the first token of an interactive request would be late there."""
    for tier, ttft_s in ((Tier.IW_F, settings.iw_f_ttft_s), (Tier.IW_N, settings.iw_n_ttft_s)):
        wait_s = predicted_wait_s(instance, tier)
        if wait_s is not None and wait_s > settings.late_share * ttft_s:
            return True
    return False


def _share_of_kv(used_bytes: float, instances: Iterable[InstanceFacts]) -> float:
    """The share of the instances' KV memory that is used. 1 without capacity."""
    capacity_bytes = sum(instance.kv_capacity_bytes for instance in instances)
    return max(0.0, used_bytes / capacity_bytes) if capacity_bytes else 1.0


def _utilization(instances: Sequence[InstanceFacts]) -> float:
    """Of an endpoint's KV memory, with all that its own deferred requests will take."""
    taken_bytes = (each.kv_bytes_per_token * (each.deferred_tokens + each.sent_tokens) for each in instances)
    return _share_of_kv(sum(each.kv_used_bytes for each in instances) + sum(taken_bytes), instances)


def _signals(utilization: float, settings: ReleaseSettings) -> int:
    """The paper's: two below 50 %, one below 60 %."""
    return int(utilization < settings.below_one) + int(utilization < settings.below_two)


def _utilization_by_others(
    facts: ReleaseFacts, endpoint: Endpoint, instances: list[InstanceFacts], settings: ReleaseSettings
) -> float:
    """Utilization of an endpoint without the deferred requests of any dispatcher. Those of others are in the reports,
    each with about what a request of this model takes.
    """
    elsewhere = facts.in_flight.get(endpoint, 0) - sum(instance.deferred_requests for instance in instances)
    tokens = max(0, elsewhere) * _mean_tokens(facts, endpoint.model, settings)
    used_bytes = sum(each.kv_used_bytes for each in instances) - tokens * instances[0].kv_bytes_per_token
    return _share_of_kv(used_bytes, instances)


def _endpoints(instances: Iterable[InstanceFacts], settings: ReleaseSettings) -> dict[Endpoint, list[InstanceFacts]]:
    """The instances that take deferred requests and reported recently, by endpoint: those with GPUs of their own, where
    there are any, so that a reserve stays free.
    """
    endpoints: dict[Endpoint, list[InstanceFacts]] = {}
    for instance in instances:
        if is_usable(instance, settings.stale_s) and instance.kind.serves(Tier.NIW):
            endpoints.setdefault(instance.endpoint, []).append(instance)
    return {at: [one for one in found if not one.pooled] or found for at, found in endpoints.items()}


def _by_model(groups: Iterable[GroupFacts]) -> dict[str, list[GroupFacts]]:
    """The groups with waiting requests by model, the nearest deadline first."""
    found: dict[str, list[GroupFacts]] = {}
    for group in sorted(groups, key=lambda group: (group.left_s, group.batch)):
        if group.waiting:
            found.setdefault(group.model, []).append(group)
    return found


def _batch_places(instance: InstanceFacts, settings: ReleaseSettings) -> int:
    """How many requests an instance may have: those of a batch, and a queue so that none ends before the next comes."""
    batch_max = settings.batch_max if instance.batch_max is None else instance.batch_max
    return int((1 + settings.queue_share) * batch_max)


def _slot(instance: InstanceFacts) -> SlotId:
    return SlotId(node_id=instance.node_id, number=instance.slot)


def _scheduled_slots(
    endpoints: Mapping[Endpoint, list[InstanceFacts]], models: Iterable[str], now_s: float, settings: ReleaseSettings
) -> dict[Endpoint, set[SlotId]]:
    """The slots of each endpoint whose time slice no other model has. Only models with waiting requests get time
    slices; whose it is depends on the time alone, so that all dispatchers agree.
    """
    waiting = set(models)
    slots: dict[SlotId, set[str]] = {}
    for endpoint, instances in endpoints.items():
        if endpoint.model in waiting:
            for instance in instances:
                slots.setdefault(_slot(instance), set()).add(endpoint.model)
    slice_number = int(now_s / settings.time_slice_s)
    scheduled = {slot: sorted(models)[slice_number % len(models)] for slot, models in slots.items()}
    return {
        endpoint: {slot for slot in map(_slot, instances) if scheduled.get(slot, endpoint.model) == endpoint.model}
        for endpoint, instances in endpoints.items()
    }


class _Room:
    """What an instance has left while one release is decided."""

    def __init__(self, instance: InstanceFacts, settings: ReleaseSettings) -> None:
        self.instance = instance
        self.slot = _slot(instance)
        self.used_bytes = float(instance.kv_used_bytes)
        self.places = _batch_places(instance, settings) - instance.requests - instance.deferred_requests
        self.places -= instance.sent_requests

    def takes(self, tokens: float, threshold: float) -> bool:
        capacity_bytes = self.instance.kv_capacity_bytes
        fits = self.used_bytes + tokens * self.instance.kv_bytes_per_token <= capacity_bytes
        return self.places > 0 and fits and self.used_bytes < threshold * capacity_bytes


class _Rooms:
    """The room of all instances."""

    def __init__(self, endpoints: Mapping[Endpoint, list[InstanceFacts]], settings: ReleaseSettings) -> None:
        self.by_endpoint = {
            endpoint: [_Room(instance, settings) for instance in instances] for endpoint, instances in endpoints.items()
        }
        self._slots: dict[SlotId, list[_Room]] = {}
        for room in (room for rooms in self.by_endpoint.values() for room in rooms):
            self._slots.setdefault(room.slot, []).append(room)
        for room in (room for rooms in self.by_endpoint.values() for room in rooms):
            self._use(room, room.instance.deferred_tokens + room.instance.sent_tokens)

    def utilization(self, endpoint: Endpoint) -> float:
        """Of KV memory, with all that deferred requests will take there, also those of other models on its slots."""
        rooms = self.by_endpoint[endpoint]
        return _share_of_kv(sum(room.used_bytes for room in rooms), [room.instance for room in rooms])

    def take(self, endpoint: Endpoint, slots: set[SlotId] | None, group: GroupFacts, threshold: float,
             settings: ReleaseSettings) -> str | None:  # fmt: skip
        """Use the room of the instance with most places, in one of the `slots` (None: any); its id, if there is one."""
        best: tuple[_Room, float] | None = None
        for room in self.by_endpoint[endpoint]:
            if (slots is None or room.slot in slots) and (best is None or room.places > best[0].places):
                tokens = _tokens_on(room.instance, group, settings)
                if room.takes(tokens, threshold):
                    best = room, tokens
        if best is None:
            return None
        best[0].places -= 1
        self._use(*best)
        return best[0].instance.instance_id

    def _use(self, room: _Room, tokens: float) -> None:
        """Models that share the slot have so much less too."""
        used_bytes = tokens * room.instance.kv_bytes_per_token
        for each in self._slots[room.slot]:
            if each is room or each.instance.endpoint.model != room.instance.endpoint.model:
                each.used_bytes += used_bytes


def _tokens_on(instance: InstanceFacts, group: GroupFacts, settings: ReleaseSettings) -> float:
    """What a request takes there: no more than the memory holds, which is the limit of its context too."""
    if not instance.kv_bytes_per_token:
        return 0.0
    share = _GUESS_SHARE if group.tokens is None else 1.0
    return min(expected_tokens(group, settings), share * instance.kv_capacity_bytes / instance.kv_bytes_per_token)


class _Rotation:
    """Waiting requests of one model: of the tenant after the last one, the group with the nearest deadline."""

    def __init__(self, groups: Iterable[GroupFacts]) -> None:
        self._groups: dict[str, deque[GroupFacts]] = {}
        for group in groups:
            self._groups.setdefault(group.tenant, deque()).append(group)
        self._tenants = sorted(self._groups)
        self._left = {group.batch: group.waiting for groups in self._groups.values() for group in groups}

    def after(self, tenant: str, passed_over: set[int]) -> GroupFacts | None:
        """The next group that is not among those `passed_over`."""
        begin = bisect_right(self._tenants, tenant)
        for name in (*self._tenants[begin:], *self._tenants[:begin]) if passed_over else self._next(begin):
            for group in self._groups[name]:
                if group.batch not in passed_over:
                    return group
        return None

    def _next(self, begin: int) -> list[str]:
        return [self._tenants[begin % len(self._tenants)]] if self._tenants else []

    def take(self, group: GroupFacts) -> None:
        self._left[group.batch] -= 1
        if not self._left[group.batch]:
            groups = self._groups[group.tenant]
            groups.remove(group)
            if not groups:
                self._tenants.remove(group.tenant)


class _Queue:
    """The waiting requests of a model, the urgent ones apart."""

    def __init__(self, groups: list[GroupFacts], facts: ReleaseFacts, settings: ReleaseSettings) -> None:
        self.urgent = _Rotation(group for group in groups if _is_urgent(group, settings))
        self.others = _Rotation(group for group in groups if not _is_urgent(group, settings))
        self.last_tenant = facts.last_tenants.get(groups[0].model, "")


class _Taker:
    """An endpoint that takes one request after the other while one release is decided."""

    def __init__(
        self,
        endpoint: Endpoint,
        queue: _Queue,
        rooms: _Rooms,
        scheduled: set[SlotId],
        facts: ReleaseFacts,
        settings: ReleaseSettings,
    ) -> None:
        self.endpoint = endpoint
        self.queue = queue
        self.scheduled = scheduled
        self.instances = len(rooms.by_endpoint[endpoint])
        self._rooms = rooms
        self._settings = settings
        self._window_left = facts.windows.get(endpoint, Window()).requests - facts.in_flight.get(endpoint, 0)
        self._too_large: set[int] = set()

    def take_urgent(self) -> Release | None:
        """The release of one more urgent request; None: there is no room for any that waits."""
        return self._take(self.queue.urgent, None, self._settings.urgent_utilization_max, urgent=True)

    def take_other(self) -> Release | None:
        """The same of one that is not urgent; None, too, where the window has been used."""
        if self._window_left < 1:
            return None
        return self._take(self.queue.others, self.scheduled, self._settings.below_one, urgent=False)

    def _take(
        self, rotation: _Rotation, slots: set[SlotId] | None, threshold: float, *, urgent: bool
    ) -> Release | None:
        while (group := rotation.after(self.queue.last_tenant, self._too_large)) is not None:
            instance_id = self._rooms.take(self.endpoint, slots, group, threshold, self._settings)
            if instance_id is not None:
                rotation.take(group)
                self.queue.last_tenant = group.tenant
                self._window_left -= 1
                return Release(
                    endpoint=self.endpoint,
                    instance_id=instance_id,
                    batch=group.batch,
                    tenant=group.tenant,
                    urgent=urgent,
                )
            self._too_large.add(group.batch)
        return None


def _is_urgent(group: GroupFacts, settings: ReleaseSettings) -> bool:
    return _calm_s(group, settings) < 0


def _calm_s(group: GroupFacts, settings: ReleaseSettings) -> float:
    """The time until the group becomes urgent."""
    kept_s = settings.left_share * (group.age_s + group.left_s)
    return min(settings.aged_s - group.age_s, group.left_s - kept_s)
