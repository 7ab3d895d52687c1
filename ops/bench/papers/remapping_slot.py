"""A slot whose models share its memory, when KV runs short: the same requests, several ways out. Simulated time.

    recompute  the last request of the batch is dropped, and prefilled again once there is room (vLLM)
    swap       its KV goes to host memory and comes back, request by request
    pie        KV of layers that do not run is in host memory, out and in again in every step, as much of it as the step
               hides (Pie); beyond that, recompute
    remap      layers are given up, by the live controller (Oneiros); beyond that, recompute
    auto       of remap, swap, recompute and keeping a prompt waiting what costs least, by the live choice

Temporal sharing: one model runs at a time, until it has nothing to do or its turn is over; then the next with work.
Spatial sharing: all run at once, each at 1/k of the speed while k are busy. A waiting prompt goes before the batch, and
prompts are prefilled whole, as in the engine that the paper changed (vLLM 0.7.3 chunks none of models with contexts up
to 32 Ki by default); or in chunks beside the batch. KV is counted by the token.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from ops.bench.papers.remapping_memory import Counts, SharedMemory, SharedSettings
from ops.bench.papers.remapping_models import SharedModel
from ops.bench.papers.remapping_tenants import Ask, Tenant


class _Step(NamedTuple):
    """What a model runs: whose prompts are complete after it, and whether its batch makes a token."""

    asks: list[Ask]
    decodes: bool


class SharedSlot:
    """Serves to the end. `tenants` hold what came of it. `steps_s`: how long each decode step took, with its waits, and
    how many tokens it made.
    """

    def __init__(self, models: Sequence[SharedModel], settings: SharedSettings) -> None:
        self.tenants = [Tenant(model=m, load_s=m.layer_bytes / settings.wire.bytes_per_s) for m in models]
        self.now_s = 0.0
        self.batch_peak = 0
        self.steps_s: list[tuple[float, int]] = []
        self._settings = settings
        self._memory = SharedMemory(self.tenants, settings, self._is_active)
        self._by_name = {tenant.model.name: tenant for tenant in self.tenants}
        self._running: dict[str, _Step] = {}
        self._ends: list[tuple[float, int]] = []
        self._turn: Tenant | None = None
        self._turn_began_s = 0.0

    @property
    def counts(self) -> Counts:
        """What was done for want of KV memory."""
        return self._memory.counts

    def serve(self, asks: Iterable[Ask]) -> None:
        """Serve requests, in the order in which they come, until the last token of the last one."""
        coming = deque(asks)
        while coming or self._ends:
            self.now_s = min(self._ends[0][0] if self._ends else inf, coming[0].arrived_s if coming else inf)
            while self._ends and self._ends[0][0] <= self.now_s:
                self._over(self.tenants[heappop(self._ends)[1]])
            while coming and coming[0].arrived_s <= self.now_s:
                ask = coming.popleft()
                self._by_name[ask.model].waiting.append(ask)
            self._begin()
        assert not any(tenant.has_work for tenant in self.tenants), "requests were left over"

    def _over(self, tenant: Tenant) -> None:
        step = self._running.pop(tenant.model.name)
        if step.decodes:
            tenant.decoded(self.now_s)
        tenant.prefilled(step.asks, self.now_s)

    def _begin(self) -> None:
        """Begin a step of every model that may run and does not."""
        if self._settings.sharing == "spatial":
            for tenant in self.tenants:
                if tenant.has_work and tenant.model.name not in self._running:
                    self._memory.look(self.now_s, at_once=False)
                    self._begin_step(tenant)
        elif not self._running:
            for tenant in self._in_turn():
                self._take_turn(tenant)
                if self._begin_step(tenant):
                    break
        arriving = [tenant for tenant in self.tenants if tenant.arriving]
        if arriving and not self._running:  # an empty step, until the first KV is there
            tenant = min(arriving, key=lambda tenant: tenant.arriving[0][0])
            self._run(tenant, _Step([], decodes=True), tenant.arriving[0][0])

    def _in_turn(self) -> list[Tenant]:
        """Models with work: the one whose turn it is, unless it is over, then the others in order."""
        if self._turn is None:
            return [tenant for tenant in self.tenants if tenant.has_work]
        own = self.tenants.index(self._turn)
        others = [tenant for tenant in self.tenants[own + 1 :] + self.tenants[:own] if tenant.has_work]
        if not self._turn.has_work:
            return others
        ended = self.now_s - self._turn_began_s >= self._settings.turn_s
        return [*others, self._turn] if ended else [self._turn, *others]

    def _take_turn(self, tenant: Tenant) -> None:
        changes = tenant is not self._turn
        if changes or self.now_s - self._turn_began_s >= self._settings.turn_s:
            self._turn, self._turn_began_s = tenant, self.now_s
            tenant.used_s = self.now_s
        self._memory.look(self.now_s, at_once=changes)

    def _is_active(self, tenant: Tenant) -> bool:
        return tenant is self._turn if self._settings.sharing == "temporal" else tenant.has_work

    def _begin_step(self, tenant: Tenant) -> bool:
        """False: it can do nothing now."""
        memory, chunk_tokens = self._memory, self._settings.chunk_tokens
        memory.bring_back(tenant, self.now_s)
        asks, room_s = self._admit(tenant)
        tokens = [ask.prefill_tokens for ask in asks]
        decodes = False
        if chunk_tokens is not None or not asks:
            room_s += memory.make_room(tenant, None, self.now_s) or 0.0
            decodes = bool(tenant.batch)
        if chunk_tokens is not None:
            tenant.filling.extend(asks)
            tokens = [min(chunk_tokens - len(tenant.batch), tenant.unfilled_tokens)]
            asks = tenant.fill(tokens[0])
        if not decodes and not any(tokens):
            return False
        compute_s = tenant.compute_s(tokens, decodes=decodes)
        waited_s = memory.waits_s(tenant, compute_s)
        memory.counts.waited_s += waited_s
        busy = len(self._running) + 1
        last_layer_s = tenant.loaded_s + compute_s / tenant.model.layers
        ends_s = room_s + max(self.now_s + busy * (compute_s + waited_s), last_layer_s)
        if decodes:
            self.batch_peak = max(self.batch_peak, len(tenant.batch))
            self.steps_s.append((ends_s - self.now_s, len(tenant.batch)))
        self._run(tenant, _Step(asks, decodes), ends_s)
        return True

    def _run(self, tenant: Tenant, step: _Step, ends_s: float) -> None:
        self._running[tenant.model.name] = step
        heappush(self._ends, (ends_s, self.tenants.index(tenant)))

    def _admit(self, tenant: Tenant) -> tuple[list[Ask], float]:
        """The prompts to begin now, in order, as many as a step takes; and how long their room is waited for."""
        asks: list[Ask] = []
        room_s = 0.0
        tokens = tenant.unfilled_tokens
        if tokens >= self._settings.prefill_tokens_max:
            return asks, room_s
        while tenant.waiting and not tenant.away and len(tenant.batch) + len(asks) < self._settings.batch_max:
            ask = tenant.waiting[0]
            if asks and tokens + ask.prefill_tokens > self._settings.prefill_tokens_max:
                break
            found_s = self._memory.make_room(tenant, ask, self.now_s)
            if found_s is None:
                break
            room_s += found_s
            tokens += ask.prefill_tokens
            tenant.kv_tokens += ask.prefill_tokens
            asks.append(tenant.waiting.popleft())
        return asks, room_s
