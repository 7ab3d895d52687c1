"""The tokens of a step of vLLM's engine, chosen for all its requests at once."""

from typing import Any

import pytest
import torch

from dataplane.engines.core.sampler import Draw, choose_tokens
from dataplane.engines.interface import EngineRequest
from dataplane.engines.vllm import interfaces
from tests.dataplane.engines.fake_device import FakeTensor, counted
from tests.dataplane.engines.torch.drive import request

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")
interfaces.prepare_process("cpu")

from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality  # noqa: E402

from dataplane.engines.vllm.sampling import SeededSampling, sampling_params  # noqa: E402

SIZE = 300
EOS = (7, 8)


def make(row: int) -> EngineRequest:
    """Requests of all kinds; the first of four takes the greatest of the model's logits, which is vLLM's to do."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "ignore_eos": True},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
        {"logit_bias": ((row, 4.0),), "frequency_penalty": 0.5},
    ]
    return request(str(row), (1, 2, 3), seed=row, max_tokens=20, **kinds[row % len(kinds)])


def processor(requests: dict[int, EngineRequest], outputs: dict[int, list[int]]) -> SeededSampling:
    made = SeededSampling(None, torch.device("cpu"), False)
    added = [(row, sampling_params(one, EOS, left=20), list(one.prompt), outputs[row]) for row, one in requests.items()]
    made.update_state(BatchUpdate(batch_size=len(requests), removed=[], added=added, moved=[]))
    return made


def draw(one: EngineRequest, output: list[int]) -> Draw:
    return Draw(
        temperature=one.temperature,
        top_p=one.top_p,
        seed=one.seed,
        position=len(one.prompt) + len(output),
        top_k=one.top_k,
        min_p=one.min_p,
        banned=EOS if one.ignore_eos else (),
    )


@pytest.mark.parametrize("rows", [1, 2, 16, 64])
def test_a_step_of_any_size_waits_for_nothing(rows: int) -> None:
    """vLLM then copies the tokens of all rows to the host, once."""
    torch.manual_seed(rows)
    logits = torch.randn(rows, SIZE)
    requests = {row: make(row) for row in range(rows)}
    outputs: dict[int, list[int]] = {row: [5] * (row % 3) for row in range(rows)}
    expected = processor(requests, outputs).apply(logits.clone()).argmax(dim=-1).tolist()
    sampler = processor(requests, outputs)
    with counted() as waits:
        made = sampler.apply(FakeTensor(logits.clone())).argmax(dim=-1).tolist()
    assert made == expected
    assert waits == ["tolist"]


def test_each_row_has_the_token_that_the_torch_engine_would_choose_whatever_its_row() -> None:
    logits = torch.randn(12, SIZE)
    requests = {row: make(row) for row in range(12)}
    outputs: dict[int, list[int]] = {row: [] for row in range(12)}
    sampler = processor(requests, outputs)
    for moved in ([], [(1, 6, MoveDirectionality.SWAP), (2, 5, MoveDirectionality.SWAP)]):
        sampler.update_state(BatchUpdate(batch_size=12, removed=[], added=[], moved=moved))
        for one, other, _ in moved:
            for by_row in (requests, outputs):
                by_row[one], by_row[other] = by_row[other], by_row[one]  # type: ignore[index, assignment]
        chosen = sampler.apply(logits.clone()).argmax(dim=-1).tolist()
        plain = [row for row in range(12) if not requests[row].logit_bias]
        draws = [draw(requests[row], outputs[row]) for row in plain]
        assert [chosen[row] for row in plain] == choose_tokens(logits[plain].clone(), draws)
        for row, output in outputs.items():
            output.append(chosen[row])


def test_rows_leave_with_their_requests() -> None:
    sampler = processor({0: make(1), 1: make(2)}, {0: [], 1: []})
    sampler.update_state(BatchUpdate(batch_size=0, removed=[0, 1], added=[], moved=[]))
    logits = torch.randn(2, SIZE)
    assert torch.equal(sampler.apply(logits.clone()), logits)
