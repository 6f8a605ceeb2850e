"""Descriptions of kernels to be compiled."""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl

from tailrace.kernels.variant import Variant


@triton.jit
def copy_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    column = tl.arange(0, SIZE)
    tl.store(out_ptr + column, tl.load(x_ptr + column))


PLAIN = Variant(
    name="plain",
    kernel=copy_kernel,
    signature={"x_ptr": "*fp32", "out_ptr": "*fp32"},
    constants={"SIZE": 128},
)


def test_what_a_variant_is_for_does_not_change_its_compilation() -> None:
    other = replace(PLAIN, name="other", step="qkv", bytes_moved=5, expects=("LDG",))
    assert other.key == PLAIN.key


def test_everything_that_a_compiler_sees_changes_the_key() -> None:
    others = [
        replace(PLAIN, signature={"x_ptr": "*bf16", "out_ptr": "*fp32"}),
        replace(PLAIN, constants={"SIZE": 256}),
        replace(PLAIN, divisible=frozenset({"x_ptr"})),
        replace(PLAIN, num_warps=8),
        replace(PLAIN, num_stages=2),
        replace(PLAIN, launch_pdl=True),
        replace(PLAIN, options={"maxnreg": 32}),
    ]
    assert len({PLAIN.key, *(other.key for other in others)}) == 1 + len(others)


def test_a_kernel_is_named_with_its_module() -> None:
    assert PLAIN.kernel_name == f"{__name__}.copy_kernel"


def test_a_dependent_launch_is_expected_to_wait_and_to_let_the_next_one_start() -> None:
    other = replace(PLAIN, expects=("LDG",), launch_pdl=True)
    assert other.instructions == ("LDG", "ACQBULK", "PREEXIT")
    assert replace(other, launch_pdl=False).instructions == ("LDG",)
