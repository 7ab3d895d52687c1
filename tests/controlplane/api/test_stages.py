"""Each stage of a request is measured once, as far as the request got."""

from prometheus_client.parser import text_string_to_metric_families

from controlplane.store.tenants import Tenant, put_tenant
from tests.controlplane.api.gateway import Gateway, running_gateway
from tests.controlplane.world import FakeAgent, World

BEFORE = ("receive", "check", "prepare")


def _counts(gateway: Gateway) -> dict[str, float]:
    families = text_string_to_metric_families(gateway.http.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    counts = (each for each in samples if each.name == "tidepool_request_stage_seconds_count")
    return {each.labels["stage"]: each.value for each in counts if each.value}


def test_stages_are_measured_once_as_far_as_a_request_gets(world: World) -> None:
    with world.database.transaction() as session:
        put_tenant(session, Tenant(name="acme", requests_per_minute=1))
    with running_gateway(world, FakeAgent()) as gateway:
        gateway.chat(400, temperature=9)
        assert _counts(gateway) == {"receive": 1}

        gateway.chat()
        assert _counts(gateway) == {"receive": 2, **dict.fromkeys(("check", "prepare", "limits", "admit", "place"), 1)}

        gateway.chat(429)
        assert _counts(gateway) == {
            "receive": 3,
            **dict.fromkeys(("check", "prepare", "limits"), 2),
            **dict.fromkeys(("admit", "place"), 1),
        }


def test_without_limits_there_is_no_such_stage(world: World) -> None:
    with running_gateway(world, FakeAgent()) as gateway:
        gateway.chat(stream=True)
        assert _counts(gateway) == dict.fromkeys((*BEFORE, "admit", "place"), 1)
