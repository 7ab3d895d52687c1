"""Grouped first come, first served prefill (Aegaeon 4.2, algorithm 1), with other orders in place of FCFS. Pure.

Requests of one model form groups, so that a slot switches once per group and not once per request. A group accepts at
most `group_requests_max` requests over its life (serving one does not free capacity), which bounds how many later
requests can overtake an earlier one of another model. Batch requests have groups of their own, served last.

Where only one model waits there is nothing to save: its requests are served one by one in order, whatever their groups.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from heapq import nsmallest
from operator import itemgetter

from msgspec import Struct
from msgspec.structs import replace

from dataplane.protocol.tiers import NIW, Tier
from dataplane.scheduling.ordering import OrderKey, OrderSettings, order_key


@dataclass(frozen=True, kw_only=True)
class PrefillSettings(OrderSettings):
    """How requests are grouped, and the order of groups and of the requests in each."""

    group_requests_max: int = 8


class PrefillRequest(Struct, frozen=True, kw_only=True):
    """A request whose `tokens` (prompt, and tokens generated before) have no keys and values yet. `ttft_s`: seconds
    from arrival until its first token is due.
    """

    request_id: str
    model: str
    tokens: int
    tier: Tier
    arrived_s: float
    ttft_s: float

    @property
    def deadline_s(self) -> float:
        return self.arrived_s + self.ttft_s

    @property
    def in_background(self) -> bool:
        return self.tier == NIW


class PrefillGroup(Struct, frozen=True, kw_only=True):
    """Requests of one model that are served in a row. `group_id`: the id of the request that opened it; `admitted`: how
    many it accepted over its life; `waiting`: in order of arrival, never empty.
    """

    group_id: str
    model: str
    admitted: int
    waiting: tuple[PrefillRequest, ...]

    def takes(self, request: PrefillRequest, settings: PrefillSettings) -> bool:
        return (
            self.model == request.model
            and self.admitted < settings.group_requests_max
            and self.waiting[0].in_background == request.in_background
        )

    def key(self, now_s: float, settings: PrefillSettings) -> OrderKey:
        """The key of its most urgent request."""
        if len(self.waiting) == 1:
            return order_key(self.waiting[0], now_s, settings)
        return min([order_key(request, now_s, settings) for request in self.waiting])

    def in_order(self, now_s: float, settings: PrefillSettings) -> tuple[PrefillRequest, ...]:
        """Its requests in the order of service."""
        if len(self.waiting) == 1:
            return self.waiting
        return tuple(sorted(self.waiting, key=lambda request: order_key(request, now_s, settings)))


class PrefillQueue(Struct, frozen=True, kw_only=True):
    """The groups of one slot, in the order they were opened."""

    groups: tuple[PrefillGroup, ...] = ()

    def join(self, request: PrefillRequest, settings: PrefillSettings) -> "PrefillQueue":
        """The queue with the request in the first group that accepts it, else in a new one at the end."""
        for index, group in enumerate(self.groups):
            if group.takes(request, settings):
                grown = replace(group, admitted=group.admitted + 1, waiting=(*group.waiting, request))
                return PrefillQueue(groups=(*self.groups[:index], grown, *self.groups[index + 1 :]))
        opened = PrefillGroup(group_id=request.request_id, model=request.model, admitted=1, waiting=(request,))
        return PrefillQueue(groups=(*self.groups, opened))

    def remove(self, request_id: str) -> "PrefillQueue":
        """The queue without the request, and without groups that are empty then. Unknown ids are ignored."""
        groups = self.groups
        for index, group in enumerate(groups):
            for request in group.waiting:
                if request.request_id == request_id:
                    waiting = tuple([other for other in group.waiting if other is not request])
                    rest = (replace(group, waiting=waiting),) if waiting else ()
                    return PrefillQueue(groups=groups[:index] + rest + groups[index + 1 :])
        return self

    def without(self, ids: Set[str]) -> "PrefillQueue":
        """The queue without some requests, and without groups that are empty then."""
        rests = [
            (group, tuple([request for request in group.waiting if request.request_id not in ids]))
            for group in self.groups
        ]
        return PrefillQueue(groups=tuple([replace(group, waiting=rest) for group, rest in rests if rest]))

    def ahead_of(
        self, model: str, tier: Tier, ttft_s: float, now_s: float, settings: PrefillSettings
    ) -> "PrefillQueue":
        """What a request of the model and tier arriving now, its first token due in `ttft_s`, could not overtake:
        requests where nothing else waits than its model, else whole groups.
        """
        if not self.groups:
            return self
        newcomer = PrefillRequest(request_id="", model=model, tokens=0, tier=tier, arrived_s=now_s, ttft_s=ttft_s)
        key = order_key(newcomer, now_s, settings)
        if _only_model(self.groups) == model:
            waiting = (request for group in self.groups for request in group.waiting)
            return self.without({one.request_id for one in waiting if order_key(one, now_s, settings) > key})
        return PrefillQueue(groups=tuple([group for group in self.groups if group.key(now_s, settings) <= key]))

    def load_s(
        self,
        prefills_s: Callable[[Sequence[PrefillRequest]], float],
        switch_s: Callable[[str], float],
        running_model: str | None,
    ) -> float:
        """Seconds to serve all groups in order: the requests of each, and a switch wherever the model changes."""
        total_s = 0.0
        for group in self.groups:
            if group.model != running_model:
                total_s += switch_s(group.model)
            running_model = group.model
            total_s += prefills_s(group.waiting)
        return total_s


def choose_prefill_slot(
    request: PrefillRequest,
    queues: Mapping[int, PrefillQueue],
    load_s: Callable[[int], float],
    settings: PrefillSettings,
) -> int:
    """The slot of the first group that accepts the request, slots in order of number; else the least loaded slot.

    `queues` are by slot, at least one; `load_s(slot)`, called only if no group accepts it: a slot's seconds to serve
    all groups, see `PrefillQueue.load_s`.
    """
    assert queues
    slots = sorted(queues)
    for slot in slots:
        for group in queues[slot].groups:
            if group.takes(request, settings):
                return slot
    return min(slots, key=load_s)


class GroupState(Struct, frozen=True, kw_only=True):
    """`serving`: the id of the group that was begun. `overtaken`: the front group that one was served before."""

    serving: str | None = None
    overtaken: str | None = None


class GroupChoice(Struct, frozen=True, kw_only=True):
    """Serve `group` now, and `following` after it. `state` applies once that is begun."""

    group: PrefillGroup
    following: tuple[PrefillGroup, ...]
    state: GroupState


def choose_group(
    groups: Sequence[PrefillGroup],
    running_model: str | None,
    state: GroupState,
    now_s: float,
    settings: PrefillSettings,
) -> GroupChoice | None:
    """The group to serve now, of those that can run; None if there are none.

    A group that was begun is served to its end. Then the first in order, except that a group of the running model may
    be served before it, which saves two switches: once per front group, so that it waits for one more group at most.
    Neither puts batch requests before interactive ones. Of one model alone, the first requests in order are the group.
    """
    if not groups:
        return None
    if len(groups) == 1:
        ordered = peers = groups
    elif _only_model(groups):
        return _first_of_one_model(groups, state, now_s, settings)
    else:
        keyed = sorted([(group.key(now_s, settings), group) for group in groups], key=itemgetter(0))
        ordered = [group for _, group in keyed]
        peers = [group for key, group in keyed if key[0] == keyed[0][0][0]]
    front = ordered[0]
    begun = next((group for group in peers if group.group_id == state.serving), None)
    at_hand = next((group for group in peers if group.model == running_model), None)
    overtaken = state.overtaken
    if begun:
        chosen = begun
    elif at_hand and at_hand is not front and overtaken != front.group_id:
        chosen, overtaken = at_hand, front.group_id
    else:
        chosen = front
    return GroupChoice(
        group=chosen,
        following=tuple([group for group in ordered if group is not chosen]),
        state=GroupState(serving=chosen.group_id, overtaken=overtaken),
    )


def _only_model(groups: Sequence[PrefillGroup]) -> str | None:
    """The model of all groups, if it is one."""
    model = groups[0].model
    return model if all(group.model == model for group in groups) else None


def _first_of_one_model(
    groups: Sequence[PrefillGroup], state: GroupState, now_s: float, settings: PrefillSettings
) -> GroupChoice:
    """As many requests as a group accepts, as the group that was opened first."""
    keyed = [(order_key(request, now_s, settings), request) for group in groups for request in group.waiting]
    first = nsmallest(settings.group_requests_max, keyed, key=itemgetter(0))
    chosen = tuple([request for key, request in first if key[0] == first[0][0][0]])
    following = PrefillQueue(groups=tuple(groups)).without({request.request_id for request in chosen}).groups
    return GroupChoice(
        group=replace(groups[0], waiting=chosen),
        following=following,
        state=replace(state, serving=groups[0].group_id),
    )
