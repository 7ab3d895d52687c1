"""A home holds the stack of one region, or that of several."""

from pathlib import Path

import pytest

from ops.client.home import EmbeddedError
from ops.local.ports import free_port
from ops.local.regional_stack import RegionalStack
from ops.local.stack import LocalNode, LocalStack


def test_a_home_of_several_regions_gets_no_empty_stack_beside_them(tmp_path: Path) -> None:
    (tmp_path / "regions" / "us-east").mkdir(parents=True)
    with pytest.raises(EmbeddedError, match="holds a stack of several regions: run `tidepool up --regions 3`"):
        LocalStack(tmp_path, free_port(), ())
    assert not (tmp_path / "postgres").exists(), "the stack of several regions starts still"


def test_a_home_that_has_both_is_told_what_to_move(tmp_path: Path) -> None:
    """Releases before this one made the one beside the other."""
    nodes = (LocalNode(name="n", region="us-east", gpu_type="H800", gpus=1, memory_bytes=1),)
    (tmp_path / "postgres").mkdir()
    with pytest.raises(EmbeddedError, match=r"holds a stack of one region; set TIDEPOOL_HOME to another folder$"):
        RegionalStack(tmp_path, free_port(), nodes)
    (tmp_path / "regions" / "us-east").mkdir(parents=True)
    with pytest.raises(EmbeddedError, match=r"or move .*/postgres away$"):
        RegionalStack(tmp_path, free_port(), nodes)
