"""The readers of the tools' output; what they say of real kernels is in test_aot.py."""

from __future__ import annotations

import pytest

from tailrace.kernels.gate.machine_code import (
    before_wait,
    behind_arrival,
    behind_wait,
    compiled,
    float_additions,
    float_atomics,
    instructions,
    read_ahead,
    registers,
    spills,
)
from tailrace.kernels.launch import INTERPRETED
from tailrace.kernels.rows.embedding_triton import variants
from tailrace.kernels.shapes import LLAMA_8B

LOG = """
ptxas info    : Function properties for first
    5328 bytes stack frame, 52276 bytes spill stores, 58072 bytes spill loads
ptxas info    : Used 20 registers, used 1 barriers, 5328 bytes cumulative stack size
ptxas info    : Function properties for second
    32 bytes stack frame, 0 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 64 registers, used 0 barriers
"""
SASS = """
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/              @UP1 UMOV UR4, 0x1 ;
        /*0030*/                   IDP.4A.S8.S8 R4, R4, R5, RZ ;
.L_x_1:
        /*0040*/                   BRA `(.L_x_1);
"""


def test_registers_are_the_most_of_any_function() -> None:
    assert registers(LOG) == 64


def test_spills_of_all_functions_are_added_and_a_stack_alone_is_none() -> None:
    assert spills(LOG) == 52276 + 58072 + 4
    assert spills("32 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == 0


def test_instructions_are_read_with_and_without_a_predicate() -> None:
    assert instructions(SASS) == ["LDC", "LDG.E.128", "UMOV", "IDP.4A.S8.S8", "BRA"]


def test_what_writes_or_ends_before_the_wait_is_found() -> None:
    early = ["PREEXIT", "LDG.E", "CCTL.E.PF2", "STS.64", "ATOMS.ADD", "STL"]
    late = ["STG.E", "ATOMG.E.ADD.STRONG.GPU", "EXIT"]
    assert before_wait([*early, "ACQBULK", *late]) == ()
    assert before_wait([*early, *late, "ACQBULK"]) == ("ATOMG.E.ADD.STRONG.GPU", "EXIT", "STG.E")
    assert before_wait(["REDG.E.OR", "EXIT"]) == ("EXIT", "REDG.E.OR"), "there is no wait"


def test_what_stands_behind_the_wait_ends_with_the_program_not_with_its_subroutines() -> None:
    behind = ["LDG.E", "BAR.SYNC", "EXIT", "STG.E", "EXIT"]
    assert behind_wait(["LDG.E", "ACQBULK", *behind, "MUFU.RCP", "RET"]) == behind
    assert behind_wait(["LDG.E", "EXIT"]) == []


def test_what_stands_behind_a_barrier_of_all_programs_follows_the_arrival() -> None:
    behind = ["LDG.E.STRONG.GPU", "ATOMG.E.ADD.STRONG.GPU", "EXIT"]
    assert behind_arrival(["ATOMS.ADD", "ATOMG.E.ADD.STRONG.GPU", *behind]) == behind
    assert behind_arrival(["LDG.E", "EXIT"]) == []


TTIR = """
  tt.func public @k(%weight_ptr: !tt.ptr<f32>, %x_ptr: !tt.ptr<f32> {tt.divisibility = 16 : i32}) {
    %c0_i32 = arith.constant 0 : i32
    %row = tt.get_program_id x : i32
    %place = tt.splat %weight_ptr : !tt.ptr<f32> -> tensor<64x!tt.ptr<f32>>
    %place_0 = tt.addptr %place, %c0_i32 : tensor<64x!tt.ptr<f32>>, tensor<64xi32>
    %w = tt.load %place_0, %mask, %other : tensor<64x!tt.ptr<f32>>
    %0 = tt.elementwise_inline_asm "griddepcontrol.wait; // dummy $0" -> i32
    %1 = tt.load %x_ptr : !tt.ptr<f32>
"""


def test_what_is_read_ahead_of_the_wait_is_followed_to_its_argument() -> None:
    assert read_ahead(TTIR) == ["weight_ptr"]
    assert read_ahead(TTIR.replace("%0 =", "%5 = tt.load %x_ptr : f32\n%0 =")) == [
        "weight_ptr",
        "x_ptr",
    ]
    assert read_ahead(TTIR.replace("griddepcontrol", "nothing")) == []


@pytest.mark.parametrize("reader", [registers, spills, instructions])
def test_output_that_says_nothing_is_an_error(reader: object) -> None:
    assert callable(reader)
    with pytest.raises(ValueError, match=r"lists no|has no line"):
        reader("a tool of another version")


@pytest.mark.parametrize(
    "opcode",
    [
        "RED.E.ADD.F32.FTZ.RN.STRONG.GPU",
        "REDG.E.ADD.F32.FTZ.RN.STRONG.GPU",
        "ATOMG.E.ADD.F32",
        "ATOM.E.ADD.F64.RN.STRONG.GPU",
        "ATOMG.E.ADD.F16x2.RN.STRONG.GPU",
        "RED.E.ADD.BF16_V2.RN.STRONG.GPU",
    ],
)
def test_an_atomic_addition_of_floats_is_found(opcode: str) -> None:
    assert float_atomics([opcode, "FADD", opcode]) == 2


@pytest.mark.parametrize(
    "opcode",
    [
        "ATOMG.E.ADD.STRONG.GPU",
        "ATOMG.E.MAX.S32.STRONG.GPU",
        "RED.E.OR.STRONG.GPU",
        "REDUX.SUM",
        "FADD.FTZ",
        "F2F.BF16.F32",
    ],
)
def test_integer_atomics_and_plain_additions_are_none(opcode: str) -> None:
    assert float_atomics([opcode]) == float_additions("tt.atomic_rmw add, acq_rel, gpu") == 0


def test_an_atomic_that_the_machine_loops_for_is_found_where_triton_names_it() -> None:
    ttir = "%5 = tt.atomic_rmw fadd, relaxed, gpu, %3, %4 : tensor<128x!tt.ptr<bf16>>"
    assert float_additions(ttir) == 1


@pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")
def test_interpreted_kernels_are_not_compiled() -> None:
    variant, _ = variants(LLAMA_8B)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        compiled(variant)
