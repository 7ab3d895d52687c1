"""The whole stack of several regions on one machine: each has its own Postgres, Valkey, control plane and agents.

The regions share the cluster of their Postgres servers, the first keys, and one folder of uploaded files, which stands
for a replicated bucket. A region can be killed and started again, which is what a drill does.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from pydantic import SecretStr

from ops.client.home import EmbeddedError, make_home, write_secrets
from ops.local.addresses import given_settings
from ops.local.bootstrap import keep_secrets
from ops.local.ports import free_port
from ops.local.postgres_cluster import PostgresCluster, Reach, region_home, regions_at
from ops.local.stack import LocalNode, LocalStack, Wiring, prepare_database


class ClusterMaker(Protocol):
    """How the cluster of the regions' Postgres servers is made."""

    def __call__(
        self, home: Path, regions: Sequence[str], *, fsync: bool = True, reach: Reach | None = None
    ) -> PostgresCluster: ...


class RegionalStack:
    """A `LocalStack` for each region of `nodes`, in the order of the nodes. The first region's gateway listens on
    `port`. `wiring`: of a region's processes, by region.

    Raises:
        EmbeddedError: the home cannot be used, or another stack runs on it.
        SupervisorError: the first primary does not start.
    """

    def __init__(
        self,
        home: Path,
        port: int,
        nodes: Sequence[LocalNode],
        *,
        environment: Mapping[str, str] | None = None,
        report: Callable[[str], None] | None = None,
        wiring: Callable[[str], Wiring] | None = None,
        reach: Reach | None = None,
        fsync: bool = True,
        make_cluster: ClusterMaker = PostgresCluster,
    ) -> None:
        self._nodes = tuple(nodes)
        self._environment = dict(environment or {})
        self._report = report or (lambda line: None)
        self._wiring = wiring or (lambda _region: Wiring())
        self.home = home.expanduser().resolve()
        self.regions = tuple(dict.fromkeys(node.region for node in nodes))
        make_home(self.home)
        if (self.home / "postgres").exists():
            also = f", or move {self.home / 'postgres'} away" if regions_at(self.home) else ""
            raise EmbeddedError(f"{self.home} holds a stack of one region; set TIDEPOOL_HOME to another folder{also}")
        first_keys = keep_secrets(self.home)
        self.keys = first_keys.secrets
        self._share_home()
        self.cluster = make_cluster(self.home, self.regions, fsync=fsync, reach=reach)
        settings = given_settings(self.home)

        def prepare(url: str) -> None:
            for fault in prepare_database(settings.model_copy(update={"database_url": SecretStr(url)}), first_keys):
                self._report(fault)

        self.cluster.prepare(prepare)
        self._ports = dict(zip(self.regions, (port, *(free_port() for _ in self.regions[1:])), strict=True))
        self.stacks = {region: self._make(region) for region in self.regions}

    def urls(self) -> dict[str, str]:
        """The gateways' addresses, by region."""
        return {region: stack.url for region, stack in self.stacks.items()}

    @property
    def url(self) -> str:
        """The first region's gateway."""
        return self.stacks[self.regions[0]].url

    def start(self) -> None:
        """Start all regions at once, since commits wait for another region; returns when all are ready.

        Raises:
            SupervisorError: a child does not get ready; all regions are stopped again.
        """
        try:
            with ThreadPoolExecutor(len(self.regions)) as pool:
                for started in [pool.submit(stack.supervisor.start) for stack in self.stacks.values()]:
                    started.result()
        except BaseException:
            self.stop()
            raise

    def run(self, on_ready: Callable[[], None]) -> None:
        """Start, call `on_ready`, and block until SIGTERM or SIGINT; then stop. Main thread only.

        Raises:
            SupervisorError: a child does not get ready.
        """
        first, *others = self.stacks.values()
        with ThreadPoolExecutor(max(1, len(others))) as pool:
            starting: list[Future[None]] = [pool.submit(stack.supervisor.start) for stack in others]

            def when_first_is_ready() -> None:
                for started in starting:
                    started.result()
                on_ready()

            try:
                first.supervisor.run(when_first_is_ready)
            finally:
                self.stop()

    def kill(self, region: str) -> None:
        """Kill every process of a region at once, as when its power is lost."""
        self.stacks[region].kill()
        self.cluster.members[region].kill()

    def revive(self, region: str) -> None:
        """Start a region that was killed: its Postgres follows whoever is the primary now.

        Raises:
            SupervisorError: a child does not get ready.
        """
        self.stacks[region] = self._make(region)
        self.stacks[region].supervisor.start()

    def stop(self) -> None:
        """Stop all regions."""
        with ThreadPoolExecutor(len(self.regions)) as pool:
            for stopped in [pool.submit(stack.stop) for stack in self.stacks.values()]:
                stopped.result()

    def _make(self, region: str) -> LocalStack:
        own = self.cluster.members[region]
        environment = self._environment | {
            "TIDEPOOL_DATABASE_URL": self.cluster.url(region),
            "TIDEPOOL_DATABASE_REPLICA_URL": own.url(),
            "TIDEPOOL_REDIS_URL": "",
            "TIDEPOOL_REGION": region,
            "TIDEPOOL_LIMIT_SHARES": "true",
        }
        return LocalStack(
            region_home(self.home, region),
            self._ports[region],
            tuple(node for node in self._nodes if node.region == region),
            environment=environment,
            report=lambda line: self._report(f"{region}: {line}"),
            wiring=self._wiring(region),
            postgres=self.cluster.children(region),
        )

    def _share_home(self) -> None:
        """Give each region's folder the keys and the files of all."""
        files = self.home / "files"
        files.mkdir(exist_ok=True)
        for region in self.regions:
            folder = region_home(self.home, region)
            make_home(folder)
            write_secrets(folder, self.keys)
            if not (folder / "files").exists():
                (folder / "files").symlink_to(files)
