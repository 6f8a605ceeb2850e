"""The judgement on compilations, made up here; real ones are judged in test_aot.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tailrace.kernels.gate.aot_gate import (
    COMMON_SHARED_BYTES,
    EIGHT_ROWS,
    MAX_INSTRUCTIONS,
    Compiled,
    Gate,
    identity,
    sampled,
)
from tailrace.kernels.gate.targets import FEW_SPILLS, OTHERS, SM_90, Target

CODE = {
    "registers": 40,
    "shared_bytes": 1024,
    "spill_bytes": 0,
    "float_atomics": 0,
    "before_wait": [],
    "read_ahead": ["tables_ptr"],
    "barriers_behind_wait": 8,
    "instructions_behind_wait": 450,
    "instructions_behind_arrival": 200,
    "instructions": 600,
    "opcodes": ["HGMMA.64x16x16.F32.BF16", "LDG.E.128"],
}


def use(kernel: str = "k.a", **changes: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "arch": 90,
        "module": "k",
        "shape": "tiny",
        "name": "tiny.qkv",
        "step": None,
        "expects": [],
    }
    return {**plain, "kernel": kernel, **changes}


def compiled(*uses: dict[str, Any], **changes: Any) -> Compiled:
    return Compiled(list(uses) or [use()], {**CODE, **changes})


def gate(*all_compiled: Compiled, launched: tuple[str, ...] = ()) -> Gate:
    return Gate("3.7.1", list(all_compiled), list(launched))


def test_a_kernel_in_order_offends_nobody() -> None:
    assert gate(compiled(use(expects=["HGMMA", "LDG"])), launched=("k.a",)).offenders() == []


def test_each_offence_is_named_with_its_kernel() -> None:
    bad = compiled(
        use(expects=["IDP.4A", "LDG"]),
        use(name="tiny.o", expects=["IGMMA"]),
        spill_bytes=16,
        float_atomics=2,
        shared_bytes=SM_90.limits.shared_bytes + 1,
    )
    assert gate(bad).offenders() == [
        "k.a (tiny.qkv) spills 16 bytes, at most 0 are allowed",
        "k.a (tiny.qkv) adds floats atomically, 2 times",
        "k.a (tiny.qkv) lacks IDP.4A, IGMMA",
        "k.a (tiny.qkv) needs 232449 bytes of shared memory, the GPU has 232448",
    ]


def test_what_does_not_compile_is_shown_with_its_error() -> None:
    broken = Compiled([use(expects=["HGMMA"])], None, "at 3:4: no such function")
    found = gate(broken, compiled())
    assert found.offenders() == ["k.a (tiny.qkv) does not compile:\nat 3:4: no such function"]
    assert found.summary()["compile_errors"] == 1
    assert found.summary()["missing_instructions"] == 0


def test_a_dependent_launch_that_writes_too_early_offends() -> None:
    early = compiled(before_wait=["STG.E"])
    assert gate(early).offenders() == [
        "k.a (tiny.qkv) does not wait for earlier launches before STG.E"
    ]
    assert gate(early, compiled()).summary()["before_wait"] == 1
    assert gate(compiled(read_ahead=["norm_ptr", "x_ptr"])).offenders() == [
        "k.a (tiny.qkv) reads x_ptr before it waits for earlier launches"
    ]


def test_only_attention_that_writes_its_own_tokens_may_read_older_ones_early() -> None:
    writes, reads = use(name="tiny.attend write dependent"), use(name="tiny.attend dependent")
    ordinary = use(name="tiny.attend write")
    assert gate(compiled(writes, ordinary, read_ahead=["keys_ptr"])).offenders() == []
    for uses in ((reads,), (writes, reads)):
        found = gate(compiled(*uses, read_ahead=["keys_ptr"])).offenders()
        assert len(found) == 1
        assert "reads keys_ptr before it waits" in found[0]


def test_an_offence_on_another_architecture_names_it_and_its_limits() -> None:
    small = compiled(
        use(arch=89, expects=["IGMMA"]), spill_bytes=FEW_SPILLS, shared_bytes=(99 << 10) + 1
    )
    found = replace(gate(compiled()), elsewhere=[small], unknown=["sm_120"])
    assert found.offenders() == [
        "k.a (tiny.qkv) for sm_89 lacks IGMMA",
        "k.a (tiny.qkv) for sm_89 needs 101377 bytes of shared memory, the GPU has 101376",
    ]
    summary = found.summary()
    assert summary["unknown_targets"] == ["sm_120"]
    assert summary["targets"]["sm_89"] == {
        "compilations": 1,
        "compile_errors": 0,
        "spill_bytes": FEW_SPILLS,
        "missing_instructions": 1,
        "registers_max": 40,
        "shared_bytes_max": 101377,
        "shared_bytes_allowed": 101376,
    }
    assert summary["compilations"] == 1, "other architectures are counted apart"
    more = compiled(use(arch=120), spill_bytes=FEW_SPILLS + 1)
    assert replace(found, elsewhere=[more]).offenders() == [
        f"k.a (tiny.qkv) for sm_120 spills {FEW_SPILLS + 1} bytes, at most {FEW_SPILLS} are allowed"
    ]


def test_another_architecture_may_do_the_same_work_with_another_instruction() -> None:
    plain = [compiled(use(arch=arch, expects=["HGMMA"]), opcodes=["HMMA"]) for arch in (90, 80)]
    assert [one.missing() for one in plain] == [["HGMMA"], []]
    tensor_memory = compiled(use(arch=100, expects=["HGMMA", "LDG"]), opcodes=["UTCHMMA", "LDG.E"])
    assert tensor_memory.missing() == []


def sample(target: Target, *all_compiled: Compiled) -> set[str]:
    """Return the names of the variants that are sampled if the target runs all of them."""
    names = {identity(use) for one in all_compiled for use in one.uses}
    return {name for _, name in sampled(all_compiled, target, names)}


def test_the_sample_has_the_variant_that_needs_most_shared_memory_of_a_kernel() -> None:
    tight = COMMON_SHARED_BYTES + 1
    few = compiled(use(name="tiny.few"), instructions=10)
    large = compiled(use(name="tiny.large dependent"), shared_bytes=tight, registers=150)
    many = compiled(use(name="tiny.many"), shared_bytes=tight, registers=200)
    broken = Compiled([use("k.b", name="tiny.broken")], None, "an error")
    for target in OTHERS:
        assert sample(target, few, large, many, broken) == {"tiny.many"}
        assert sample(target, few, large) == {"tiny.large"}


def test_kernels_without_such_a_need_take_turns_with_their_smallest_variants() -> None:
    """Kernels of another folder, or with other products, have turns of their own."""
    first = [compiled(use("k.a", name=f"tiny.a{n}", module="k.a"), instructions=n) for n in (9, 7)]
    second = compiled(use("k.b", name="tiny.b", module="k.b"))
    elsewhere = compiled(use("m.c", name="tiny.c", module="m.c"))
    product = [
        compiled(use("k.d", name="tiny.float", module="k.d"), instructions=1),
        compiled(use("k.d", name="tiny.product", module="k.d", expects=["HGMMA"])),
    ]
    every = [*first, second, elsewhere, *product]
    assert [sample(target, *every) - {"tiny.c", "tiny.product"} for target in OTHERS] == [
        *({"tiny.a7"}, {"tiny.b"}),
        *({"tiny.a7"}, {"tiny.b"}),
    ]
    assert all({"tiny.c", "tiny.product"} < sample(target, *every) for target in OTHERS)


def test_what_a_target_cannot_run_is_not_sampled() -> None:
    fp8 = compiled(use(name="tiny.fp8"), instructions=1)
    other = compiled(use(name="tiny.other"))
    assert sampled([fp8, other], OTHERS[0], {("k", "tiny.other")}) == {("k", "tiny.other")}


def test_a_launched_kernel_without_a_variant_offends() -> None:
    found = gate(compiled(), launched=("k.a", "k.forgotten"))
    assert found.offenders() == ["k.forgotten is launched, but no variant compiles it"]


def test_launches_are_counted_per_shape_and_alternatives_once() -> None:
    found = gate(
        compiled(use("dense.linear", module="dense", step="qkv"), use(step=None)),
        compiled(use("weights.linear", module="weights", step="qkv")),
        compiled(use("attention.split", module="attention", step="attend")),
        compiled(use("attention.merge", module="attention", step="attend")),
        compiled(use("dense.linear", module="dense", step="qkv", shape="other")),
    )
    assert found.launches() == {"tiny": 3, "other": 1}
    assert found.summary()["launches_per_layer"] == 3
    assert found.offenders() == []


def test_a_step_of_too_many_launches_offends() -> None:
    steps = [compiled(use(f"k.{step}", step=f"step{step}")) for step in range(6)]
    assert gate(*steps).offenders() == ["tiny launches 6 kernels per layer, at most 5 are allowed"]


def test_the_summary_counts_uses_and_compilations_apart() -> None:
    found = gate(compiled(use(), use(name="tiny.o")), compiled(use("k.b"), registers=90))
    summary = found.summary()
    assert (summary["kernels"], summary["variants"], summary["compilations"]) == (2, 3, 2)
    assert summary["registers_max"] == 90
    assert summary["spill_bytes"] == summary["float_atomics"] == 0


def test_what_a_ternary_linear_has_behind_its_wait_is_told_and_judged() -> None:
    name = "tiny.{} ternary gemv rows=1"
    long = compiled(
        use(name=name.format("down"), step="down"),
        use(name=name.format("down") + " dependent"),
        barriers_behind_wait=9,
        instructions_behind_wait=MAX_INSTRUCTIONS + 1,
    )
    attend = compiled(use(name="tiny.attend", step="attend"), instructions_behind_wait=4000)
    found = gate(compiled(use(name=name.format("qkv"), step="qkv")), long, attend)
    summary = found.summary()
    assert summary["barriers_behind_wait"] == 9
    assert summary["instructions_behind_wait"] == MAX_INSTRUCTIONS + 1
    assert summary["behind_wait"] == {
        name.format("qkv"): 450,
        name.format("down"): MAX_INSTRUCTIONS + 1,
        "tiny.attend": 4000,
    }
    assert found.offenders() == [
        f"{name.format('down')} has 9 barriers after its wait for earlier launches,"
        " at most 8 are allowed",
        f"{name.format('down')} has {MAX_INSTRUCTIONS + 1} instructions after its wait for"
        f" earlier launches, at most {MAX_INSTRUCTIONS} are allowed",
    ]


def test_a_pair_of_linears_is_counted_before_and_behind_its_barrier() -> None:
    pair = compiled(use(name="tiny.o+gate_up ternary pair rows=1"), use(name="tiny.other"))
    summary = gate(pair).summary()
    assert summary["behind_wait"] == {"tiny.o+gate_up ternary pair rows=1": 450}
    assert summary["behind_barrier"] == {"tiny.o+gate_up ternary pair rows=1": 200}


def test_eight_rows_are_a_multiple_of_one() -> None:
    steps = ("qkv", "o", "gate_up", "down")
    one = [compiled(use(name=f"tiny.{step} ternary gemv rows=1", step=step)) for step in steps]
    eight = [
        compiled(use(name=f"tiny.{name}"), instructions_behind_wait=250) for name in set(EIGHT_ROWS)
    ]
    assert gate(*one, *eight).eight_rows() == 8 * 250 / (4 * 450)
    assert gate(*one, *eight).offenders() == []
    counted = gate(*one, *eight).summary()["behind_wait"]
    assert [counted[f"tiny.{name}"] for name in EIGHT_ROWS] == [250] * 8
    longer = replace(eight[0], code={**CODE, "instructions_behind_wait": 2000})
    assert [e.partition(",")[0] for e in gate(*one, *eight[1:], longer).offenders()] == [
        f"8 rows take {gate(*one, *eight[1:], longer).eight_rows():.2f} times the instructions of"
        " one row after the waits"
    ]
    assert gate(*one, *eight[1:]).eight_rows() == gate(*eight).eight_rows() == 0
