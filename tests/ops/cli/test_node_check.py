"""`tidepool node check`: what it says of good models, and that it notices bad ones."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dataplane.engines.torch.model import attention
from ops.profiling import interleaving
from ops.profiling.reference import router_margins
from tests.dataplane.engines.torch.model.packing import FORMATS, quantized_pair
from tests.dataplane.engines.torch.tiny import save_tiny
from tests.ops.cli.running import Run

QUICK = ("--prompts", "2", "--tokens", "5", "--switches", "6")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("models")
    return [str(save_tiny(architecture, root / architecture)) for architecture in ("mistral", "qwen3_moe")]


@pytest.fixture
def check(run: Run) -> Run:
    return lambda *arguments: run("node", "check", *arguments)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_good_models_pass_and_everything_was_tried(dtype: str, folders: list[str], check: Run) -> None:
    outcome = check(*folders, *QUICK, "--dtype", dtype, "--json")
    said = outcome.json
    assert (outcome.status, said["failed"]) == (0, [])
    assert [model["architecture"] for model in said["models"]] == ["mistral", "qwen3_moe"]
    assert all(model["tokens"] >= 5 for model in said["models"])
    assert said["models"][0]["prompt_tokens_max"] > said["models"][0]["window_tokens"]
    assert (said["switches"] >= 6, said["resident_max"], said["left"] > 0) == (True, 1, True)
    assert said["swapped_out"] == said["swapped_in"] > 0


@pytest.mark.slow
def test_two_ranks_pass(folders: list[str], check: Run) -> None:
    outcome = check(*folders, *QUICK, "--ranks", "2", "--json")
    assert (outcome.status, outcome.json["failed"], outcome.json["settings"]["ranks"]) == (0, [], 2)
    assert outcome.json["switches"] >= 6


def test_the_table_names_the_architectures(folders: list[str], check: Run) -> None:
    outcome = check(folders[0], *QUICK)
    assert outcome.status == 0
    assert "mistral" in outcome.out
    assert "yes" in outcome.out


def test_a_quantized_model_is_refused_with_what_to_check(folders: list[str], check: Run, tmp_path: Path) -> None:
    quantized, _ = quantized_pair(Path(folders[0]), tmp_path, *FORMATS["gptq"])
    outcome = check(str(quantized), *QUICK)
    assert outcome.status == 1
    assert "quantized is quantized" in outcome.err
    assert "Check the model it was made of" in outcome.err


def test_a_wrong_token_fails_the_check(folders: list[str], check: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention.KvStep, "mask", _mask_without_window)
    outcome = check(*folders, "--prompts", "2", "--tokens", "8", "--json")
    said = outcome.json
    assert (outcome.status, said["failed"]) == (1, ["mistral"])
    assert any("instead of" in mismatch for mismatch in said["models"][0]["mismatches"])
    assert "not the tokens and logits of transformers: mistral" in outcome.err


def _mask_without_window(self: attention.KvStep, index: int, window: int | None, groups: int) -> torch.Tensor:
    return _MASK(self, index, None, groups)


_MASK = attention.KvStep.mask


def test_nearly_tied_tokens_are_counted_and_what_follows_is_compared(
    folders: list[str], check: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = check(folders[0], *QUICK, "--json")
    assert strict.status == 0
    second_best(monkeypatch)
    monkeypatch.setitem(interleaving.TOLERANCES, "float32", 10.0)
    lax = check(folders[0], *QUICK, "--json")
    assert lax.status == 0
    model = lax.json["models"][0]
    assert model["ties"] == model["tokens"] >= strict.json["models"][0]["tokens"]
    monkeypatch.setitem(interleaving.TOLERANCES, "float32", 1e-4)
    refused = check(folders[0], *QUICK, "--json")
    assert (refused.status, refused.json["failed"]) == (1, ["mistral"])


def second_best(monkeypatch: pytest.MonkeyPatch) -> None:
    second = "dataplane.engines.torch.steps.sample_tokens"
    monkeypatch.setattr(second, lambda logits, draws: logits.topk(2, dim=-1).indices[:, 1])


def test_where_experts_tie_another_token_is_no_mismatch(
    folders: list[str], check: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    second_best(monkeypatch)
    monkeypatch.setitem(interleaving.ROUTER_TOLERANCES, "float32", 1.0)
    outcome = check(*folders, *QUICK, "--json")
    dense, experts = outcome.json["models"]
    assert (outcome.status, outcome.json["failed"]) == (1, ["mistral"]), "without experts nothing ties"
    assert (dense["router_ties"], experts["mismatches"]) == (0, [])
    assert experts["router_ties"] == experts["tokens"] > 0
    monkeypatch.setitem(interleaving.ROUTER_TOLERANCES, "float32", 0.0)
    outcome = check(folders[1], *QUICK, "--json")
    assert (outcome.status, outcome.json["models"][0]["router_ties"]) == (1, 0)


@pytest.mark.parametrize("share", ["first", "all"])
def test_logits_may_be_off_at_a_token_where_experts_tie_but_not_at_most(
    share: str, folders: list[str], check: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = interleaving.Interleaving._watch
    seen: set[str] = set()

    def off(self: Any, sequence: Any, logits: torch.Tensor) -> None:
        model = self._in_flight[sequence.request.request_id].model
        scale = 1.3 if share == "all" or model not in seen else 1.0
        seen.add(model)
        watch(self, sequence, logits * scale)

    monkeypatch.setattr(interleaving.Interleaving, "_watch", off)
    monkeypatch.setitem(interleaving.ROUTER_TOLERANCES, "float32", 1.0)
    outcome = check(*folders, *QUICK, "--json")
    dense, experts = outcome.json["models"]
    assert outcome.status == 1
    assert "a logit differs by 0.3 of the largest where no router nearly ties" in dense["mismatches"]
    assert all(model["logits"]["most"] == pytest.approx(0.3, rel=0.01) for model in (dense, experts))
    if share == "first":
        assert experts["mismatches"] == []
        assert experts["logits"]["median"] < 1e-4
    else:
        assert experts["mismatches"] == ["logits differ by 0.3 of the largest in the median"]
    assert experts["logits"]["settled"] == experts["spread"]["settled"] == 0.0


def test_the_margin_of_a_token_is_that_of_its_least_certain_router() -> None:
    config = SimpleNamespace(num_experts_per_tok=2)
    layers = [[[0.5, 0.3, 0.1, 0.1], [0.4, 0.3, 0.2, 0.1]], [[0.4, 0.25, 0.2, 0.15], [0.6, 0.2, 0.1, 0.1]]]
    output = SimpleNamespace(
        logits=torch.zeros(1, 2, 9), router_logits=tuple(torch.tensor(layer).log() for layer in layers)
    )
    assert router_margins(output, config) == pytest.approx([0.05, 0.1], rel=1e-5)
    dense = SimpleNamespace(logits=torch.zeros(1, 2, 9))
    assert router_margins(dense, SimpleNamespace()) == [math.inf] * 2


def test_what_cannot_be_checked_is_said_in_one_line(folders: list[str], check: Run, tmp_path: Path) -> None:
    refusals = {
        (tmp_path, *QUICK): "config.json does not exist",
        (folders[0], "--tokens", 5000): "a context of 256 tokens",
    }
    if not torch.cuda.is_available():
        refusals[folders[0], "--device", "cuda"] = "error: no CUDA device can be used here"
    for arguments, message in refusals.items():
        refused = check(*arguments)
        assert refused.status == 1
        assert message in refused.err.splitlines()[-1]
