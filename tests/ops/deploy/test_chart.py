"""What the Helm chart makes of five sets of values. Files of `rendered/` are compared with what Helm makes where there
is Helm (`make test-deploy` installs it), and read here without it.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ops.deploy.helm.rendered import CHART, EXAMPLES, RENDERED, helm_program, render, run_helm
from tests.ops.deploy.commands import fault_of_command
from tests.ops.deploy.exported import AGENT, GATEWAY, exported

KUBERNETES = ("1.30.0", "1.34.0", "1.37.0")
VALIDATOR = os.environ.get("TIDEPOOL_TEST_KUBERNETES_VALIDATE") or shutil.which("kubernetes-validate")
ROOT = Path(__file__).parents[3]
needs_helm = pytest.mark.skipif(helm_program() is None, reason="there is no helm here: `make test-deploy` installs it")
needs_schemas = pytest.mark.skipif(VALIDATOR is None, reason="no kubernetes-validate: `make test-deploy` installs it")
by_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)


def _manifests(example: Path) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all((RENDERED / example.name).read_text()) if each]


def _pods(example: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each workload's name and its pod."""
    for each in _manifests(example):
        if each["kind"] in {"Deployment", "StatefulSet", "Job"}:
            yield each["metadata"]["name"], each["spec"]["template"]["spec"]


def _named(example: Path, kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in _manifests(example) if each["kind"] == kind}


def _example(name: str) -> Path:
    [found] = [path for path in EXAMPLES if path.stem == name]
    return found


@needs_helm
@by_example
def test_helm_has_nothing_to_say(example: Path) -> None:
    linted = run_helm("lint", "--strict", "--quiet", str(CHART), f"--values={example}")
    assert (linted.returncode, linted.stdout.strip(), linted.stderr.strip()) == (0, "", "")


@needs_helm
@by_example
def test_the_chart_makes_what_is_committed(example: Path) -> None:
    """After a change: `python -m ops.deploy.helm.rendered`, and read what it changed."""
    done = render(example)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (RENDERED / example.name).read_text()


@needs_helm
@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("region=",), "region"),
        (("gateway.replcas=3",), "replcas"),
        (("files.url=s3://a", "files.claim=b"), "files"),
        (("files.url=", "files.claim="), "files"),
        (("agents.h100.gpus=8",), "gpuType"),
        (("gateway.processes=65",), "processes"),
        (("settings.region=x",), "TIDEPOOL"),
    ],
)
def test_wrong_values_are_refused_by_name(options: tuple[str, ...], named: str) -> None:
    done = render(_example("control-only"), *(f"--set={each}" for each in options))
    assert done.returncode != 0
    assert named in done.stderr


@needs_schemas
@pytest.mark.parametrize("version", KUBERNETES)
@by_example
def test_kubernetes_takes_the_manifests(example: Path, version: str) -> None:
    assert _validated(RENDERED / example.name, version).returncode == 0


@needs_schemas
def test_a_wrong_manifest_is_found(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text((RENDERED / "one-region.yaml").read_text().replace("replicas: 2", "replicas: two", 1))
    assert _validated(wrong, KUBERNETES[-1]).returncode != 0


def _validated(path: Path, version: str) -> subprocess.CompletedProcess[str]:
    assert VALIDATOR is not None
    command = [VALIDATOR, "--strict", "--no-warn", "--kubernetes-version", version, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@by_example
def test_containers_run_commands_that_exist(example: Path) -> None:
    for name, pod in _pods(example):
        [container] = pod["containers"]
        arguments = container.get("args") or re.findall(r"exec tidepool (.*)", container["command"][-1])[0].split()
        assert fault_of_command(arguments) is None, name


@by_example
def test_every_pod_is_confined(example: Path) -> None:
    for name, pod in _pods(example):
        [container] = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert container["securityContext"]["readOnlyRootFilesystem"] is True, name
        assert container["securityContext"]["allowPrivilegeEscalation"] is False, name
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}, name
        assert pod["automountServiceAccountToken"] is False, name
        assert container["resources"]["limits"]["memory"], name
        assert container["resources"]["requests"]["cpu"], name


@by_example
def test_no_service_of_the_cluster_becomes_a_setting(example: Path) -> None:
    """Kubernetes would give a pod TIDEPOOL_PORT=tcp://... where a Service is called `tidepool`."""
    assert all(pod["enableServiceLinks"] is False for _, pod in _pods(example))


@by_example
def test_secrets_are_only_referred_to(example: Path) -> None:
    assert not _named(example, "Secret")
    for name, pod in _pods(example):
        for variable in pod["containers"][0]["env"]:
            if re.search(r"(_KEY|_URL)$", variable["name"]) and "value" in variable:
                assert re.search(r"ADVERTISE|CONTROL|FILES", variable["name"]), (name, variable)


@by_example
def test_probes_ask_paths_that_exist(example: Path) -> None:
    paths = json.loads((ROOT / "ops/console/openapi.json").read_text())["paths"]
    agent = (ROOT / "dataplane/agent/http.py").read_text()
    for name, pod in _pods(example):
        for probe in re.findall(r"'path': '([^']+)'", str(pod)):
            assert f'Route("{probe}"' in agent if "TIDEPOOL_AGENT_NODE" in str(pod) else probe in paths, name


def test_only_one_region_migrates_and_runs_loops() -> None:
    first, other = _example("first-of-three-regions"), _example("another-region")
    loops = {"tidepool-worker", "tidepool-forecaster", "tidepool-beat"}
    assert loops <= set(_named(first, "Deployment"))
    assert loops.isdisjoint(_named(other, "Deployment"))
    assert set(_named(other, "Deployment")) == {"tidepool-gateway", "tidepool-dispatcher"}
    [hook] = _named(first, "Job").values()
    assert hook["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    assert not _named(other, "Job")


def test_gateways_scale_by_a_metric_that_they_export() -> None:
    [scaler] = _named(_example("first-of-three-regions"), "HorizontalPodAutoscaler").values()
    metric = scaler["spec"]["metrics"][0]["pods"]["metric"]["name"]
    assert metric in exported()
    assert "replicas" not in _named(_example("first-of-three-regions"), "Deployment")["tidepool-gateway"]["spec"]


def test_scraped_jobs_have_the_names_that_alerts_know() -> None:
    scraped = yaml.safe_load((ROOT / "ops/deploy/prometheus.yaml").read_text())["scrape_configs"]
    jobs = {each["job_name"] for each in scraped}
    monitors = _named(_example("first-of-three-regions"), "ServiceMonitor").values()
    assert (
        {each["spec"]["endpoints"][0]["relabelings"][0]["replacement"] for each in monitors} == jobs == {GATEWAY, AGENT}
    )


def test_an_agent_has_a_slot_for_each_of_its_gpus() -> None:
    [pod] = [pod for name, pod in _pods(_example("one-region")) if name == "tidepool-h100"]
    [container] = pod["containers"]
    [slots] = [json.loads(each["value"]) for each in container["env"] if each["name"] == "TIDEPOOL_AGENT_SLOTS"]
    assert len(slots) == container["resources"]["limits"]["nvidia.com/gpu"] == 8


@by_example
def test_disruptions_and_policies_name_pods_that_exist(example: Path) -> None:
    workloads = [*_named(example, "Deployment").values(), *_named(example, "StatefulSet").values()]
    labels = [each["spec"]["template"]["metadata"]["labels"] for each in workloads]
    for budget in _named(example, "PodDisruptionBudget").values():
        chosen = budget["spec"]["selector"]["matchLabels"].items()
        assert any(chosen <= each.items() for each in labels), budget["metadata"]["name"]
