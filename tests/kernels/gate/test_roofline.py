"""The roofline model: times that follow from bytes, operations and launches."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tailrace.kernels.gate import prefill_roofline as prefill
from tailrace.kernels.gate.aot_gate import EIGHT_ROWS
from tailrace.kernels.gate.aot_worker import kernel_modules, planned
from tailrace.kernels.gate.operation import (
    BARRIER_US,
    CLOCK_HZ,
    COPY_TB_S,
    DEPENDENT_US,
    INSTRUCTION_CLOCKS,
    L2_TB_S,
    LAUNCH_US,
    PEAKS,
    RAMP_US,
    SMS,
    STREAM_SHARE,
    Operation,
)
from tailrace.kernels.gate.roofline import (
    EIGHT,
    Measured,
    attention,
    clocks,
    fused_step,
    linears,
    main,
    markdown,
    read_behind,
    sampling,
    step,
    whole_fused_step,
    whole_step,
)
from tailrace.kernels.shapes import BITNET_2B4T, LLAMA_8B, PAGE_TOKENS, DecoderShape
from tailrace.kernels.variant import Variant


@pytest.fixture(scope="module")
def plan() -> dict[DecoderShape, list[Variant]]:
    found: dict[DecoderShape, list[Variant]] = {}
    for entry in planned(kernel_modules("tailrace.kernels")):
        found.setdefault(entry.shape, []).append(entry.variant)
    return found


def test_a_floor_is_bytes_over_bandwidth_and_expectation_adds_a_launch() -> None:
    operation = Operation("x", 43_000_000, launches=2)
    assert operation.floor_us() == pytest.approx(10.0)
    assert operation.floor_us(8.6) == pytest.approx(5.0)
    busy = 10.0 / STREAM_SHARE
    assert operation.expected_us() == pytest.approx(busy + 2 * (LAUNCH_US + RAMP_US))
    assert operation.expected_us(dependent=True) == pytest.approx(busy + 2 * DEPENDENT_US)
    headed = replace(operation, ordinary=1)
    assert headed.expected_us() == operation.expected_us()
    between = (operation.expected_us() + operation.expected_us(dependent=True)) / 2
    assert headed.expected_us(dependent=True) == pytest.approx(between)


def test_arithmetic_that_takes_longer_than_memory_is_what_is_expected() -> None:
    operation = Operation("x", 1, arithmetic=int(PEAKS["dp4a"]), peak=PEAKS["dp4a"])
    assert operation.expected_us() == pytest.approx(1e6, rel=1e-4)


def test_a_step_of_bitnet_moves_its_weights_its_head_and_its_cache(
    plan: dict[DecoderShape, list[Variant]],
) -> None:
    shape, variants = BITNET_2B4T, plan[BITNET_2B4T]
    weights = shape.layers * sum(o * i for o, i in shape.linears.values()) // 4
    cache = shape.layers * 512 * 2 * shape.keys * 2
    for int8, head in ((False, 2 * shape.vocab * shape.hidden), (True, shape.vocab * shape.hidden)):
        whole = whole_step(shape, variants, int8, {})
        least = weights + cache + head
        assert least < whole.bytes_moved < 1.02 * least
        assert whole.bytes_moved == sum(p.bytes_moved for p in step(shape, variants, int8, {}))
        samplers = sampling(shape, variants).launches
        assert whole.launches == 5 * shape.layers + 2 + samplers
        assert whole.ordinary == 1


def test_what_is_behind_the_wait_is_expected_of_every_layer(
    plan: dict[DecoderShape, list[Variant]], tmp_path: Path
) -> None:
    shape, variants = BITNET_2B4T, plan[BITNET_2B4T]
    [qkv] = [v for v in variants if v.step == "qkv"]
    file = tmp_path / "aot.txt"
    file.write_text("a table\n" + json.dumps({"behind_wait": {qkv.name: 500}}) + "\n", "utf-8")
    counted = whole_step(shape, variants, False, read_behind(file))
    more = shape.layers * clocks(qkv, 500) / CLOCK_HZ * 1e6
    for dependent in (False, True):
        bare = whole_step(shape, variants, False, {}).expected_us(dependent)
        assert counted.expected_us(dependent) == pytest.approx(bare + more)


@pytest.mark.parametrize(
    ("programs", "warps", "each"),
    [
        (1, 4, INSTRUCTION_CLOCKS),
        (SMS, 8, INSTRUCTION_CLOCKS),
        (SMS + 1, 8, 4.0),  # 16 warps on one SM
        (SMS, 16, 4.0),
        (4 * SMS, 8, 8.0),
    ],
)
def test_warps_that_share_a_scheduler_take_turns(
    programs: int, warps: int, each: float, plan: dict[DecoderShape, list[Variant]]
) -> None:
    variant = replace(plan[BITNET_2B4T][0], programs=programs, num_warps=warps)
    assert clocks(variant, 100) == 100 * each


def test_a_step_of_eight_rows_is_counted_with_its_norms(
    plan: dict[DecoderShape, list[Variant]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape, variants = BITNET_2B4T, plan[BITNET_2B4T]
    counted = {f"{shape.name}.{name}": 100 for name in EIGHT_ROWS}
    parts = step(shape, variants, False, counted, EIGHT)
    named = [re.split(r"[. ]", part.name)[1] for part in parts]
    layer = ["norm", "qkv", "attend", "norm", "o", "norm", "gate_up", "norm", "down"]
    assert named == ["embed", *layer, "head", "sample"]
    one, eight = (whole_step(shape, variants, False, {}, rows) for rows in (1, EIGHT))
    assert eight.launches == one.launches + 4 * shape.layers + 1
    cached = shape.layers * 512 * 2 * shape.keys * 2
    more = eight.bytes_moved - one.bytes_moved
    assert (EIGHT - 1) * cached < more < 1.4 * (EIGHT - 1) * cached
    # A norm is a program for each row; linears have as many as there are groups of packed rows.
    by_name = {variant.name: variant for variant in variants}
    assert by_name[f"{shape.name}.gate_up ternary gemm rows=8"].programs > SMS
    each = [clocks(by_name[f"{shape.name}.{name}"], 100) for name in EIGHT_ROWS]
    assert each[::2] == [100 * INSTRUCTION_CLOCKS] * 4
    assert sum(part.behind for part in parts) == pytest.approx(shape.layers * sum(each))

    file = tmp_path / "aot.txt"
    file.write_text(json.dumps({"behind_wait": counted}), "utf-8")
    assert main(["--aot", str(file)]) == 0
    told = capsys.readouterr().out.splitlines()[-1]
    ratio = whole_step(shape, variants, False, counted, EIGHT).expected_us(True)
    ratio /= one.expected_us(dependent=True)
    assert told.startswith(f"8 rows of one: {ratio:.3f} (bitnet-2b4t.step rows=8 length=512), ")


@pytest.mark.parametrize("text", ["", "[]", "{}", "no json"])
def test_a_file_that_make_aot_did_not_write_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "aot.txt"
    file.write_text(text, "utf-8")
    assert main(["--aot", str(file)]) == 1


def test_a_fused_step_has_three_launches_per_layer_and_a_barrier_in_two(
    plan: dict[DecoderShape, list[Variant]], tmp_path: Path
) -> None:
    shape, variants = BITNET_2B4T, plan[BITNET_2B4T]
    names = [f"{shape.name}.{name} ternary pair rows=1" for name in ("o+gate_up", "down+qkv")]
    file = tmp_path / "aot.txt"
    counted = {
        "behind_wait": dict.fromkeys(names, 900),
        "behind_barrier": dict.fromkeys(names, 500),
    }
    file.write_text(json.dumps(counted), "utf-8")
    behind = read_behind(file)
    parts = fused_step(shape, variants, False, behind)
    named = [re.split(r"[. ]", part.name)[1] for part in parts]
    pairs = ["o+gate_up", "down+qkv"]
    assert named == ["embed", "qkv", "attend", *pairs, "down", "head", "sample"]
    fused, plain = (whole(shape, variants, False, {}) for whole in (whole_fused_step, whole_step))
    assert fused.launches == plain.launches - (2 * shape.layers - 1)
    assert fused.barriers == 2 * shape.layers - 1
    assert fused.bytes_moved == plain.bytes_moved
    saved = plain.expected_us() - fused.expected_us()
    assert saved == pytest.approx(fused.barriers * (LAUNCH_US + RAMP_US - BARRIER_US))
    # gate_up has more programs than multiprocessors; each half before a barrier has fewer.
    per_layer = 400 * 4.0 + 500 * 8.0, 400 * 4.0 + 500 * 4.0
    behind_us = [part.behind for part in parts[3:5]]
    layers = shape.layers, shape.layers - 1
    assert behind_us == pytest.approx([n * c for n, c in zip(layers, per_layer, strict=True)])


def test_prefill_is_bound_by_the_caches_and_tensor_cores(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert prefill.tensor_share(16) == pytest.approx(0.4)
    assert prefill.tensor_share(64) == prefill.tensor_share(256) == 1.0
    gate_up = prefill.float_linear(LLAMA_8B, "gate_up", 512, 16, 64)
    weight, tiles = 2 * 28_672 * 4096, 28_672 // 128
    assert gate_up.cached == 8 * weight + tiles * 512 * 4096 * 2
    assert gate_up.expected_us() == pytest.approx(
        gate_up.cached / L2_TB_S / 1e6 + LAUNCH_US + RAMP_US
    )
    # Causal: 1 + 2 + ... + 8 pages, read once by each query head.
    attention_op = prefill.attention(LLAMA_8B, 0, 512)
    assert attention_op.cached == 36 * PAGE_TOKENS * LLAMA_8B.heads * 128 * 2 * 2
    later = prefill.attention(LLAMA_8B, 512, 512)
    assert later.arithmetic == attention_op.arithmetic * (36 + 64) // 36
    names = [part.name.split(".")[1].split()[0] for part in prefill.layer(LLAMA_8B, 0, 512)]
    dense = ["norm", "qkv", "rope_write", "prefill", "o", "norm", "gate_up", "down"]
    assert names == dense
    assert len(list(prefill.layer(BITNET_2B4T, 0, 512))) == 10
    wide = prefill.prompt_us(LLAMA_8B, 512, 128, 128)
    assert wide < prefill.prompt_us(LLAMA_8B, 512) < prefill.prompt_us(LLAMA_8B, 2048) / 4
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert "### llama-8b: prefill of 512 tokens" in printed
    assert (
        f"llama-8b, 512 tokens, 128 columns, 128 rows per program: {wide / 1e3:.1f} ms" in printed
    )


def test_the_parts_of_a_step_are_in_order(plan: dict[DecoderShape, list[Variant]]) -> None:
    parts = [re.split(r"[. ]", part.name)[1] for part in step(LLAMA_8B, plan[LLAMA_8B], False, {})]
    assert parts == ["embed", "qkv", "attend", "o", "gate_up", "down", "head", "sample"]


def test_linears_are_named_as_in_the_bench(plan: dict[DecoderShape, list[Variant]]) -> None:
    ternary = linears(BITNET_2B4T, plan[BITNET_2B4T])
    assert ternary["qkv ternary rows=1"].name == "bitnet-2b4t.qkv ternary rows=1"
    assert ternary["qkv ternary rows=1"].peak == PEAKS["dp4a"]
    assert ternary["head int8 rows=1"].name == "bitnet-2b4t.head int8 rows=1"
    dense = linears(LLAMA_8B, plan[LLAMA_8B])
    assert dense["down bf16 rows=64"].arithmetic == 2 * 64 * 4096 * 14_336
    assert dense["down bf16 rows=64"].peak == PEAKS["bf16 tensor cores"]


def test_attention_reads_every_cached_token_once() -> None:
    operation = attention(LLAMA_8B, 32, 32_768)
    cached = 32 * 32_768 * 2 * 1024 * 2
    assert cached < operation.bytes_moved < 1.01 * cached
    assert operation.arithmetic == 4 * 32 * 32_768 * 4096


def test_measurements_are_compared_with_the_copy_of_their_own_run(tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    file.write_text(
        json.dumps({"us": {"x": 10.0}, "copy_tb_s": 4.0, "hardware": {"gpu": "H200"}}), "utf-8"
    )
    measured = Measured.read(file)
    operation = Operation("x", 20_000_000, arithmetic=10**9)
    assert measured.share(operation) == pytest.approx(0.5)
    assert measured.share(Operation("y", 1)) is None
    row = markdown("title", [operation], measured).splitlines()[-1]
    assert row == "| x | 1 | 20.000 | 5.00 | 7.3 | 5.7 | 10.00 | 50% |"


@pytest.mark.parametrize("text", ["[]", "{}", '{"us": 3}', "no json"])
def test_a_file_that_is_no_measurement_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "measured.json"
    file.write_text(text, "utf-8")
    assert main(["--measured", str(file)]) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_the_command_prints_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "measured.json"
    name = "bitnet-2b4t.qkv ternary rows=1"
    file.write_text(json.dumps({"us": {name: 2.5}, "copy_tb_s": COPY_TB_S}), "utf-8")
    assert main(["--measured", str(file)]) == 0
    tables = capsys.readouterr().out
    assert f"| {name} | 1 | " in tables
    assert "### bitnet-2b4t: a step of one row at 512 tokens" in tables


def test_json_holds_every_operation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    names = [entry["name"] for entry in entries]
    assert "llama-8b.attend bfloat16 rows=32 length=32768" in names
    chained = [entry for entry in entries if entry["launches"] > entry["ordinary"]]
    heads = [e["name"].split(".")[1].partition(" rows")[0] for e in entries if e not in chained]
    assert heads == ["embed", "embed", *["embed"] * 2, *["prefill attention"] * 3]
    assert all(entry["expected_us"] > entry["dependent_us"] > 0 for entry in chained)
    assert all(entry["floor_us"] <= entry["dependent_us"] for entry in entries)
