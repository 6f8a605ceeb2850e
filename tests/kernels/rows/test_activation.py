import pytest
import torch

from kernels.rows.activation import relu2_gate, relu2_gate_norm_int8


def test_the_first_half_gates_the_second() -> None:
    gate_up = torch.tensor([[-1.0, 0.0, 2.0, 5.0, 6.0, 7.0]])
    assert relu2_gate(gate_up).tolist() == [[0.0, 0.0, 28.0]]


def test_an_odd_number_of_columns_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^gate_up: 5 columns"):
        relu2_gate(torch.ones(1, 5))


def test_the_quantised_form_has_a_factor_for_each_row() -> None:
    gate_up = torch.tensor([[1.0, 2.0, 1.0, 1.0], [float("nan"), 1.0, 1.0, 1.0]])
    q, factor = relu2_gate_norm_int8(gate_up, torch.ones(2), 1e-5)
    assert q.tolist() == [[32, 127], [0, 0]]
    assert factor.isnan().tolist() == [False, True]
