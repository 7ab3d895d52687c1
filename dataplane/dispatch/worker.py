"""A worker as the dispatcher sees it."""

from typing import Literal, Protocol

from dataplane.engines.interface import EngineRequest, EngineStats

WorkerKind = Literal["both", "prefill", "decode"]
"""What a worker runs. A prefill worker transfers the KV of its requests after their first token."""


class Worker(Protocol):
    """One worker of a group. A command to a worker whose process has died is lost."""

    @property
    def index(self) -> int:
        """Its number on the node."""

    @property
    def kind(self) -> WorkerKind: ...

    @property
    def stats(self) -> EngineStats:
        """The latest statistics that its engine reported."""

    def is_ready(self, instance_id: str) -> bool:
        """Whether it takes requests of the instance."""

    def add(self, request: EngineRequest) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def release(self, request_id: str) -> None:
        """Free the KV of a request that this worker prefilled."""
