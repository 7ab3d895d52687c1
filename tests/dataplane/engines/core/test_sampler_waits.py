"""How often sampling makes the host wait for the device, counted on a fake one."""

import pytest
import torch

from dataplane.engines.core.adjustments import LogitAdjustments
from dataplane.engines.core.sampler import Draw, choose_tokens
from tests.dataplane.engines.fake_device import FakeTensor, counted
from tests.dataplane.engines.torch.drive import request

SIZE = 300


def adjustments(row: int) -> LogitAdjustments | None:
    asked = request(str(row), (1, 2), logit_bias=((row, 5.0),), repetition_penalty=1.5)
    made = LogitAdjustments.of(asked, prompt_tokens=2, tokens_max=10)
    assert made is not None
    made.follow([1, 2, 3])
    return made


def draws(rows: int) -> list[Draw]:
    """Requests of all kinds, of which no two that follow each other are alike."""
    return [
        Draw(
            temperature=row % 3 / 2,
            top_p=0.9 if row % 2 else 1.0,
            seed=row,
            position=row,
            top_k=5 if row % 5 == 1 else 0,
            min_p=0.1 if row % 7 == 1 else 0.0,
            banned=(3, 4) if row % 4 == 1 else (),
            adjustments=adjustments(row) if row % 4 == 2 else None,
            allowed=b"\xc8\0" * (SIZE // 2 - 5) if row % 6 == 5 else None,
        )
        for row in range(rows)
    ]


@pytest.mark.parametrize("rows", [1, 2, 16, 64])
def test_a_batch_of_any_size_waits_once_for_its_tokens(rows: int) -> None:
    torch.manual_seed(rows)
    logits = torch.randn(rows, SIZE)
    logits[rows // 2] = float("nan")
    expected = choose_tokens(logits.clone(), draws(rows))
    with counted() as waits:
        chosen = choose_tokens(FakeTensor(logits.clone()), draws(rows))
    assert chosen == expected
    assert waits == ["tolist"]


def test_the_old_ways_are_counted() -> None:
    """What was done for each request or step before: each of these makes the host wait."""
    with counted() as waits:
        logits = FakeTensor(torch.randn(4, SIZE))
        torch.tensor([1.0, 2.0], device=logits.device)
        torch.from_numpy(torch.zeros(2).numpy()).to(logits.device)
        torch.nonzero(logits[:, 0] < 0)
        logits[logits[:, 0] < 0] = 0.0
        logits[0].max().item()
        bool(logits[0, 0] > 0)
        logits.cpu()
        logits.argmax(dim=-1).tolist()
    assert waits == [
        "a copy to the device",
        "a copy to the device",
        "aten::nonzero",
        "aten::index_put_",
        "aten::_local_scalar_dense",
        "aten::_local_scalar_dense",
        "aten::_to_copy",
        "tolist",
    ]
