"""Faults of a fleet's file are named with their line, field and limit."""

import pytest

from ops.client.api import CommandError
from ops.client.fleet_file.reading import read_fleet_file


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("regions:\n  us: {position: -1}\n", "f:2: regions.us.position: input should be greater than or equal"),
        ("regions:\n  us:\n    place: 1\n", "f:3: regions.us.place: no such field"),
        ("regions:\n  us: {}\n  us: {}\n", "f:3: regions.us is here twice"),
        ("\nregions:\n  US: {}\n", "f:3: regions.US: string should match pattern"),
        ("regions: &a\n  us: {}\ngpu_types: *a\n", "f:3: an alias (*) cannot be used here"),
        ("gpu_types:\n  A100:\n    cost_per_hour: 1\n", "f:2: gpu_types.A100.memory_bytes: field required"),
        ("latencies:\n  us: {us: 1}\n", "latencies.us.us: a region has no latency to itself"),
        ("latencies:\n  us: {eu: 60001}\n", "latencies.us.eu: input should be less than or equal to 60000, not 60001"),
        ("tenants: {a: {concurrent_max: 0}}", "f:1: tenants.a.concurrent_max: input should be greater than 0, not 0"),
        ("tenants: {1: {}}", "f:1: tenants.1: input should be a valid string, not 1"),
        ("regions: [", "f:1: "),
        ("regions: \x07", "f is no YAML"),
        ("[]", "f:1: input should be"),
        ("a: 2026-02-31", "f has a value that cannot be read: day is out of range"),
    ],
)  # fmt: skip
def test_a_fault_is_named(text: str, said: str) -> None:
    with pytest.raises(CommandError) as error:
        read_fleet_file(text, name="f")
    assert said in str(error.value)


def test_every_fault_has_a_line() -> None:
    with pytest.raises(CommandError) as error:
        read_fleet_file("regions:\n" + "".join(f"  r{at}: {{x: 1}}\n" for at in range(12)), name="f")
    lines = str(error.value).splitlines()
    assert lines[0] == "f:2: regions.r0.x: no such field"
    assert lines[-1] == "and 2 more"
    assert len(lines) == 11


def test_limits_of_an_endpoint_are_in_order() -> None:
    text = """
models:
  m:
    path: /models/m
    architecture: LlamaForCausalLM
    weights_bytes: 1
    kv_bytes_per_token: 1
    context_tokens: 1
    endpoints:
      us: {instances_min: 2, instances_max: 1}
"""
    with pytest.raises(CommandError, match=r"^f:10: models.m.endpoints.us: instances_min 2 is above instances_max 1"):
        read_fleet_file(text, name="f")


def test_an_empty_file_declares_nothing() -> None:
    assert read_fleet_file("", name="f").regions == {}
