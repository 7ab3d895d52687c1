"""podman, as it runs without systemd and a registry, and in a virtual machine: Debian 12's, with runc."""

import base64
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

TIMEOUT_S = 300.0
CONF = """
[containers]
base_hosts_file = "{hosts}"
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
log_driver = "k8s-file"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
[network]
network_backend = "netavark"
"""


class PodmanError(Exception):
    """A command of podman failed; the message has its last words."""


class Podman:
    """The machine's podman. `names` resolve to the loopback interface in every container. `folder` keeps its files."""

    def __init__(self, folder: Path, names: Sequence[str] = ()) -> None:
        self._folder = folder
        hosts = folder / "hosts"
        hosts.write_text("".join(f"127.0.0.1 {name}\n" for name in ("localhost", *names)))
        conf = folder / "containers.conf"
        conf.write_text(CONF.format(hosts=hosts))
        self.environment = os.environ | {"CONTAINERS_CONF": str(conf), "DISABLE_HC_SYSTEMD": "true"}

    def run(self, *arguments: str, text: str | None = None) -> str:
        """What a command printed."""
        done = subprocess.run(
            ["podman", *arguments],
            env=self.environment,
            input=text,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
        if done.returncode:
            raise PodmanError(f"podman {' '.join(arguments[:3])}: {done.stderr.strip()[-2000:]}")
        return done.stdout

    def inspect(self, container: str) -> dict[str, Any]:
        """All that podman knows of a container."""
        [found] = json.loads(self.run("inspect", container))
        return dict(found)

    def keep_variables(self, secret: str, entries: Mapping[str, str]) -> None:
        """A Secret that pods refer to by `secretKeyRef`: podman 4.3 reads it as JSON of its entries."""
        self.forget(secret)
        encoded = {name: base64.b64encode(value.encode()).decode() for name, value in entries.items()}
        self.run("secret", "create", secret, "-", text=json.dumps(encoded))

    def forget(self, secret: str) -> None:
        """Remove a Secret, if there is one of this name."""
        if secret in self.run("secret", "ls", "--format={{.Name}}").split():
            self.run("secret", "rm", secret)

    def play(self, manifests: Sequence[Mapping[str, Any]]) -> None:
        """Run the pods of manifests on the host's network."""
        self.run("play", "kube", "--network=host", str(self._written(manifests)))

    def play_down(self, manifests: Sequence[Mapping[str, Any]]) -> None:
        """Stop and remove the pods of manifests, those that are there."""
        for manifest in manifests:
            try:
                self.run("play", "kube", "--down", str(self._written([manifest])))
            except PodmanError as error:
                if "no such pod" not in str(error):
                    raise

    def _written(self, manifests: Sequence[Mapping[str, Any]]) -> Path:
        path = self._folder / "played.yaml"
        path.write_text(yaml.safe_dump_all(manifests, sort_keys=False))
        return path
