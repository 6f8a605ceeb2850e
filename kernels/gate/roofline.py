"""What an H200 allows each kernel, what is expected of it, and what a bench measured.

    python -m tailrace.kernels.gate.roofline                   # print the tables of BENCH.md
    python -m tailrace.kernels.gate.roofline --measured FILE   # add the figures of `make bench-gpu`
    python -m tailrace.kernels.gate.roofline --aot FILE        # count instructions behind the wait

A floor is the bytes that an operation must move, divided by the copy bandwidth. What is expected
adds what the constants below assume of a launch. Bytes come from the kernels' own plans.
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
from tailrace.kernels.gate.aot_gate import EIGHT_ROWS
from tailrace.kernels.launch import MULTIPROCESSORS
from tailrace.kernels.shapes import REAL_SHAPES, DecoderShape, Family
from tailrace.kernels.variant import Variant

COPY_TB_S = 4.3
"""TB/s, read and written, by a device-to-device copy on an H200 (measured)."""
STREAM_SHARE = 0.9
"""Of the copy bandwidth, by a kernel whose loads are all under way (assumed)."""
LAUNCH_US = 1.3
"""us from the end of a kernel to the start of the next inside a CUDA graph.

Source: Hazy Research, Look Ma, No Bubbles, 2025; measured on an H100.
"""
RAMP_US = 0.8
"""us until the first loads of a kernel come back: a loaded memory latency (assumed)."""
DEPENDENT_US = 0.5
"""us that remain of both, if a kernel loads weights before the one ahead ends (assumed)."""
SMS, CLOCK_HZ = MULTIPROCESSORS, 1.98e9
SCHEDULERS = 4
"""Of an SM, among which its warps are shared out; each issues one instruction a clock."""
INSTRUCTION_CLOCKS = 2.0
"""Per instruction behind the wait for the launch ahead, where one or two warps share a scheduler
and most need the one before (assumed); of more warps each waits for its turn. Nothing that is
read ahead hides them."""
DP4A_PER_CLOCK = 64
"""Per SM and clock, of eight operations each; assumed: the rate of 32-bit multiply-add."""
PEAKS = {
    "int8 tensor cores": 1979e12,
    "bf16 tensor cores": 989e12,
    "dp4a": SMS * CLOCK_HZ * DP4A_PER_CLOCK * 8,
}
"""Operations per second. Tensor cores: NVIDIA's data sheet of the H200 SXM, without sparsity."""
INSTRUCTIONS = {
    "IDP.4A": "dp4a",
    "IGMMA": "int8 tensor cores",
    "HGMMA": "bf16 tensor cores",
}
"""The peak that bounds a kernel, by the instruction that its plan expects."""
MAX_ROWS = 64
"""Rows of a decode step; larger batches are prefill, which memory does not bound."""
EIGHT = 8
"""Rows of a step that is compared with that of one row."""
EIGHT_ROWS_ASKED = 1.25
"""Of the time of one row."""
STEP_TOKENS = 512
"""Length of the sequence of a whole step, as in the bench."""
LONG_TOKENS = 32_768
"""Length of the sequences that attention alone is judged at."""
KV_BYTES = 2
"""Of a cached element: bf16."""

# Of a linear: its step, its format, its rows. What a plan calls the kernel is no part of it.
_LINEAR = re.compile(r"(qkv|o|gate_up|down|head) (\w+) rows=(\d+)")
_KERNEL = re.compile(r" (?:dense|gemv|gemm)\b")


@dataclass(frozen=True, slots=True)
class Operation:
    """What a bench measures at once: one kernel, or a few that belong together."""

    name: str
    """As in the bench, such as `bitnet-2b4t.qkv ternary rows=1`."""
    bytes_moved: int
    launches: int = 1
    arithmetic: int = 0
    """Multiplications and additions; 0 where they do not matter."""
    peak: float = PEAKS["bf16 tensor cores"]
    """Operations per second of the instructions it is made of."""
    ordinary: int = 0
    """Of the launches, those at the head of a chain, which are never dependent ones."""
    behind: float = 0.0
    """Clocks behind the waits of all launches, by what `make aot` counts; 0: not counted."""

    def floor_us(self, copy_tb_s: float = COPY_TB_S) -> float:
        """us at the copy bandwidth."""
        return self.bytes_moved / copy_tb_s / 1e6

    def expected_us(self, dependent: bool = False) -> float:
        """us by the assumptions above, with or without programmatic dependent launches."""
        busy = max(self.floor_us() / STREAM_SHARE, self.arithmetic / self.peak * 1e6)
        busy += self.behind / CLOCK_HZ * 1e6
        chained = self.launches - self.ordinary if dependent else 0
        return busy + chained * DEPENDENT_US + (self.launches - chained) * (LAUNCH_US + RAMP_US)

    def repeated(self, times: int) -> Operation:
        """Return the operation, so many times; the bench has no such figure."""
        return replace(
            self,
            name=f"{self.name}, {times} times",
            bytes_moved=times * self.bytes_moved,
            launches=times * self.launches,
            ordinary=times * self.ordinary,
            arithmetic=times * self.arithmetic,
            behind=times * self.behind,
        )


def clocks(variant: Variant, instructions: int) -> float:
    """What a warp of the fullest SM takes for so many, all programs being resident at once."""
    warps = math.ceil(variant.programs / SMS) * variant.num_warps
    return instructions * max(INSTRUCTION_CLOCKS, warps / SCHEDULERS)


def linears(shape: DecoderShape, variants: list[Variant]) -> dict[str, Operation]:
    """Return every linear and head that is planned, by its name without the shape's."""
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
    """Without the shape's, and without what the plan calls the kernel of a linear."""
    return _KERNEL.sub("", variant.name.removeprefix(f"{shape.name}."))


def peak_of(variant: Variant) -> float:
    """Operations per second of the instruction that a plan expects."""
    names = [name for mnemonic, name in INSTRUCTIONS.items() if mnemonic in variant.expects]
    return PEAKS[names[0] if names else "bf16 tensor cores"]


def attention(shape: DecoderShape, rows: int, length: int) -> Operation:
    """Decode attention of `rows` sequences over a bf16 cache."""
    cached = rows * length * 2 * shape.keys * KV_BYTES
    vectors = rows * 4 * (2 * shape.queries + 2 * shape.keys)
    return Operation(
        f"{shape.name}.attend bfloat16 rows={rows} length={length}",
        cached + vectors,
        arithmetic=4 * rows * length * shape.queries,
    )


def sampling(shape: DecoderShape, variants: list[Variant], rows: int = 1) -> Operation:
    """Return the sampler: the kernels that its plan lists for a row without a mask, at so many rows."""
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
    """What a layer launches for one row, or for 8 of BitNet; `behind` as in `step`."""
    parts = {variant.step: variant for variant in variants if variant.step}
    launched = [parts[what] for what in ("qkv", "attend", "o", "gate_up", "down")]
    if rows > 1:
        named = {variant.name: variant for variant in variants}
        launched = [named[f"{shape.name}.{name}"] for name in EIGHT_ROWS]
        launched.insert(2, parts["attend"])  # behind the norm and qkv
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
    """Return the LM head, with a norm of its own where there is more than one row.

    Its bytes lie between those of 1 and 16 rows, as the rows do.
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
    """Return the operations of a decode step, in order; those of a layer counted for all.

    behind: instructions behind the wait, by the name of the variant that a layer launches.
    rows: 1, or EIGHT of BitNet.
    """
    embed = [v for v in variants if v.name == f"{shape.name}.embed rows=1"]
    embedded = rows * sum(v.bytes_moved for v in embed)
    return [
        Operation(f"{shape.name}.embed rows={rows}", embedded, ordinary=1),
        *(part.repeated(shape.layers) for part in layer(shape, variants, behind, rows)),
        head(shape, variants, int8_head, rows),
        sampling(shape, variants, rows),
    ]


def whole_step(
    shape: DecoderShape,
    variants: list[Variant],
    int8_head: bool,
    behind: Mapping[str, int],
    rows: int = 1,
) -> Operation:
    """Return all of `step`, one after another, under the bench's name; memory bounds each part."""
    kind = " int8 head" if int8_head else ""
    parts = step(shape, variants, int8_head, behind, rows)
    return Operation(
        f"{shape.name}.step rows={rows} length={STEP_TOKENS}{kind}",
        sum(part.bytes_moved for part in parts),
        sum(part.launches for part in parts),
        ordinary=sum(part.ordinary for part in parts),
        behind=sum(part.behind for part in parts),
    )


@dataclass(frozen=True, slots=True)
class Measured:
    """What `bench_gpu.py --write` wrote, as far as it is used here."""

    us: dict[str, float] = field(default_factory=dict)
    copy_tb_s: float = COPY_TB_S
    title: str = "nothing measured"

    @classmethod
    def read(cls, path: Path) -> Measured:
        """Raise ValueError for a file without `us`, names and microseconds."""
        found = json.loads(path.read_text("utf-8"))
        if not isinstance(found, dict) or not isinstance(found.get("us"), dict):
            raise ValueError(f"{path}: no object `us` of names and microseconds")
        hardware = found.get("hardware", {})
        title = ", ".join([found.get("date", "no date"), *map(str, hardware.values())])
        us = {name: float(value) for name, value in found["us"].items()}
        return cls(us, float(found.get("copy_tb_s", COPY_TB_S)), title)

    def share(self, operation: Operation) -> float | None:
        """Of the same run's copy bandwidth; None where the operation was not measured."""
        us = self.us.get(operation.name)
        return operation.floor_us(self.copy_tb_s) / us if us else None


def read_behind(path: Path) -> dict[str, int]:
    """`behind_wait` of the last line that `make aot` printed; raises ValueError without it."""
    lines = path.read_text("utf-8").splitlines()
    found = json.loads(lines[-1]) if lines else None
    if not isinstance(found, dict) or not isinstance(found.get("behind_wait"), dict):
        raise ValueError(f"{path}: no object `behind_wait` in the last line")
    return {name: int(count) for name, count in found["behind_wait"].items()}


def sections(behind: Mapping[str, int]) -> Iterator[tuple[str, list[Operation]]]:
    """Tables by title: each shape's linears, then attention, then whole steps; see `step`."""
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


def eight_rows_of_one(operations: Iterable[Operation]) -> str:
    """What dependent steps of 8 rows take, as multiples of those of one row among operations."""
    us = {operation.name: operation.expected_us(dependent=True) for operation in operations}
    eight, one = f".step rows={EIGHT} ", ".step rows=1 "
    shares = [
        f"{us[name] / us[name.replace(eight, one)]:.3f} ({name})" for name in us if eight in name
    ]
    return f"{EIGHT} rows of one: {', '.join(shares)}; {EIGHT_ROWS_ASKED} asked"


def markdown(title: str, operations: list[Operation], measured: Measured) -> str:
    """Return a table of BENCH.md."""
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
    """Print the tables or the JSON."""
    parser = argparse.ArgumentParser(prog="python -m tailrace.kernels.gate.roofline")
    parser.add_argument("--json", action="store_true", help="one object instead of tables")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="of `make bench-gpu`")
    parser.add_argument("--aot", type=Path, metavar="FILE", help="the last line of `make aot`")
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
        if behind:
            print(eight_rows_of_one(everything))
    return 0


if __name__ == "__main__":
    sys.exit(main())
