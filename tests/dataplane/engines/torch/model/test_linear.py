import pytest
import torch

from dataplane.engines.torch.model.linear import FEW_ROWS, FewRowsLinear, speed_up


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, FEW_ROWS.start - 1, FEW_ROWS.start, FEW_ROWS.stop - 1, FEW_ROWS.stop])
def test_it_is_a_linear_layer_for_any_number_of_rows(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(24, 40, bias=bias)
    model = torch.nn.Sequential(torch.nn.Linear(24, 40, bias=bias))
    model.load_state_dict({f"0.{name}": value for name, value in plain.state_dict().items()})
    speed_up(model)
    assert isinstance(model[0], FewRowsLinear)
    x = torch.randn(1, rows, 24)
    with torch.inference_mode():
        made = model(x)
        torch.testing.assert_close(made, plain(x))
    assert made.is_contiguous(), "what comes next reads row by row"


def test_layers_with_a_forward_of_their_own_keep_it() -> None:
    class Own(torch.nn.Linear):
        pass

    model = torch.nn.Sequential(Own(2, 2))
    speed_up(model)
    assert type(model[0]) is Own
