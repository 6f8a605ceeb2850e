"""Compiles kernels and reads their machine code, without a GPU.

Register counts and spills come from the output of `ptxas -v`, and instructions from `nvdisasm`,
which ships with Triton. nvdisasm takes a third of a second to start and a thirtieth per kernel, so
many kernels are read at a time. A stack frame is no proof of a spill: the slow path of a cosine,
for example, keeps an array on the stack.
"""

from __future__ import annotations

import io
import json
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.compiler import ASTSource
from triton.runtime.cache import get_cache_manager

from tailrace.kernels.gate.targets import SM_90, Target
from tailrace.kernels.launch import INTERPRETED, OPTIONS
from tailrace.kernels.variant import Variant

TOOL_SECONDS = 120
"""Timeout in seconds for nvdisasm."""
INSTRUCTION_BYTES = 16

_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.M)
# Matches floating-point reductions and atomics to global or shared memory, also those of the Tensor
# Memory Accelerator (TMA).
_ATOMIC = re.compile(r"(?:ATOM[GS]?|REDG?|UTMAREDG|UBLKRED)\..*(?:\bB?F(?:16|32|64)|BF16)")
# Matches EXIT, and stores and atomics that other programs can see: not those to shared or local
# memory (STS, STL, ATOMS).
_ENDS_OR_WRITES = re.compile(r"(?:EXIT|STG?|ATOMG?|REDG?|UTMASTG|UTMAREDG|UBLKRED|UBLKCP)\b")
# Both match Triton's intermediate code (TTIR). _MADE matches a value, and the first operand of the
# operation that makes this value. _READ matches the pointer of a load.
_MADE = re.compile(r"%(\w+) = [\w.]+ %(\w+)")
_READ = re.compile(r"\btt\.load %(\w+)")
# Matches atomic additions of floats in TTIR. Machine code may hide them: for a GPU without this
# atomic the compiler emits a compare-and-swap loop, which has no atomic ADD.
_FLOAT_ADDITION = re.compile(r"\btt\.atomic_rmw fadd\b|\btt\.descriptor_reduce add\b.*\bb?f\d+")


@dataclass(frozen=True, slots=True)
class Binary:
    """A compiled kernel, not yet disassembled; can be stored as JSON. Sizes are in bytes."""

    arch: int
    """Number of the architecture: 90 for sm_90."""
    code: str
    """The instructions as hexadecimal digits."""
    dependent: bool
    """True for a dependent launch."""
    registers: int
    shared_bytes: int
    spill_bytes: int
    float_additions: int
    read_ahead: list[str]


@dataclass(frozen=True, slots=True)
class MachineCode:
    """Properties of a kernel's machine code; sizes are in bytes."""

    registers: int
    """Registers per thread."""
    shared_bytes: int
    """Shared memory per program."""
    spill_bytes: int
    """Bytes of spill stores and loads, as ptxas counts them: once per instruction in the code."""
    float_atomics: int
    """Number of atomic additions of floats. Their order is not defined, so results would vary."""
    before_wait: tuple[str, ...]
    """In a dependent launch: instructions before the wait that must not be there, sorted.

    They write memory or end a program. "Before" refers to the listing, which is in the order of
    execution as long as nothing branches backwards.
    """
    read_ahead: tuple[str, ...]
    """In a dependent launch: arguments through which memory is read before the wait, sorted."""
    barriers_behind_wait: int
    """In a dependent launch: barriers after the wait, whose time no earlier launch hides."""
    instructions_behind_wait: int
    """In a dependent launch: instructions after the wait, without subroutines (see `behind_wait`).
    """
    instructions_behind_arrival: int
    """In a dependent launch: instructions after the wait that also follow the first atomic to
    global memory. In kernels with a barrier of all programs, that atomic is a program's arrival at
    the barrier.
    """
    instructions: int
    """Number of instructions, padding included."""
    opcodes: tuple[str, ...]
    """Distinct instructions, sorted."""


def compiled(variant: Variant, target: Target = SM_90) -> Binary:
    """Compile a variant for an architecture, from Triton's cache if possible.

    What this function reads from the tools' output is stored in that cache, too. Raises
    RuntimeError in a process that interprets kernels, and whatever the compiler raises.
    """
    if INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET is set, and interpreted kernels cannot be compiled")
    log = io.StringIO()
    with knobs.nvidia.scope(), redirect_stdout(log):
        knobs.nvidia.dump_ptxas_log = True
        kernel = compile_variant(variant, target)
    cache = get_cache_manager(kernel.hash)
    name = f"binary-{sha256(Path(__file__).read_bytes()).hexdigest()[:16]}.json"
    kept = cache.get_file(name)
    if kept is None:
        text = log.getvalue() or _ptxas_log(variant, target)
        binary = _binary(variant, target, kernel, text)
        kept = cache.put(json.dumps(asdict(binary)), name, binary=False)
    return Binary(**json.loads(Path(kept).read_text("utf-8")))


def read_machine_code(binaries: Sequence[Binary]) -> Iterator[MachineCode]:
    """Yield the machine code of several kernels, disassembled at once, for one architecture."""
    [arch] = {binary.arch for binary in binaries}
    codes = [bytes.fromhex(binary.code) for binary in binaries]
    opcodes = _disassembled(b"".join(codes), arch)
    ends = accumulate(len(code) // INSTRUCTION_BYTES for code in codes)
    for binary, (first, end) in zip(binaries, pairwise([0, *ends]), strict=True):
        yield _read(binary, opcodes[first:end])


def compile_variant(variant: Variant, target: Target = SM_90) -> Any:
    """Return Triton's compiled kernel; raises whatever the compiler raises."""
    names = variant.kernel.arg_names
    given = {**variant.signature, **dict.fromkeys(variant.constants, "constexpr")}
    if wrong := set(names) ^ set(given):
        raise ValueError(f"{variant.name}: arguments missing or unknown: {sorted(wrong)}")
    source = ASTSource(
        variant.kernel,
        {name: given[name] for name in names},
        variant.constants,
        {(names.index(name),): [["tt.divisibility", 16]] for name in variant.divisible},
    )
    return triton.compile(source, target=target.triton, options=compile_options(variant))


def compile_options(variant: Variant) -> dict[str, Any]:
    """Return the options that a launch of the variant passes in addition to its arguments."""
    return {
        **OPTIONS,
        "num_warps": variant.num_warps,
        "num_stages": variant.num_stages,
        "launch_pdl": variant.launch_pdl,
        **variant.options,
    }


def _binary(variant: Variant, target: Target, kernel: Any, log: str) -> Binary:
    return Binary(
        arch=target.arch,
        code=code_of(kernel.asm["cubin"]).hex(),
        dependent=variant.launch_pdl,
        registers=registers(log),
        shared_bytes=kernel.metadata.shared,
        spill_bytes=spills(log),
        float_additions=float_additions(kernel.asm["ttir"]),
        read_ahead=read_ahead(kernel.asm["ttir"]) if variant.launch_pdl else [],
    )


def _read(binary: Binary, opcodes: list[str]) -> MachineCode:
    behind = behind_wait(opcodes) if binary.dependent else []
    return MachineCode(
        registers=binary.registers,
        shared_bytes=binary.shared_bytes,
        spill_bytes=binary.spill_bytes,
        float_atomics=max(float_atomics(opcodes), binary.float_additions),
        before_wait=before_wait(opcodes) if binary.dependent else (),
        read_ahead=tuple(binary.read_ahead),
        barriers_behind_wait=sum(opcode.startswith("BAR") for opcode in behind),
        instructions_behind_wait=len(behind),
        instructions_behind_arrival=len(behind_arrival(behind)),
        instructions=len(opcodes),
        opcodes=tuple(sorted(set(opcodes))),
    )


def _disassembled(code: bytes, arch: int) -> list[str]:
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(code)
        file.flush()
        # -ndf: do not follow branches, which could lead from one kernel into the next.
        command = (knobs.nvidia.nvdisasm.path, "-ndf", "-b", f"SM{arch}", file.name)
        opcodes = instructions(_run(*command))
    if len(opcodes) * INSTRUCTION_BYTES != len(code):
        raise ValueError(
            f"nvdisasm lists {len(opcodes)} instructions for {len(code)} bytes of code"
        )
    return opcodes


def _run(*command: str) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=TOOL_SECONDS
    ).stdout


def _ptxas_log(variant: Variant, target: Target) -> str:
    """Assemble a cached kernel once more and return what ptxas prints about it."""
    log = io.StringIO()
    with knobs.nvidia.scope(), knobs.compilation.scope(), redirect_stdout(log):
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True
        compile_variant(variant, target)
    return log.getvalue()


def code_of(elf: bytes) -> bytes:
    """Return the instructions of all functions of a 64-bit ELF file, in file order."""
    at, size, count, names = struct.unpack_from("<40xQ10xHHH", elf)
    # For each section of the file: offset of its name, offset of its contents, and its size.
    heads = [struct.unpack_from("<I20xQQ", elf, at + i * size) for i in range(count)]
    named = heads[names][1]
    return b"".join(
        elf[place : place + length]
        for name, place, length in heads
        if elf.startswith(b".text.", named + name)
    )


def registers(log: str) -> int:
    """Return the maximum registers per thread of all functions, from ptxas."""
    found = _REGISTERS.findall(log)
    if not found:
        raise ValueError(f"the output of ptxas has no line about registers: {log!r}")
    return max(map(int, found))


def spills(log: str) -> int:
    """Return the bytes of spill stores and loads of all functions, from ptxas."""
    found = _SPILLS.findall(log)
    if not found:
        raise ValueError(f"the output of ptxas has no line about spills: {log!r}")
    return sum(int(stores) + int(loads) for stores, loads in found)


def instructions(sass: str) -> list[str]:
    """Return the names of the instructions, without operands, as nvdisasm lists them."""
    found = _INSTRUCTION.findall(sass)
    if not found:
        raise ValueError(f"nvdisasm lists no instructions: {sass[:200]!r}")
    return found


def before_wait(opcodes: list[str]) -> tuple[str, ...]:
    """Return the forbidden instructions before the wait for earlier launches, sorted.

    Without a wait these are the forbidden instructions of the whole kernel.
    """
    waits = [place for place, opcode in enumerate(opcodes) if opcode.startswith("ACQBULK")]
    ahead = opcodes[: waits[0]] if waits else opcodes
    return tuple(sorted({opcode for opcode in ahead if _ENDS_OR_WRITES.match(opcode)}))


def behind_wait(opcodes: list[str]) -> list[str]:
    """Return the instructions from the wait to the last EXIT; none if there is no wait.

    After the last EXIT there are subroutines, such as the slow path of a division, that are rarely
    called. Instructions in a loop count once.
    """
    waits = [place for place, opcode in enumerate(opcodes) if opcode.startswith("ACQBULK")]
    ends = [place for place, opcode in enumerate(opcodes) if opcode == "EXIT"]
    return opcodes[waits[0] + 1 : ends[-1] + 1] if waits and ends else []


def behind_arrival(opcodes: list[str]) -> list[str]:
    """Return the instructions after the first atomic to global memory; none if there is none."""
    atomics = [place for place, opcode in enumerate(opcodes) if opcode.startswith("ATOMG")]
    return opcodes[atomics[0] + 1 :] if atomics else []


def read_ahead(ttir: str) -> list[str]:
    """Return the arguments through which memory is read before the wait, from Triton's TTIR.

    Each pointer is traced back to an argument: it is replaced by the first operand of the operation
    that makes it, again and again. The compiler moves no load across the wait, since it does not
    know the effects of that instruction.
    """
    before, wait, _ = ttir.partition("griddepcontrol.wait")
    made = dict(_MADE.findall(before))
    pointers = set(_READ.findall(before)) if wait else set()
    while on_the_way := pointers & made.keys():
        pointers = (pointers - on_the_way) | {made[pointer] for pointer in on_the_way}
    return sorted(pointers)


def float_atomics(opcodes: list[str]) -> int:
    """Return the number of atomic additions of floats among machine instructions."""
    return sum(".ADD" in opcode for opcode in opcodes if _ATOMIC.match(opcode))


def float_additions(ttir: str) -> int:
    """Return the number of atomic additions of floats in TTIR, also if the GPU lacks them."""
    return len(_FLOAT_ADDITION.findall(ttir))
