"""Checks of tensors before a launch."""

import pytest
import torch

from tailrace.kernels.checks import check_multiple, check_same_device, check_tensor


def test_a_tensor_that_fits_passes() -> None:
    check_tensor("x", torch.empty(2, 3), torch.float32, 2, None)
    check_tensor("x", torch.empty(0, 3), (torch.float16, torch.float32), None, 3)
    check_tensor("x", torch.empty(()), torch.float32)


def test_another_dtype_is_a_type_error_that_names_all_that_would_do() -> None:
    with pytest.raises(
        TypeError, match=r"^x: dtype torch.int8, expected torch.float16 or torch.float32$"
    ):
        check_tensor("x", torch.empty(2, dtype=torch.int8), (torch.float16, torch.float32), 2)


@pytest.mark.parametrize("shape", [(2,), (2, 4), (2, 3, 1), ()])
def test_another_shape_is_refused_with_both_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^x: shape \(.*\), expected \[any, 3\]$"):
        check_tensor("x", torch.empty(shape), torch.float32, None, 3)


def test_strides_that_are_not_dense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^x: strides \(1, 2\), expected a contiguous tensor$"):
        check_tensor("x", torch.empty(3, 2).t(), torch.float32, 2, 3)


@pytest.mark.parametrize("value", [0, -16, 24])
def test_a_size_must_be_a_positive_multiple(value: int) -> None:
    check_multiple("in", 32, 16)
    with pytest.raises(ValueError, match=f"^in: {value}, expected a multiple of 16 above 0$"):
        check_multiple("in", value, 16)


def test_tensors_of_two_devices_are_refused_with_their_places() -> None:
    x, y = torch.empty(1), torch.empty(1, device="meta")
    check_same_device(x=x, y=None, z=x)
    with pytest.raises(ValueError, match=r"^x on cpu, y on meta: expected one device for all$"):
        check_same_device(x=x, y=y)
