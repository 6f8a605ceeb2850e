"""Lower bounds, expected times and measured times of the kernels on an H200.

    python -m tailrace.kernels.gate.roofline                   # print the tables of BENCH.md
    python -m tailrace.kernels.gate.roofline --measured FILE   # add the figures of `make bench-gpu`
    python -m tailrace.kernels.gate.roofline --aot FILE # add the instructions after the wait

The lower bound of an operation is the bytes that it must move, divided by the copy bandwidth. The
expected time adds the costs of a launch, from the constants of `kernels.gate.operation`. Bytes come
from the kernels' own plans.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tailrace.kernels.attention.splits_triton import splits_of
from tailrace.kernels.gate import prefill_roofline as prefill
from tailrace.kernels.gate.aot_gate import EIGHT_ROWS, PAIR
from tailrace.kernels.gate.operation import (
    COPY_TB_S,
    INSTRUCTION_CLOCKS,
    PEAKS,
    SCHEDULERS,
    SMS,
    Operation,
)
from tailrace.kernels.shapes import REAL_SHAPES, DecoderShape, Family
from tailrace.kernels.variant import Variant

INSTRUCTIONS = {
    "IDP.4A": "dp4a",
    "IGMMA": "int8 tensor cores",
    "HGMMA": "bf16 tensor cores",
}
"""Name in PEAKS of the peak that bounds a kernel, by the instruction that its plan expects."""
MAX_ROWS = 64
"""Maximum rows of a decode step; larger batches are prefill, which is not bound by memory."""
EIGHT = 8
"""Rows of the decode step that is compared with a step of one row."""
EIGHT_ROWS_ASKED = 1.25
"""Target for the time of a step of EIGHT rows, as a multiple of the time of one row."""
STEP_TOKENS = 512
"""Length in tokens of the sequences in a predicted decode step, the same as in the bench."""
LONG_TOKENS = 32_768
"""Length in tokens of the sequences with which the bench measures attention alone."""
KV_BYTES = 2
"""Bytes of one element of the KV cache, which is bf16."""

PAIRS = ("o+gate_up", "down+qkv")
"""Names of the launches that compute two linears in a fused decode step of BitNet."""
BEHIND_BARRIER = " behind barrier"
"""Suffix of the names under which instructions after a barrier of all programs are counted."""

# _LINEAR matches a variant's name: step, weight format and rows of a linear. _KERNEL matches the
# kernel's name, which is removed first.
_LINEAR = re.compile(r"(qkv|o|gate_up|down|head) (\w+) rows=(\d+)")
_KERNEL = re.compile(r" (?:dense|gemv|gemm)\b")


def clocks(variant: Variant, instructions: int) -> float:
    """Return the clocks that the instructions take on the multiprocessor with the most warps."""
    warps = math.ceil(variant.programs / SMS) * variant.num_warps
    return instructions * max(INSTRUCTION_CLOCKS, warps / SCHEDULERS)


def linears(shape: DecoderShape, variants: list[Variant]) -> dict[str, Operation]:
    """Return each planned linear and LM head as an operation, by its name without the shape."""
    found: dict[str, Operation] = {}
    sizes = {**shape.linears, "head": (shape.vocab, shape.hidden)}
    for variant in variants:
        what = _plain_name(shape, variant)
        match = _LINEAR.fullmatch(what)
        if match and int(match[3]) <= MAX_ROWS:
            outputs, inputs = sizes[match[1]]
            found[what] = Operation(
                name=f"{shape.name}.{what}",
                bytes_moved=variant.bytes_moved,
                arithmetic=2 * int(match[3]) * outputs * inputs,
                peak=peak_of(variant),
            )
    return found


def _plain_name(shape: DecoderShape, variant: Variant) -> str:
    """Return a variant's name without the shape and the kernel: `qkv ternary rows=1`."""
    return _KERNEL.sub("", variant.name.removeprefix(f"{shape.name}."))


def peak_of(variant: Variant) -> float:
    """Return the peak operations per second of the instruction that a plan expects."""
    names = [name for mnemonic, name in INSTRUCTIONS.items() if mnemonic in variant.expects]
    return PEAKS[names[0] if names else "bf16 tensor cores"]


def attention(shape: DecoderShape, rows: int, length: int) -> Operation:
    """Return the decode attention of `rows` sequences, over a bf16 cache, as an operation."""
    cached = rows * length * 2 * shape.keys * KV_BYTES
    vectors = rows * 4 * (2 * shape.queries + 2 * shape.keys)
    return Operation(
        f"{shape.name}.attend bfloat16 rows={rows} length={length}",
        cached + vectors,
        arithmetic=4 * rows * length * shape.queries,
    )


def sampling(shape: DecoderShape, variants: list[Variant], rows: int = 1) -> Operation:
    """Return the sampler's launches as one operation, without masks and with `rows` rows' bytes."""
    own = [v for v in variants if v.name.startswith(f"{shape.name}.sampl") and _single(v)]
    return Operation(
        f"{shape.name}.sample rows={rows}",
        rows * sum(variant.bytes_moved for variant in own),
        launches=len({variant.kernel_name for variant in own}),
    )


def _single(variant: Variant) -> bool:
    return variant.name.endswith("rows=1")


def layer(
    shape: DecoderShape, variants: list[Variant], behind: Mapping[str, int], rows: int
) -> Iterator[Operation]:
    """Yield the launches of a layer, as operations, in a decode step of `rows` rows.

    behind: number of instructions after the wait for earlier launches, by variant name. rows: 1,
    or EIGHT for BitNet.
    """
    parts = {variant.step: variant for variant in variants if variant.step}
    launched = [parts[what] for what in ("qkv", "attend", "o", "gate_up", "down")]
    if rows > 1:
        named = {variant.name: variant for variant in variants}
        launched = [named[f"{shape.name}.{name}"] for name in EIGHT_ROWS]
        launched.insert(2, parts["attend"])  # attention comes after the norm and qkv
    planned = linears(shape, variants)
    for variant in launched:
        programs, count = variant.programs, behind.get(variant.name, 0)
        found = planned.get(_plain_name(shape, variant))
        if variant.step == "attend":
            found = attention(shape, rows, STEP_TOKENS)
            programs = rows * shape.kv_heads * splits_of(STEP_TOKENS)
        found = found or Operation(variant.name, variant.bytes_moved)
        yield replace(found, behind=clocks(replace(variant, programs=programs), count))


def head(shape: DecoderShape, variants: list[Variant], int8: bool, rows: int) -> Operation:
    """Return the LM head as one operation, which includes a norm if there is more than one row.

    For 2 to 16 rows the bytes moved are interpolated between those of 1 and of 16 rows.
    """
    planned, name = linears(shape, variants), f"head {'int8' if int8 else 'bf16'} rows="
    one, most = planned[f"{name}1"], planned[f"{name}16"]
    if rows == 1:
        return one
    more = (most.bytes_moved - one.bytes_moved) * (rows - 1) // 15
    return replace(
        most, name=f"{shape.name}.{name}{rows}", bytes_moved=one.bytes_moved + more, launches=2
    )


def step(
    shape: DecoderShape,
    variants: list[Variant],
    int8_head: bool,
    behind: Mapping[str, int],
    rows: int = 1,
) -> list[Operation]:
    """Return the operations of a decode step in order, each layer's repeated for all layers.

    behind: number of instructions after the wait for earlier launches, by variant name. rows: 1,
    or EIGHT for BitNet.
    """
    embed = [v for v in variants if v.name == f"{shape.name}.embed rows=1"]
    embedded = rows * sum(v.bytes_moved for v in embed)
    return [
        Operation(f"{shape.name}.embed rows={rows}", embedded, ordinary=1),
        *(part.repeated(shape.layers) for part in layer(shape, variants, behind, rows)),
        head(shape, variants, int8_head, rows),
        sampling(shape, variants, rows),
    ]


def pair(variant: Variant, behind: Mapping[str, int]) -> Operation:
    """Return a launch of two ternary linears as one operation.

    The two halves of the launch have different numbers of programs.
    """
    constants, second = variant.constants, behind.get(variant.name + BEHIND_BARRIER, 0)
    first = behind.get(variant.name, 0) - second
    return Operation(
        variant.name,
        variant.bytes_moved,
        behind=clocks(replace(variant, programs=constants["PROGRAMS"]), first)
        + clocks(replace(variant, programs=constants["NEXT_PROGRAMS"]), second),
        barriers=1,
    )


def fused_step(
    shape: DecoderShape, variants: list[Variant], int8_head: bool, behind: Mapping[str, int]
) -> list[Operation]:
    """Return BitNet's step of one row with fused pairs of linears: three launches per layer."""
    named = {variant.name: variant for variant in variants}
    embed, _, attend, *_, lm_head, sampler = step(shape, variants, int8_head, behind)
    qkv, *_, down = layer(shape, variants, behind, rows=1)
    first, second = (pair(named[f"{shape.name}.{name}{PAIR}"], behind) for name in PAIRS)
    pairs = first.repeated(shape.layers), second.repeated(shape.layers - 1)
    return [embed, qkv, attend, *pairs, down, lm_head, sampler]


def whole_step(
    shape: DecoderShape,
    variants: list[Variant],
    int8_head: bool,
    behind: Mapping[str, int],
    rows: int = 1,
) -> Operation:
    """Return all of `step` as one operation, named as in the bench; memory bounds all its parts."""
    kind = " int8 head" if int8_head else ""
    parts = step(shape, variants, int8_head, behind, rows)
    return _whole(f"{shape.name}.step rows={rows} length={STEP_TOKENS}{kind}", parts)


def whole_fused_step(
    shape: DecoderShape, variants: list[Variant], int8_head: bool, behind: Mapping[str, int]
) -> Operation:
    """Return all of `fused_step` as one operation, named as in the bench."""
    kind = " int8 head" if int8_head else ""
    parts = fused_step(shape, variants, int8_head, behind)
    return _whole(f"{shape.name}.step rows=1 length={STEP_TOKENS}{kind} fused", parts)


def _whole(name: str, parts: list[Operation]) -> Operation:
    return Operation(
        name,
        sum(part.bytes_moved for part in parts),
        sum(part.launches for part in parts),
        ordinary=sum(part.ordinary for part in parts),
        behind=sum(part.behind for part in parts),
        barriers=sum(part.barriers for part in parts),
    )


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured times, and the copy bandwidth of the same run, from `bench_gpu.py --write`."""

    us: dict[str, float] = field(default_factory=dict)
    copy_tb_s: float = COPY_TB_S
    title: str = "nothing measured"

    @classmethod
    def read(cls, path: Path) -> Measured:
        """Read a file of the bench; raise ValueError if its object `us` is missing."""
        found = json.loads(path.read_text("utf-8"))
        if not isinstance(found, dict) or not isinstance(found.get("us"), dict):
            raise ValueError(f"{path}: no object `us` of names and microseconds")
        hardware = found.get("hardware", {})
        title = ", ".join([found.get("date", "no date"), *map(str, hardware.values())])
        us = {name: float(value) for name, value in found["us"].items()}
        return cls(us, float(found.get("copy_tb_s", COPY_TB_S)), title)

    def share(self, operation: Operation) -> float | None:
        """Return the share of the copy bandwidth that an operation reached.

        None if the operation was not measured.
        """
        us = self.us.get(operation.name)
        return operation.floor_us(self.copy_tb_s) / us if us else None


def read_behind(path: Path) -> dict[str, int]:
    """Return the counts `behind_wait` and `behind_barrier` of a file with `make aot`'s output.

    Both are in the file's last line. Names of `behind_barrier` get the suffix BEHIND_BARRIER.
    Raises ValueError if the line has no `behind_wait`.
    """
    lines = path.read_text("utf-8").splitlines()
    found = json.loads(lines[-1]) if lines else None
    if not isinstance(found, dict) or not isinstance(found.get("behind_wait"), dict):
        raise ValueError(f"{path}: no object `behind_wait` in the last line")
    behind_barrier = found.get("behind_barrier", {})
    counts = found["behind_wait"] | {
        name + BEHIND_BARRIER: count for name, count in behind_barrier.items()
    }
    return {name: int(count) for name, count in counts.items()}


def sections(behind: Mapping[str, int]) -> Iterator[tuple[str, list[Operation]]]:
    """Return the tables by title: linears, attention, whole steps and prefill of each shape."""
    from tailrace.kernels.gate.aot_worker import kernel_modules, planned

    variants: dict[str, list[Variant]] = {}
    for entry in planned(kernel_modules("tailrace.kernels")):
        variants.setdefault(entry.shape.name, []).append(entry.variant)
    for shape in REAL_SHAPES:
        yield f"{shape.name}: linears", list(linears(shape, variants[shape.name]).values())
    yield "Attention", [attention(s, rows, LONG_TOKENS) for s in REAL_SHAPES for rows in (1, 32)]
    for shape in REAL_SHAPES:
        parts = step(shape, variants[shape.name], False, behind)
        counts = (1, EIGHT) if shape.family is Family.BITNET else (1,)
        wholes = [
            whole_step(shape, variants[shape.name], int8, behind, rows)
            for rows in counts
            for int8 in (False, True)
        ]
        yield f"{shape.name}: a step of one row at {STEP_TOKENS} tokens", [*parts, *wholes]
        if shape.family is Family.BITNET:
            fused = fused_step(shape, variants[shape.name], False, behind)
            fused += [
                whole_fused_step(shape, variants[shape.name], int8, behind)
                for int8 in (False, True)
            ]
            yield f"{shape.name}: the same step with pairs of linears in one launch", fused
    for shape in REAL_SHAPES:
        yield prefill.section(shape)


def eight_rows_of_one(operations: Iterable[Operation]) -> str:
    """Return text with the time of dependent steps of 8 rows, divided by that of one row."""
    us = {operation.name: operation.expected_us(dependent=True) for operation in operations}
    eight, one = f".step rows={EIGHT} ", ".step rows=1 "
    shares = [
        f"{us[name] / us[name.replace(eight, one)]:.3f} ({name})" for name in us if eight in name
    ]
    return f"{EIGHT} rows of one: {', '.join(shares)}; {EIGHT_ROWS_ASKED} asked"


def markdown(title: str, operations: list[Operation], measured: Measured) -> str:
    """Return a table of BENCH.md as Markdown."""
    lines = [
        f"### {title}",
        "",
        "| | launches | MB | floor, us | expected, us | dependent, us | measured, us | of copy |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for operation in operations:
        us, share = measured.us.get(operation.name), measured.share(operation)
        cells = [
            operation.name,
            str(operation.launches),
            f"{operation.bytes_moved / 1e6:.3f}",
            f"{operation.floor_us(measured.copy_tb_s):.2f}",
            f"{operation.expected_us():.1f}",
            f"{operation.expected_us(dependent=True):.1f}",
            f"{us:.2f}" if us else "",
            f"{share:.0%}" if share else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def described(operation: Operation, measured: Measured) -> dict[str, Any]:
    """Return an operation as JSON."""
    return {
        **asdict(operation),
        "floor_us": round(operation.floor_us(measured.copy_tb_s), 3),
        "expected_us": round(operation.expected_us(), 2),
        "dependent_us": round(operation.expected_us(dependent=True), 2),
        "measured_us": measured.us.get(operation.name),
        "share_of_copy": measured.share(operation),
    }


def main(arguments: list[str] | None = None) -> int:
    """Print the tables, or one JSON object with `--json`."""
    parser = argparse.ArgumentParser(prog="python -m tailrace.kernels.gate.roofline")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--measured", type=Path, metavar="FILE", help="file that `make bench-gpu` has written"
    )
    parser.add_argument(
        "--aot", type=Path, metavar="FILE", help="file with the output of `make aot ARGS=--json`"
    )
    chosen = parser.parse_args(arguments)
    try:
        measured = Measured.read(chosen.measured) if chosen.measured else Measured()
        behind = read_behind(chosen.aot) if chosen.aot else {}
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    tables = dict(sections(behind))
    everything = [operation for operations in tables.values() for operation in operations]
    if chosen.json:
        print(json.dumps([described(operation, measured) for operation in everything]))
    else:
        print(f"Copy bandwidth {measured.copy_tb_s} TB/s; {measured.title}.\n")
        for title, operations in tables.items():
            print(markdown(title, operations, measured))
        for shape in REAL_SHAPES:
            print(*prefill.totals(shape), sep="\n")
        if behind:
            print(eight_rows_of_one(everything))
    return 0


if __name__ == "__main__":
    sys.exit(main())
