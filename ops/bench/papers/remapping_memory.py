"""The memory of a slot that models share: how large KV is, and what makes room when it is too small. Simulated time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from dataplane.engines.core.remapping.caps import wait_s
from dataplane.engines.core.remapping.control import RemapDecision, RemapFacts, RemapState, choose_remap
from dataplane.engines.core.remapping.relief import ReliefFacts, ReliefSettings, Victim, choose_relief
from dataplane.engines.core.remapping.relief import Way as Relief
from dataplane.engines.core.remapping.settings import RemapSettings
from ops.bench.papers.remapping_models import Wire
from ops.bench.papers.remapping_tenants import Ask, Tenant

Way = Literal["recompute", "swap", "pie", "remap", "auto"]
Sharing = Literal["temporal", "spatial"]
LOOK_S = 0.05
"""While layers are given up, so often it is seen to whether some can come back."""


@dataclass(frozen=True, kw_only=True)
class SharedSettings:
    """`shared_kv`: one KV memory for all models, else each has its own; whoever gives up layers shares. `turn_s`: how
    long a model runs at most while others wait. `watermark`: share of KV memory that no prompt is begun into.
    `chunk_tokens`: prompts are prefilled in chunks beside the batch, so many tokens of both together a step; None:
    whole, while the batch waits.
    """

    way: Way
    wire: Wire
    sharing: Sharing = "temporal"
    shared_kv: bool = False
    turn_s: float = 5.0
    batch_max: int = 256
    prefill_tokens_max: int = 2048
    chunk_tokens: int | None = None
    watermark: float = 0.01
    remap: RemapSettings = field(default_factory=RemapSettings)


@dataclass(kw_only=True)
class Counts:
    """What was done. Layers given up, moved and got back, and allocations that they could not cover; requests dropped
    or sent out; seconds that steps waited for the wire; the most bytes given up.
    """

    deepened: int = 0
    moved: int = 0
    reverted: int = 0
    not_covered: int = 0
    recomputed: int = 0
    swapped: int = 0
    waited_s: float = 0.0
    given_bytes_max: int = 0


class SharedMemory:
    """KV and layers of all models. `is_active`: whether a model decodes now, as remapping sees it."""

    def __init__(
        self, tenants: Sequence[Tenant], settings: SharedSettings, is_active: Callable[[Tenant], bool]
    ) -> None:
        self.counts = Counts()
        self._tenants = tenants
        self._settings = settings
        self._is_active = is_active
        self._remaps = settings.way in {"remap", "auto"}
        self._shared = settings.shared_kv or self._remaps
        self._state = RemapState()
        self._look_s = -inf
        self._wire_free_s = -inf

    def look(self, now_s: float, *, at_once: bool) -> None:
        """See whether layers can come back or change places; `at_once`: another model has become active."""
        if any(tenant.rotation.given_up for tenant in self._tenants) and (at_once or now_s >= self._look_s):
            self._look_s = now_s + LOOK_S
            self._remap(0, now_s)

    def make_room(self, tenant: Tenant, prompt: Ask | None, now_s: float) -> float | None:
        """Room for a prompt, or (None) for a token of each request of the batch. After so many seconds it is there;
        None: not now.
        """
        out_s = 0.0
        while missing_bytes := self._missing_bytes(tenant, prompt):
            relief = self._choose(tenant, prompt, missing_bytes, now_s)
            if relief == "remap" and self._remap(missing_bytes, now_s).deepened_layers:
                continue
            can_wait = prompt is not None and bool(tenant.batch)
            victim = None if relief == "refuse" or (relief == "remap" and can_wait) else self._victim(tenant)
            if victim is None:
                return None
            out_s += self._drive_out(*victim, swap=relief == "swap")
        return out_s

    def bring_back(self, tenant: Tenant, now_s: float) -> None:
        """Send for KV that is away, as long as it has room, and let those decode whose KV is there."""
        while tenant.away and not self._missing_bytes(tenant, tenant.away[0]):
            ask = tenant.away.popleft()
            tenant.kv_tokens += ask.context_tokens
            in_s = ask.context_tokens * tenant.model.kv_bytes_per_token / self._settings.wire.bytes_per_s
            self._wire_free_s = max(self._wire_free_s, now_s) + in_s
            tenant.arriving.append((self._wire_free_s, ask))
        for there_s, ask in tuple(tenant.arriving):
            if there_s <= now_s:
                tenant.arriving.remove((there_s, ask))
                tenant.join(ask)

    def waits_s(self, tenant: Tenant, compute_s: float) -> float:
        """What a step waits for beyond its computing: layers, or KV that goes out and in again."""
        if self._settings.way == "pie":
            used_bytes, size_bytes = self._kv_bytes(tenant)
            moved_s = 2 * max(used_bytes - size_bytes, 0) / self._settings.wire.both_bytes_per_s
            return max(moved_s - compute_s, 0.0)
        return wait_s(tenant.computing(compute_s), tenant.rotation) if tenant.rotation.given_up else 0.0

    def _kv_bytes(self, tenant: Tenant) -> tuple[int, int]:
        """What is used of the KV memory that the model uses, and its size."""
        if not self._shared:
            return tenant.kv_bytes, tenant.model.kv_bytes
        size_bytes = sum(other.model.kv_bytes + other.given_bytes for other in self._tenants)
        return sum(other.kv_bytes for other in self._tenants), size_bytes

    def _missing_bytes(self, tenant: Tenant, prompt: Ask | None) -> int:
        """By what KV memory is too small; 0 if it is not."""
        tokens = prompt.prefill_tokens if prompt else len(tenant.batch)
        used_bytes, size_bytes = self._kv_bytes(tenant)
        if self._settings.way == "pie":
            size_bytes += round(tenant.decode_s * self._settings.wire.both_bytes_per_s / 2)
        if prompt and used_bytes:
            size_bytes -= round(self._settings.watermark * size_bytes)
        return max(used_bytes + tokens * tenant.model.kv_bytes_per_token - size_bytes, 0)

    def _choose(self, tenant: Tenant, prompt: Ask | None, missing_bytes: int, now_s: float) -> Relief:
        """The way out. A prompt waits, where the batch goes on meanwhile."""
        if self._settings.way == "remap":
            return "remap"
        can_wait = prompt is not None and bool(tenant.batch)
        if self._settings.way != "auto":
            return "refuse" if can_wait else "swap" if self._settings.way == "swap" else "recompute"
        decision, _ = self._decide(missing_bytes, now_s)
        victim = self._victim(tenant)
        relief = choose_relief(
            ReliefFacts(
                remap_wait_s=None if decision.missing_bytes else 0.0,
                victim=victim and self._facts_of(*victim, tenant),
                can_wait=can_wait,
                running=len(tenant.batch),
                step_s=tenant.decode_s,
                room_s=tenant.steps_to_end * tenant.decode_s if tenant.batch else inf,
                out_bytes_per_s=self._settings.wire.bytes_per_s,
                in_bytes_per_s=self._settings.wire.bytes_per_s,
                wire_wait_s=max(self._wire_free_s - now_s, 0.0),
            ),
            ReliefSettings(),
        )
        return relief.way if relief else "refuse"

    def _facts_of(self, owner: Tenant, ask: Ask, asking: Tenant) -> Victim:
        tokens = ask.context_tokens + owner.steps - ask.joined
        return Victim(
            kv_bytes=tokens * owner.model.kv_bytes_per_token,
            recompute_s=owner.model.latency.prefill_s(tokens, tokens**2),
            idle_s=0.0 if owner is asking else self._settings.turn_s / 2,
        )

    def _victim(self, tenant: Tenant) -> tuple[Tenant, Ask] | None:
        """The last to join, of the models whose turn it is not, else of its own."""
        others = [other for other in self._tenants if other is not tenant and other.batch]
        if self._shared and self._settings.sharing == "temporal" and others:
            owner = others[-1]
        elif tenant.batch:
            owner = tenant
        else:
            return None
        return owner, owner.batch[next(reversed(owner.batch))]

    def _drive_out(self, owner: Tenant, ask: Ask, *, swap: bool) -> float:
        """Free a request's KV; after how many seconds it is free."""
        owner.leave(ask.number)
        owner.kv_tokens -= ask.context_tokens
        if not swap:
            owner.waiting.appendleft(ask)
            self.counts.recomputed += 1
            return 0.0
        owner.away.append(ask)
        self.counts.swapped += 1
        return ask.context_tokens * owner.model.kv_bytes_per_token / self._settings.wire.bytes_per_s

    def _decide(self, short_bytes: int, now_s: float) -> tuple[RemapDecision, RemapState]:
        used_bytes, size_bytes = self._kv_bytes(self._tenants[0])
        facts = RemapFacts(
            models=tuple(tenant.facts(active=self._is_active(tenant)) for tenant in self._tenants),
            short_bytes=short_bytes,
            free_bytes=max(size_bytes - used_bytes, 0),
        )
        return choose_remap(facts, self._state, now_s, self._settings.remap)

    def _remap(self, short_bytes: int, now_s: float) -> RemapDecision:
        """What the controller says. Layers that come back are sent for, one after another."""
        decision, self._state = self._decide(short_bytes, now_s)
        for tenant in self._tenants:
            rotation = decision.rotations.get(tenant.model.name)
            if rotation is None:
                continue
            back = tenant.rotation.given_up - rotation.given_up
            if back > 0:
                self._wire_free_s = max(self._wire_free_s, now_s) + back * tenant.load_s
                tenant.loaded_s = self._wire_free_s
            tenant.rotation = rotation
        counts = self.counts
        counts.deepened += decision.deepened_layers
        counts.moved += decision.moved_layers
        counts.reverted += decision.reverted_layers
        counts.not_covered += bool(decision.missing_bytes)
        counts.given_bytes_max = max(counts.given_bytes_max, sum(tenant.given_bytes for tenant in self._tenants))
        return decision
