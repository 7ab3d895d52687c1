"""`tidepool node plan-memory`: what of a checkpoint fits on a card, and what it refuses."""

import json
from pathlib import Path
from shutil import copytree

import pytest
import torch

from dataplane.engines.torch.model.parallel import Rank, Unconnected
from dataplane.engines.torch.model.skeleton import build_skeleton
from dataplane.protocol.errors import ModelLoadError
from ops.cli.node_memory import _copies_of_kv
from ops.client.api import CommandError
from ops.local.checkpoints import Checkpoint
from ops.profiling.checkpoints import Shape, build_checkpoints
from tests.dataplane.engines.torch.model.packing import GPTQ, gptq, quantized_pair
from tests.dataplane.engines.torch.tiny import save_tiny
from tests.ops.cli.running import Run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    [model] = build_checkpoints(tmp_path_factory.mktemp("m"), [Shape(hidden=64, layers=2, head_dim=16)], "float32")
    return model.folder


def test_it_reads_the_checkpoint_alone(run: Run, folder: Path) -> None:
    plan = run("node", "plan-memory", folder, "--card", "L4", "--context", 128, "--json").json
    [alone] = plan["alone"]
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert 0.9 * weights < alone["model"]["weights_bytes"] <= weights
    assert alone["kv_bytes"] == plan["usable_bytes"] - alone["model"]["weights_bytes"]
    assert alone["kv_tokens"] == alone["kv_bytes"] // alone["model"]["kv_bytes_per_token"]
    assert plan["card"]["name"] == "L4"


def test_gpus_of_a_slot_share_the_weights_and_repeat_kv_heads(run: Run, folder: Path) -> None:
    one, two, four = (
        run("node", "plan-memory", folder, "--card", "L4", "--gpus", gpus, "--json").json for gpus in (1, 2, 4)
    )
    assert (two["gpus"], two["usable_bytes"]) == (2, 2 * one["usable_bytes"])
    [first], [second], [third] = one["alone"], two["alone"], four["alone"]
    assert second["kv_bytes"] == two["usable_bytes"] - first["model"]["weights_bytes"]
    per_token = [fit["model"]["kv_bytes_per_token"] for fit in (first, second, third)]
    assert per_token == [per_token[0], 2 * per_token[0], 4 * per_token[0]], "its one KV head is on each GPU"


def test_a_model_that_cannot_be_divided_is_refused(run: Run, folder: Path) -> None:
    refused = run("node", "plan-memory", folder, "--card", "L4", "--gpus", 3)
    assert refused.status == 1
    assert "num_attention_heads=4 cannot be divided among 3 GPUs" in refused.err


@pytest.mark.parametrize(("inner", "reason"), [(128, None), (96, "mlp.down_proj cannot be divided among 2 GPUs")])
def test_a_quantized_model_of_which_a_group_would_be_cut_is_refused_as_by_the_engine(
    run: Run, tmp_path: Path, inner: int, reason: str | None
) -> None:
    dense = save_tiny("llama", tmp_path / "dense", hidden_size=64, head_dim=16, intermediate_size=inner)
    quantized, _ = quantized_pair(dense, tmp_path, GPTQ | {"group_size": 32}, gptq(4, 32))
    assert run("node", "plan-memory", quantized, "--card", "L4").status == 0
    planned = run("node", "plan-memory", quantized, "--card", "L4", "--gpus", 2)
    assert planned.status == (reason is not None)
    if reason is not None:
        rank = Rank(index=0, count=2, collectives=Unconnected())
        with pytest.raises(ModelLoadError, match=reason) as refused:
            build_skeleton(quantized, torch.bfloat16, torch.device("cpu"), rank=rank)
        assert refused.value.message in " ".join(planned.err.split())


def test_a_source_that_cannot_be_divided_is_named_as_it_was_given() -> None:
    config = {"num_attention_heads": 4, "hidden_size": 64, "vocab_size": 100}
    checkpoint = Checkpoint(model={"path": "hf://Some/model"}, config=config)
    with pytest.raises(CommandError, match=r"^hf://Some/model: num_attention_heads=4 cannot be divided among 3 GPUs"):
        _copies_of_kv(checkpoint, 3)


def test_a_config_without_what_is_divided_is_refused_by_its_field(run: Run, folder: Path, tmp_path: Path) -> None:
    copied = copytree(folder, tmp_path / "copied")
    described = json.loads((copied / "config.json").read_text())
    del described["vocab_size"]
    (copied / "config.json").write_text(json.dumps(described))
    assert run("node", "plan-memory", copied, "--card", "L4").status == 0
    refused = run("node", "plan-memory", copied, "--card", "L4", "--gpus", 2)
    assert refused.status == 1
    assert "config.json needs vocab_size to be divided among 2 GPUs" in " ".join(refused.err.split())


def test_the_tables_name_each_model_and_say_that_times_are_a_guess(run: Run, folder: Path) -> None:
    shown = run("node", "plan-memory", folder, folder, "--card", "H800")
    assert shown.status == 0
    assert "TIDEPOOL_AGENT_KV_SHARE" in shown.out
    assert "pooled slot" in shown.out
    assert "guess" in shown.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--card", "H999"), "--card must be one of A10, A100,"),
        (("--card", "H800", "--context", "0"), "'--context': Input should be greater than or equal to 1"),
        (("--card", "H800", "--memory-share", "1.5"), "'--memory-share': Input should be less than or equal to 1"),
    ],
)
def test_bad_options_are_named(run: Run, folder: Path, arguments: tuple[str, ...], message: str) -> None:
    refused = run("node", "plan-memory", folder, *arguments)
    assert refused.status == 2
    assert message in refused.err


def test_a_folder_without_a_checkpoint_is_refused(run: Run, tmp_path: Path) -> None:
    refused = run("node", "plan-memory", tmp_path, "--card", "H800")
    assert refused.status == 1
    assert "config.json" in refused.err
