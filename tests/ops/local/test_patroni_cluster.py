"""The settings with which Patroni is drilled are those that are recommended."""

from pathlib import Path

import pytest

from ops.local.patroni_cluster import DCS

PAGE = (Path(__file__).parents[3] / "ops/docs/postgres-over-regions.md").read_text()
SETTINGS = {name: value for name, value in DCS.items() if name != "postgresql"}


@pytest.mark.parametrize("name", [*SETTINGS, *DCS["postgresql"]["parameters"]])
def test_the_documentation_recommends_what_is_drilled(name: str) -> None:
    value = SETTINGS.get(name, DCS["postgresql"]["parameters"].get(name))
    written = str(value).lower() if isinstance(value, bool) else str(value)
    assert any(line.strip().replace('"', "") == f"{name}: {written}" for line in PAGE.splitlines())


def test_the_settings_keep_patronis_own_rule() -> None:
    assert DCS["ttl"] >= 20, "Patroni takes no less"
    assert DCS["loop_wait"] + 2 * DCS["retry_timeout"] <= DCS["ttl"]
