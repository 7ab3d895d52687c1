"""Scenario files whose traffic is several recordings at once."""

from pathlib import Path

import pytest

from ops.simulator.scenario.scenario import ScenarioError, load_scenario
from ops.simulator.traffic.traffic_parts import MixedPart

SCALED = Path(__file__).parents[4] / "ops" / "scenarios" / "simulate-scaled.toml"


def written(folder: Path, *parts: str) -> Path:
    """The example with these parts for its traffic."""
    text = SCALED.read_text()
    before, _, rest = text.partition("[traffic]")
    after = rest[rest.index("\n[") :]
    mixed = '[traffic]\nkind = "mixed"\n' + "".join(f"[[traffic.parts]]\n{part}\n" for part in parts)
    path = folder / "mixed.toml"
    path.write_text(before + mixed + after)
    return path


def test_paths_of_parts_are_relative_to_the_file_and_origins_are_those_of_all(tmp_path: Path) -> None:
    scenario = load_scenario(
        written(
            tmp_path,
            'kind = "sageserve"\npath = "a.csv"',
            'kind = "azure-2024"\npath = "b.csv"\norigins = { mars = 1 }',
        )
    )
    assert isinstance(scenario.traffic, MixedPart)
    assert [part.path for part in scenario.traffic.parts] == [tmp_path / "a.csv", tmp_path / "b.csv"]  # type: ignore[union-attr]
    assert scenario.origins == {"mars", *scenario.regions}


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ('kind = "mixed"', "traffic.parts.0: Input tag 'mixed'"),
        ('kind = "aegaeon"', "traffic.parts.0: Input tag 'aegaeon'"),
        ('kind = "sageserve"\npath = "a.csv"\nscale = 0', "traffic.parts.0.scale: Input should be greater than 0"),
        ('kind = "sageserve"\npath = "a.csv"\nmodels = { none = 1 }', "traffic.parts.0.models.none: no such model"),
        ('kind = "sageserve"', "traffic.parts.0.path: Field required"),
    ],
)
def test_errors_name_the_key_of_the_part(tmp_path: Path, part: str, said: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        load_scenario(written(tmp_path, part))
    assert said in str(caught.value)


def test_it_needs_a_part(tmp_path: Path) -> None:
    text = written(tmp_path, 'kind = "sageserve"').read_text()
    empty = tmp_path / "empty.toml"
    empty.write_text(text.replace('[[traffic.parts]]\nkind = "sageserve"', "parts = []"))
    with pytest.raises(ScenarioError, match=r"traffic\.parts: List should have at least 1"):
        load_scenario(empty)
