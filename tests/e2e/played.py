"""The chart's manifests as `podman play kube` of Debian 12 (podman 4.3) takes them, on one machine without a cluster.

Pods are those of the chart: image, command, variables, user, read-only root, mounts and limits are left as rendered.
What a cluster would do for them, and podman does not, is done here, and is all that is changed:

| in a cluster | here |
|---|---|
| a StatefulSet's pods, each with claims of its own | Pods of the same names, which mount the claims of the same names |
| a hook's Job | a Pod that is not restarted |
| pods have addresses, Services names | all are on the host's network, and `names` are those of its loopback interface |
| the kubelet asks probes | they are left out; whoever plays the pods asks them |
| `$(NAME)` in a variable and in `subPathExpr` | is replaced |
| a Secret is mounted, whole or one entry of it | a folder of the host with a file for each entry, or one file of it |
| an emptyDir in memory | a folder of the host's memory |

PodDisruptionBudgets, HorizontalPodAutoscalers, NetworkPolicies and ServiceMonitors have no effect without a cluster.
"""

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Manifest = dict[str, Any]
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
WITHOUT_EFFECT = frozenset(
    {"Service", "PodDisruptionBudget", "HorizontalPodAutoscaler", "NetworkPolicy", "ServiceMonitor"}
)


@dataclass(frozen=True, kw_only=True)
class HostFolders:
    """Folders of the host that pods mount: one in `memory`, which user 10001 may write, and `secrets`, which has a
    folder for each Secret.
    """

    memory: Path
    secrets: Path


@dataclass(frozen=True, kw_only=True)
class Played:
    """What to play: `hooks` come first, and end; `control` are the control plane's workloads, `agents` the nodes."""

    hooks: list[Manifest]
    control: list[Manifest]
    agents: list[Manifest]


def play(manifests: Iterable[Manifest], host: HostFolders) -> Played:
    """The chart's workloads for podman.

    Raises:
        ValueError: a manifest of a kind that this function does not know.
    """
    played = Played(hooks=[], control=[], agents=[])
    for manifest in manifests:
        match manifest["kind"]:
            case "Job":
                pod = _pod(manifest, manifest["metadata"]["name"])
                played.hooks.append(_fitted(pod, pod["spec"], host))
            case "Deployment":
                workload = copy.deepcopy(manifest)
                played.control.append(_fitted(workload, workload["spec"]["template"]["spec"], host))
            case "StatefulSet":
                for pod in _replicas(manifest):
                    played.agents.append(_fitted(pod, pod["spec"], host))
            case kind if kind not in WITHOUT_EFFECT:
                raise ValueError(f"podman is not told how to run a {kind}: {manifest['metadata']['name']}")
    return played


def names(manifests: Iterable[Manifest], namespace: str) -> list[str]:
    """The names that a cluster's DNS would give to the Services, and to the pods of StatefulSets."""
    found = []
    for manifest in manifests:
        name = manifest["metadata"]["name"]
        if manifest["kind"] == "Service":
            found.append(f"{name}.{namespace}.svc")
        elif manifest["kind"] == "StatefulSet":
            service = manifest["spec"]["serviceName"]
            found += [f"{name}-{index}.{service}.{namespace}.svc" for index in range(manifest["spec"]["replicas"])]
    return found


def probed(manifests: Iterable[Manifest]) -> dict[str, list[str]]:
    """By container, the addresses that the kubelet would ask of a workload's pod, where it is on the host's network."""
    asked: dict[str, list[str]] = {}
    for manifest in manifests:
        for container in manifest["spec"].get("template", {}).get("spec", {}).get("containers", []):
            ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
            asked[container["name"]] = [
                f"{ask['scheme'].lower()}://127.0.0.1:{ports[ask['port']]}{ask['path']}"
                for ask in (container[probe]["httpGet"] for probe in PROBES if probe in container)
            ]
    return asked


def container_of(workload: Manifest) -> tuple[str, str]:
    """The name of a workload's container in its pod, and podman's own name of it."""
    name, spec = workload["metadata"]["name"], workload["spec"]
    [container] = (spec if workload["kind"] == "Pod" else spec["template"]["spec"])["containers"]
    pod = name if workload["kind"] == "Pod" else f"{name}-pod-0"
    return container["name"], f"{pod}-{container['name']}"


def _replicas(stateful: Manifest) -> Iterable[Manifest]:
    """The pods of a StatefulSet, each with volumes for its claims."""
    for index in range(stateful["spec"]["replicas"]):
        pod = _pod(stateful, f"{stateful['metadata']['name']}-{index}")
        for claim in stateful["spec"].get("volumeClaimTemplates", []):
            name = claim["metadata"]["name"]
            source = {"claimName": f"{name}-{pod['metadata']['name']}"}
            pod["spec"].setdefault("volumes", []).append({"name": name, "persistentVolumeClaim": source})
        yield pod


def _pod(workload: Manifest, name: str) -> Manifest:
    template = copy.deepcopy(workload["spec"]["template"])
    metadata = {**template["metadata"], "name": name}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def _fitted(manifest: Manifest, spec: Manifest, host: HostFolders) -> Manifest:
    """`manifest`, whose pod `spec` is changed in place to what podman knows."""
    entries: dict[str, str] = {}
    volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
    for container in spec["containers"]:
        for field in ("ports", *PROBES):
            container.pop(field, None)
        variables = _expanded(container.get("env", []), manifest["metadata"]["name"])
        for mount in container.get("volumeMounts", []):
            if expression := mount.pop("subPathExpr", None):
                entries[mount["name"]] = _replaced(expression, variables)
    for name, volume in volumes.items():
        if secret := volume.pop("secret", None):
            path = host.secrets / secret["secretName"] / entries.get(name, "")
            volume["hostPath"] = {"path": str(path), "type": "File" if name in entries else "Directory"}
        if volume.get("emptyDir", {}).get("medium") == "Memory":
            del volume["emptyDir"]
            volume["hostPath"] = {"path": str(host.memory), "type": "Directory"}
    return manifest


def _expanded(env: list[Manifest], pod: str) -> dict[str, str]:
    """Replace `$(NAME)` in the values of `env`, in place; returns the variables whose values are known."""
    known: dict[str, str] = {}
    for variable in env:
        if variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath") == "metadata.name":
            known[variable["name"]] = pod
        elif "value" in variable:
            variable["value"] = known[variable["name"]] = _replaced(variable["value"], known)
    return known


def _replaced(text: str, variables: Mapping[str, str]) -> str:
    """As Kubernetes does: a variable that is not known stays as it is written."""
    return re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), text)
