"""The chart's release on one machine: rendered by Helm, played by podman, its servers beside it on the host."""

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx2 as httpx
import openai
import yaml

from ops.client.api import Api, open_api
from ops.deploy.helm.rendered import EXAMPLES, render
from ops.local.checkpoints import describe_checkpoint
from ops.local.embedded import EmbeddedPostgres, EmbeddedValkey
from ops.local.ports import free_port
from ops.local.sample_fleet import offer_model
from ops.local.supervisor import Supervisor
from ops.local.tiny_models import TinyModel, build_tiny_models
from tests.e2e.played import HostFolders, Manifest, Played, container_of, names, play, probed
from tests.e2e.podman import Podman
from tests.flows.waiting import wait_until

MODEL = "tiny-llama"
NAMESPACE, REGION, GPU_TYPE = "tidepool", "here", "cpu"
GATEWAY = "http://127.0.0.1:8080"
KEYS, NODE_KEYS = "tidepool", "tidepool-node-keys"
"""The Secrets that the chart's values name."""
MESSAGES = [{"role": "user", "content": "What does the tide bring?"}]
LIMIT_S = 600.0
"""What only a defect reaches, also on a machine that is busy with other things."""
POLL_S = 0.5
"""Between two questions to podman, each a process of its own, and between two answers that are refused."""


@dataclass(kw_only=True)
class Release:
    """A release on one machine. `keys`: the first ones by role; `probes`: what the kubelet would ask, by container."""

    podman: Podman
    played: Played
    probes: dict[str, list[str]]
    keys: dict[str, str] = field(default_factory=dict)

    @property
    def workloads(self) -> list[Manifest]:
        """All that stays."""
        return [*self.played.control, *self.played.agents]

    def containers(self) -> dict[str, str]:
        """podman's name of each container, by the chart's."""
        return dict(container_of(each) for each in self.workloads)

    def volumes(self) -> list[str]:
        """podman's volumes: one of each claim, by its name."""
        specs = (each["spec"].get("template", each)["spec"] for each in self.workloads)
        claims = (volume.get("persistentVolumeClaim") for spec in specs for volume in spec["volumes"])
        return sorted({claim["claimName"] for claim in claims if claim})

    def images(self) -> list[str]:
        """The images that it runs."""
        return sorted({self.podman.inspect(name)["ImageName"] for name in self.containers().values()})

    def admin(self) -> AbstractContextManager[Api]:
        """The admin API."""
        return open_api(GATEWAY, self.keys["admin"])

    def client(self) -> openai.OpenAI:
        """OpenAI's own client."""
        return openai.OpenAI(base_url=f"{GATEWAY}/v1", api_key=self.keys["client"], max_retries=0)

    def is_healthy(self, container: str) -> bool:
        """Whether every probe of a container is answered as the kubelet wants it."""
        try:
            return all(httpx.get(url, timeout=5.0).is_success for url in self.probes[container])
        except httpx.TransportError:
            return False

    def kill(self, container: str) -> None:
        """Kill a container's first process, as a kernel short of memory does. It returns when podman, by the pod's
        restart policy, has started the container again.
        """
        name = self.containers()[container]
        before = self.podman.inspect(name)
        os.kill(before["State"]["Pid"], signal.SIGKILL)

        def restarted() -> bool:
            time.sleep(POLL_S)
            now = self.podman.inspect(name)
            return bool(now["State"]["Running"] and now["State"]["Pid"] != before["State"]["Pid"])

        wait_until(restarted, f"{name} runs again", LIMIT_S)


def rendered(folder: Path) -> list[Manifest]:
    """What Helm makes of the chart's example `no-gpu`, with one worker and the checkpoints of `folder`/models."""
    [example] = [path for path in EXAMPLES if path.stem == "no-gpu"]
    models = {
        "slots": 1,
        "volumes": [{"name": "models", "hostPath": {"path": str(folder / "models"), "type": "Directory"}}],
        "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
    }
    values = folder / "one-machine.yaml"
    values.write_text(yaml.safe_dump({"region": REGION, "agentDefaults": models}))
    done = render(example, f"--values={values}")
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


@contextmanager
def installed(folder: Path) -> Iterator[Release]:
    """Install a release as the documentation says, and remove it at the end: servers, migration, first keys, control
    plane, fleet, the node's key, the node.
    """
    models = readable_models(folder / "models")
    postgres = EmbeddedPostgres(folder / "servers", free_port())
    valkey = EmbeddedValkey(folder / "servers", free_port())
    postgres.prepare()
    valkey.prepare()
    manifests = rendered(folder)
    secrets = folder / "secrets"
    (secrets / NODE_KEYS).mkdir(parents=True, mode=0o700)
    with _memory_folder() as memory, Supervisor([postgres.child(), valkey.child()]):
        played = play(manifests, HostFolders(memory=memory, secrets=secrets))
        podman = Podman(folder, names(manifests, NAMESPACE))
        release = Release(podman=podman, played=played, probes=probed(manifests))
        assert not (found := left_behind(podman)), f"another release is here; remove it first: {', '.join(found)}"
        servers = {"database-url": postgres.url(), "redis-url": valkey.url()}
        try:
            podman.keep_variables(KEYS, servers)
            _migrate(release)
            release.keys = _first_keys(release, postgres.url())
            podman.keep_variables(KEYS, servers | {"node-key": release.keys["node"]})
            podman.play(played.control)
            wait_until(lambda: release.is_healthy("gateway"), "the gateway is ready", LIMIT_S)
            with release.admin() as admin:
                register(admin, models, REGION)
                for node in (pod["metadata"]["name"] for pod in played.agents):
                    (secrets / NODE_KEYS / node).write_text(node_key(admin, node))
            podman.play(played.agents)
            yield release
        finally:
            remove(release)


def readable_models(folder: Path) -> list[TinyModel]:
    """Checkpoints that every user may read: safetensors writes files for their owner alone."""
    models = build_tiny_models(folder, [MODEL])
    for path in folder.glob("*/*"):
        path.chmod(0o644)
    return models


def remove(release: Release) -> None:
    """Remove the release's pods, Secrets and volumes."""
    release.podman.play_down([*release.workloads, *release.played.hooks])
    release.podman.forget(KEYS)
    release.podman.run("volume", "rm", "--force", *release.volumes())


def left_behind(podman: Podman, name: str = NAMESPACE) -> list[str]:
    """Pods, containers, volumes and Secrets that have `name` in their names."""
    commands = (
        ("pod", "ls", "--format={{.Name}}"),
        ("ps", "--all", "--format={{.Names}}"),
        ("volume", "ls", "--format={{.Name}}"),
        ("secret", "ls", "--format={{.Name}}"),
    )
    return sorted({each for command in commands for each in podman.run(*command).split() if name in each})


def register(admin: Api, models: Sequence[TinyModel], region: str) -> None:
    """A fleet of one region, one type of node and the models, which nodes see in /models."""
    admin.put(f"/admin/regions/{region}", {"position": 0})
    admin.put(f"/admin/gpu-types/{GPU_TYPE}", {"memory_bytes": 2**30, "cost_per_hour": 1.0})
    for model in models:
        admin.put(f"/admin/models/{model.name}", describe_checkpoint(model.path) | {"path": f"/models/{model.name}"})
        offer_model(admin, model.name, {GPU_TYPE: 1000.0}, [region], 1, 1)


def node_key(admin: Api, node: str) -> str:
    """A key for the agent of a node alone."""
    body = {"name": node, "role": "node", "tenant": "default", "node": node}
    return str(admin.post("/admin/keys", body)["secret"])


def streamed(client: openai.OpenAI) -> str:
    """The text of a streamed answer; empty, after `POLL_S`, while it is refused."""
    try:
        chunks = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=8, temperature=0, stream=True
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    except openai.OpenAIError:
        time.sleep(POLL_S)
        return ""


def _migrate(release: Release) -> None:
    """Run the chart's hook, and remove it, as Helm does, when it has succeeded."""
    [hook] = release.played.hooks
    release.podman.play([hook])
    _, container = container_of(hook)
    code = release.podman.run("wait", container).strip()
    assert code == "0", release.podman.run("logs", container)
    release.podman.play_down([hook])


def _first_keys(release: Release, database_url: str) -> dict[str, str]:
    """The keys that `tidepool init --print` makes, in the image of the control plane."""
    [hook] = release.played.hooks
    [container] = hook["spec"]["containers"]
    options = ("--rm", "--network=host", "--read-only", "--cap-drop=all", f"--env=TIDEPOOL_DATABASE_URL={database_url}")
    keys: dict[str, str] = json.loads(release.podman.run("run", *options, container["image"], "init", "--print"))
    return keys


@contextmanager
def _memory_folder() -> Iterator[Path]:
    """A folder in the host's memory that every user may write."""
    folder = Path(tempfile.mkdtemp(prefix="tidepool-", dir="/dev/shm"))
    folder.chmod(0o777)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
