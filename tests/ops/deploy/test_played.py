"""What podman is given of the chart's manifests: the chart's own pods, with what a cluster would do for them done."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from ops.deploy.helm.rendered import EXAMPLES, RENDERED
from tests.e2e.played import HostFolders, container_of, names, play, probed

HOST = HostFolders(memory=Path("/dev/shm/here"), secrets=Path("/secrets"))
KEPT = ("image", "command", "args", "securityContext", "resources")
"""What is left as rendered."""


def _rendered(name: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all((RENDERED / f"{name}.yaml").read_text()) if each]


def _named(manifests: list[dict[str, Any]], name: str) -> dict[str, Any]:
    [found] = [each for each in manifests if each["metadata"]["name"] == name]
    return found


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_workload_of_the_chart_is_played_as_it_is(example: Path) -> None:
    manifests = _rendered(example.stem)
    played = play(manifests, HOST)
    given = {each["metadata"]["name"]: each for each in (*played.hooks, *played.control, *played.agents)}
    for each in manifests:
        if each["kind"] not in {"Deployment", "StatefulSet", "Job"}:
            continue
        template = each["spec"]["template"]
        names = [each["metadata"]["name"]]
        if each["kind"] == "StatefulSet":
            names = [f"{names[0]}-{index}" for index in range(each["spec"]["replicas"])]
        for name in names:
            workload = given.pop(name)
            pod = workload if workload["kind"] == "Pod" else workload["spec"]["template"]
            assert pod["metadata"]["labels"] == template["metadata"]["labels"]
            assert pod["spec"]["securityContext"] == template["spec"]["securityContext"]
            [before], [after] = template["spec"]["containers"], pod["spec"]["containers"]
            assert [after.get(key) for key in KEPT] == [before.get(key) for key in KEPT]
            assert [each["name"] for each in after["env"]] == [each["name"] for each in before["env"]]
    assert not given


def test_manifests_are_not_changed_in_place() -> None:
    manifests = _rendered("no-gpu")
    play(manifests, HOST)
    assert manifests == _rendered("no-gpu")


def test_an_agents_pod_has_its_name_its_claim_its_key_and_memory() -> None:
    [pod] = play(_rendered("no-gpu"), HOST).agents
    assert (pod["kind"], pod["metadata"]["name"]) == ("Pod", "tidepool-cpu-0")
    [container] = pod["spec"]["containers"]
    values = {each["name"]: each.get("value") for each in container["env"]}
    assert values["TIDEPOOL_AGENT_ADVERTISE_URL"] == "http://tidepool-cpu-0.tidepool-cpu.tidepool.svc:9000"
    volumes = {volume.pop("name"): volume for volume in pod["spec"]["volumes"]}
    assert volumes["checkpoints"] == {"persistentVolumeClaim": {"claimName": "checkpoints-tidepool-cpu-0"}}
    assert volumes["shm"] == {"hostPath": {"path": "/dev/shm/here", "type": "Directory"}}
    key = {"path": "/secrets/tidepool-node-keys/tidepool-cpu-0", "type": "File"}
    assert volumes["node-keys"] == {"hostPath": key}
    [mount] = [each for each in container["volumeMounts"] if each["name"] == "node-keys"]
    assert mount == {"name": "node-keys", "mountPath": "/etc/tidepool/node-key", "readOnly": True}


def test_names_are_those_by_which_pods_reach_each_other() -> None:
    manifests = _rendered("no-gpu")
    found = names(manifests, "tidepool")
    assert set(found) == {
        "tidepool-gateway.tidepool.svc",
        "tidepool-cpu.tidepool.svc",
        "tidepool-cpu-0.tidepool-cpu.tidepool.svc",
    }


def test_probes_are_left_to_who_plays_the_pods() -> None:
    manifests = _rendered("no-gpu")
    asked = probed(manifests)
    assert asked["gateway"] == [f"http://127.0.0.1:8080/{path}" for path in ("livez", "livez", "readyz")]
    assert {name for name, urls in asked.items() if urls} == {"gateway", "agent"}
    played = play(manifests, HOST)
    assert "Probe" not in str(played)
    assert "containerPort" not in str(played)


def test_podman_names_the_containers_of_deployments_and_of_pods() -> None:
    played = play(_rendered("no-gpu"), HOST)
    assert container_of(_named(played.control, "tidepool-beat")) == ("beat", "tidepool-beat-pod-0-beat")
    assert container_of(played.agents[0]) == ("agent", "tidepool-cpu-0-agent")


def test_an_unknown_kind_is_refused_by_name() -> None:
    unknown = {"kind": "DaemonSet", "metadata": {"name": "tide"}}
    with pytest.raises(ValueError, match="DaemonSet: tide"):
        play([unknown], HOST)
