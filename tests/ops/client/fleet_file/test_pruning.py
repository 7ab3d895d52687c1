"""Which of an owner's things are deleted, and in which order."""

from ops.client.fleet_file.pruning import choose_deletions
from ops.client.fleet_file.resources import ENDPOINT, LATENCY, MODEL, PIN, PROFILE, REGION, Kind, Resource, Resources


def things(owner: str | None, *named: tuple[Kind, *tuple[str, ...]]) -> Resources:
    return {
        (kind.name, key): Resource(kind=kind, key=key, fields={}, owner=owner)
        for kind, *names in named
        for key in [tuple(names)]
    }


ALL = ((REGION, "a"), (REGION, "b"), (MODEL, "m"), (LATENCY, "a", "b"), (ENDPOINT, "m", "a"), (PROFILE, "m", "g"))


def deleted(present: Resources, declared: Resources, open_batches: dict[str, list[str]] | None = None) -> list[str]:
    """Titles in their order; what is refused has its reason."""
    changes = choose_deletions(present, declared, owner="mine", open_batches=open_batches or {})
    return [each.resource.title + (f": {each.refused}" if each.refused else "") for each in changes]


def test_users_go_before_what_they_use() -> None:
    titles = deleted(things("mine", *ALL), {})
    order = ["endpoint m / a", "profile m / g", "model m", "latency a / b", "region a", "region b"]
    assert titles == order


def test_what_is_declared_or_belongs_to_another_or_to_nobody_stays() -> None:
    assert deleted(things("mine", *ALL), things(None, *ALL)) == []
    assert deleted(things("other", *ALL), {}) == []
    assert deleted(things(None, *ALL), {}) == []


def test_what_a_thing_made_by_hand_needs_stays_and_says_so() -> None:
    present = things("mine", *ALL) | things(None, (PIN, "m", "a"))
    titles = deleted(present, {})
    assert "endpoint m / a: it is needed by pin m / a, which stays" in titles
    assert "model m: it is needed by endpoint m / a, which stays" in titles
    assert "region a: it is needed by endpoint m / a, which stays" in titles
    assert "region b" in titles


def test_what_the_file_uses_stays() -> None:
    present = things("mine", (REGION, "a"), (REGION, "b"))
    declared = things(None, (REGION, "a"), (LATENCY, "a", "b"))
    assert deleted(present, declared) == ["region b: it is needed by latency a / b, which stays"]


def test_the_last_endpoint_of_a_model_with_open_batches_stays() -> None:
    present = things("mine", (MODEL, "m"), (ENDPOINT, "m", "a"), (ENDPOINT, "m", "b"))
    batches = {"m": ["batch_1"]}
    titles = deleted(present, {}, batches)
    assert all("batch_1" in title for title in titles[:2])
    assert titles[2].startswith("model m: it is needed by endpoint m / a, endpoint m / b")
    kept = things(None, (MODEL, "m"), (ENDPOINT, "m", "b"))
    assert deleted(present, kept, batches) == ["endpoint m / a"]
