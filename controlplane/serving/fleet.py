"""What a gateway or dispatcher knows of the fleet without asking Postgres or Redis: the live view and the catalog.

Both are refreshed in the background, and the last good copy serves on while its source is away.
"""

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable

import anyio.to_thread
import structlog
from sqlalchemy.exc import SQLAlchemyError

from controlplane.errors import TidepoolError, UnknownModelError
from controlplane.policies.facts import InstanceFacts
from controlplane.settings import Settings
from controlplane.store.fleet import Catalog, load_catalog
from controlplane.store.live import EMPTY_VIEW, FleetView, LiveStore, instance_facts
from controlplane.store.session import Database
from controlplane.store.tables import Model

log = structlog.get_logger()
_CATALOG_REFRESH_S = 2.0
_VIEW_KEEP_S = 60.0


class FleetCache:
    """The live view (refreshed several times a second) and the catalog of models and regions (every two seconds).
    `sent`: tokens this process sent to instances since they last reported.
    """

    def __init__(self, database: Database, live: LiveStore, settings: Settings) -> None:
        self._database = database
        self._live = live
        self._settings = settings
        self._view: FleetView = EMPTY_VIEW
        self._view_at = 0.0
        self._catalog = Catalog(models={}, regions=(), nodes={})
        self._view_away = False
        self._sent: dict[str, deque[tuple[float, int]]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Read both once (errors are logged, not raised), then keep them fresh."""
        await self._refresh(self._read_catalog, "catalog")
        await self._refresh(self._read_view, "live view")
        self._tasks = [
            asyncio.create_task(self._repeat(self._read_view, self._settings.view_refresh_s, "live view")),
            asyncio.create_task(self._repeat(self._read_catalog, _CATALOG_REFRESH_S, "catalog")),
        ]

    async def stop(self) -> None:
        """Stop refreshing."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def model(self, name: str) -> Model:
        """A registered model; a name not seen yet is looked up once more in Postgres.

        Raises:
            UnknownModelError: nobody registered it.
        """
        if name not in self._catalog.models:
            await self._refresh(self._read_catalog, "catalog")
        found = self._catalog.models.get(name)
        if found is None:
            raise UnknownModelError(f"The model '{name}' does not exist.", param="model")
        return found

    def models(self) -> list[Model]:
        """All registered models by name."""
        return [self._catalog.models[name] for name in sorted(self._catalog.models)]

    def preference(self, origin: str | None) -> tuple[str, ...]:
        """Regions in the order a request from `origin` prefers them."""
        home = tuple(region for region in self._catalog.regions if region == origin)
        return home + tuple(region for region in self._catalog.regions if region != origin)

    def node_url(self, node: str) -> str | None:
        """Where a node's agent listens."""
        view = self._view.nodes.get(node)
        return view.url if view is not None else self._catalog.nodes.get(node)

    def instances(self) -> tuple[InstanceFacts, ...]:
        """Every instance of the view, aged by the time since it was read, with what was sent since it reported. While
        Redis is away nobody can know better, so the view does not age for its first minute.
        """
        unread_s = time.monotonic() - self._view_at
        aged_s = 0.0 if self._view_away and unread_s < _VIEW_KEEP_S else unread_s
        view = FleetView(read_s=self._view.read_s + aged_s, nodes=self._view.nodes)
        self._forget_reported()
        return instance_facts(
            view,
            kv_bytes_per_token={name: model.kv_bytes_per_token for name, model in self._catalog.models.items()},
            sent_tokens={instance: sum(tokens for _, tokens in sent) for instance, sent in self._sent.items()},
        )

    def note_sent(self, instance_id: str, tokens: int) -> None:
        """Count what is on its way to an instance until its next heartbeat shows it."""
        self._sent.setdefault(instance_id, deque()).append((time.monotonic(), tokens))

    def _forget_reported(self) -> None:
        """Drop what was sent before an instance's last heartbeat, and all of instances that are gone."""
        heard_at = {
            report.instance_id: self._view_at - (self._view.read_s - node.received_s)
            for node in self._view.nodes.values()
            for report in node.heartbeat.instances
        }
        for instance_id, sent in list(self._sent.items()):
            while sent and sent[0][0] <= heard_at.get(instance_id, math.inf):
                sent.popleft()
            if not sent:
                del self._sent[instance_id]

    def is_fresh(self) -> bool:
        """Whether the view was read within the time after which nodes count as unknown."""
        return time.monotonic() - self._view_at < self._settings.heartbeat_stale_s

    def _read_view(self) -> None:
        view = self._live.read_view()
        self._view, self._view_at = view, time.monotonic()

    def _read_catalog(self) -> None:
        with self._database.transaction() as session:
            self._catalog = load_catalog(session)

    async def _repeat(self, read: Callable[[], None], every_s: float, what: str) -> None:
        down = False
        while True:
            await asyncio.sleep(every_s)
            ok = await self._refresh(read, what, quiet=down)
            if read == self._read_view:
                self._view_away = not ok
            if ok and down:
                log.info("source is back", what=what)
            down = not ok

    async def _refresh(self, read: Callable[[], None], what: str, *, quiet: bool = False) -> bool:
        try:
            await anyio.to_thread.run_sync(read)
        except (TidepoolError, SQLAlchemyError) as error:
            if not quiet:
                log.warning("source is away; the last copy serves on", what=what, error=str(error).splitlines()[0])
            return False
        return True
