"""The worker groups of a node. Where its GPUs are regrouped, groups end and others begin.

The control plane says how the GPUs are grouped now, once the slots that go are empty (`DesiredInstances.layout`); a
node that starts again begins with its settings and then hears the same. Workers on a GPU start when the former ones on
it have ended, since they need its memory; workers on other GPUs do not notice.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace

import structlog

from dataplane.agent.worker_groups import WorkerGroup
from dataplane.agent.workers import NodeResources, WorkerSupervisor
from dataplane.protocol.errors import WorkerLostError
from dataplane.protocol.layouts import Layout, going_slots

log = structlog.get_logger()


class NodeGroups:
    """The groups of one node, by their numbers. `on_change` is called when a state has changed. `former`: what workers
    that ended counted, by `switches`, `preemptions`, `load_s`, `restarts` and `handovers`.
    """

    def __init__(self, resources: NodeResources, *, on_change: Callable[[], None]) -> None:
        settings = resources.settings
        self.former: defaultdict[str, float] = defaultdict(float)
        self._resources = resources
        self._on_change = on_change
        self._groups = {
            number: WorkerGroup(number, indices, resources, on_change=on_change)
            for number, indices in zip(settings.numbers, settings.groups, strict=True)
        }
        self._layout: Layout = tuple(worker.gpus for worker in settings.slots)
        self._tasks: asyncio.TaskGroup | None = None
        self._running: dict[int, list[asyncio.Task[None]]] = {}
        """By group, a task for each worker."""
        self._ending: list[tuple[range, asyncio.Task[None]]] = []
        """Tasks of groups that ended, with the GPUs that they may still use."""

    def __iter__(self) -> Iterator[WorkerGroup]:
        return iter(self._groups.values())

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, number: object) -> bool:
        return number in self._groups

    def __getitem__(self, number: int) -> WorkerGroup:
        return self._groups[number]

    @property
    def workers(self) -> tuple[WorkerSupervisor, ...]:
        """All workers by their numbers."""
        workers = (worker for group in self for worker in group.workers)
        return tuple(sorted(workers, key=lambda worker: worker.index))

    async def run(self) -> None:
        """Keep every worker running until cancelled; then end them."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for group in self:
                    self._start(group)
        finally:
            self._tasks = None

    def end_requests(self, error: WorkerLostError) -> None:
        for group in self:
            group.dispatcher.end_all(error)

    def regroup(self, layout: Layout) -> None:
        """Group the GPUs like that. What still runs on a slot that goes ends with an error."""
        if layout == self._layout:
            return
        try:
            settings = self._resources.settings.regrouped(layout)
        except ValueError as error:
            log.error("a layout that this node cannot have is ignored", layout=layout, error=str(error))
            return
        log.info("regrouping", before=self._layout, after=layout)
        for number in going_slots(self._layout, layout):
            self._end(self._groups.pop(number))
        resources = replace(self._resources, settings=settings)
        for index, number in enumerate(settings.numbers):
            if number not in self._groups:
                self._groups[number] = WorkerGroup(number, (index,), resources, on_change=self._on_change)
                self._start(self._groups[number])
        self._groups = dict(sorted(self._groups.items()))
        self._layout = layout
        self._on_change()

    def _start(self, group: WorkerGroup) -> None:
        """Run a group's workers, if the node runs, after those that ended on its GPUs."""
        if self._tasks is None:
            return
        self._ending = [(gpus, task) for gpus, task in self._ending if not task.done()]
        mine = range(group.number, group.number + group.gpus)
        former = [task for gpus, task in self._ending if gpus.start < mine.stop and mine.start < gpus.stop]
        self._running[group.number] = [self._tasks.create_task(_run(worker, former)) for worker in group.workers]

    def _end(self, group: WorkerGroup) -> None:
        group.follow(())
        group.dispatcher.end_all(WorkerLostError(f"slot {group.number} was regrouped"))
        for worker in group.workers:
            self.former["switches"] += worker.switches_total
            self.former["preemptions"] += worker.preemptions_total
            self.former["load_s"] += worker.load_s
            self.former["restarts"] += worker.restarts_total
        self.former["handovers"] += group.dispatcher.handovers_total
        gpus = range(group.number, group.number + group.gpus)
        for task in self._running.pop(group.number, ()):
            task.cancel()
            self._ending.append((gpus, task))


async def _run(worker: WorkerSupervisor, former: list[asyncio.Task[None]]) -> None:
    if former:
        await asyncio.wait(former)
    await worker.run()
