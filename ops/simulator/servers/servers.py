"""A dedicated instance as a server of the world: one model in a slot of its own."""

from collections.abc import Callable, Iterable
from math import inf

from controlplane.policies.facts import Endpoint, InstanceFacts
from dataplane.protocol.tiers import IW_F, IW_N, InstanceKind
from dataplane.scheduling.recent_tokens import RecentTokens
from ops.simulator.kernel.answers import Answers
from ops.simulator.kernel.costs import InstanceSettings, ModelCosts
from ops.simulator.kernel.events import Alarm, Events
from ops.simulator.kernel.requests import Request, Served
from ops.simulator.servers.dedicated import Instance


class DedicatedServer:
    """One instance. Meets `presence.Server`. `ended` is called for each request with its last token: when the
    instance is next read, or at that moment while it drains.

    A server that closes takes no more requests and says when the last one is out; one that is lost answers no more.
    """

    slots = 1
    switches = 0

    def __init__(
        self,
        instance_id: str,
        region: str,
        costs: ModelCosts,
        settings: InstanceSettings,
        *,
        gpu_type: str,
        events: Events,
        answers: Answers,
        ended: Callable[[Served], None],
        node_id: str | None = None,
        slot: int = 0,
    ) -> None:
        self.accepting = False
        self.kind = InstanceKind.MIXED
        self.instance_id = instance_id
        self.endpoint = Endpoint(model=costs.name, region=region)
        self._place = (node_id or instance_id, slot)
        self._gpu_type = gpu_type
        self._events = events
        self._instance = Instance(costs, settings, answers, ended)
        self._alarm: Alarm | None = None
        self._emptied: Callable[[], None] | None = None
        self._lost = False
        self._received = RecentTokens()

    @property
    def next_s(self) -> float:
        """The next end of a step or load; infinite if it is lost."""
        return inf if self._lost else self._instance.next_s

    @property
    def busy_s(self) -> float:
        self.advance(self._events.now_s)
        return self._instance.busy_s

    @property
    def remaining_tokens(self) -> int:
        """Prompt tokens and tokens of answers to come, as of the last completed step."""
        self.advance(self._events.now_s)
        return self._instance.remaining_tokens

    def fits(self, request: Request) -> bool:
        return self._instance.fits(request)

    def submit(self, served: Served) -> None:
        assert self.accepting
        self._received.add(served.request.prompt_tokens, self._events.now_s)
        self._instance.submit(served, self._events.now_s)
        if self._alarm is not None:
            self._alarm.set()

    def waiting(self) -> list[Served]:
        """Requests whose prefill has not begun, ordered by arrival."""
        self.advance(self._events.now_s)
        return [] if self._lost else self._instance.waiting

    def withdraw(self, served: Served) -> bool:
        """Take back a request. False: its prefill has begun, or the instance is lost."""
        self.advance(self._events.now_s)
        return not self._lost and self._instance.withdraw(served)

    def advance(self, now_s: float) -> None:
        """Simulate up to a moment, unless it is lost."""
        if self._instance.next_s <= now_s and not self._lost:
            self._instance.advance(now_s)
        if self._emptied is not None and self.next_s == inf:
            emptied, self._emptied = self._emptied, None
            self._events.unfollow(self)
            emptied()

    def keep_up(self) -> None:
        """Advance now, and by events from now on."""
        self.advance(self._events.now_s)
        self._alarm = self._alarm or Alarm(self, self._events)
        self._alarm.set()

    def reports(self, model: str | None = None) -> Iterable[InstanceFacts]:
        """The report of the instance as of the last completed step."""
        self.advance(self._events.now_s)
        instance = self._instance
        token_bytes, now_s = instance.model.kv_bytes_per_token, self._events.now_s
        yield InstanceFacts(
            instance_id=self.instance_id,
            node_id=self._place[0],
            slot=self._place[1],
            endpoint=self.endpoint,
            gpu_type=self._gpu_type,
            accepting=self.accepting,
            age_s=0.0,
            kv_used_bytes=instance.kv_tokens * token_bytes,
            kv_capacity_bytes=instance.kv_tokens_max * token_bytes,
            remaining_tokens=instance.remaining_tokens,
            requests=instance.requests,
            waiting=len(instance.waiting),
            kv_bytes_per_token=token_bytes,
            kind=self.kind,
            prefill_wait_s=instance.prefill_wait_s(IW_N, now_s),
            prefill_urgent_wait_s=instance.prefill_wait_s(IW_F, now_s),
            prefill_token_s=instance.model.latency.prefill_per_token_s,
            batch_max=instance.batch_max,
            input_tokens_per_s=self._received.per_s(now_s),
            context_tokens=instance.kv_tokens_max,
        )

    def open(self, kind: InstanceKind) -> None:
        """Accept requests; one that drained is advanced lazily again."""
        self.accepting, self.kind, self._emptied = True, kind, None
        if self._alarm is not None:
            self._alarm.stop()
            self._alarm = None
        self._events.follow(self)

    def close(self, emptied: Callable[[], None]) -> None:
        """Accept no more requests; call `emptied` when the last one has ended, or at once."""
        self.accepting, self._emptied = False, emptied
        self.keep_up()

    def lose(self) -> list[Served]:
        """Lose the instance; returns its requests."""
        self._emptied = None
        self.advance(self._events.now_s)
        self.accepting, self._lost = False, True
        self._events.unfollow(self)
        return self._instance.inside
