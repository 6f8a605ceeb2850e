"""Options of launches."""

import subprocess
import sys

import pytest
import torch

from tailrace.kernels.launch import INTERPRETED, OPTIONS, next_power_of_2


def test_kernels_are_interpreted_where_there_is_no_gpu() -> None:
    assert torch.cuda.is_available() or INTERPRETED


def test_products_are_rounded_before_they_are_added() -> None:
    assert OPTIONS["enable_fp_fusion"] is False


def test_the_next_power_of_two_is_not_below_its_size() -> None:
    sizes = [0, 1, 2, 3, 4, 5, 2560, 4096, 4097]
    assert [next_power_of_2(size) for size in sizes] == [1, 1, 2, 4, 4, 8, 4096, 4096, 8192]


@pytest.mark.parametrize(
    ("version", "fits"),
    [("3.6.0", True), ("3.7.1", True), ("3.5.1", False), ("3.8.0", False), ("main", False)],
)
def test_a_triton_that_the_kernels_are_not_known_to_run_on_is_named(
    version: str, fits: bool
) -> None:
    code = f"import triton; triton.__version__ = {version!r}; import tailrace.kernels.launch"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode == 0) is fits, ran.stderr
    if not fits:
        last = ran.stderr.splitlines()[-1]
        assert (
            f"ImportError: triton {version} is installed, and the kernels need 3.6 to 3.7" in last
        )
