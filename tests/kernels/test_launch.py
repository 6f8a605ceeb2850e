"""Options of launches."""

import torch

from tailrace.kernels.launch import INTERPRETED, OPTIONS, next_power_of_2


def test_kernels_are_interpreted_where_there_is_no_gpu() -> None:
    assert torch.cuda.is_available() or INTERPRETED


def test_products_are_rounded_before_they_are_added() -> None:
    assert OPTIONS["enable_fp_fusion"] is False


def test_the_next_power_of_two_is_not_below_its_size() -> None:
    sizes = [0, 1, 2, 3, 4, 5, 2560, 4096, 4097]
    assert [next_power_of_2(size) for size in sizes] == [1, 1, 2, 4, 4, 8, 4096, 4096, 8192]
