"""Verdicts of the ahead-of-time gate on compiled kernels."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tailrace.kernels.dependent_triton import READ_AHEAD, WRITTEN_BEFORE
from tailrace.kernels.gate.targets import OTHERS, SM_90, TARGETS, Target

MAX_LAUNCHES = 5
"""Maximum number of launches per layer in a decode step of one row."""
TERNARY_LINEAR = " ternary gemv rows=1"
"""Suffix of the names of the variants to which MAX_BARRIERS and MAX_INSTRUCTIONS apply."""
MAX_BARRIERS, MAX_INSTRUCTIONS = 8, 500
"""Maximum number of barriers and of instructions of a ternary linear after its wait for earlier
launches. No earlier launch hides their time, so each of them makes the step longer."""
OWN_WRITTEN = " write"
"""Suffix of the names of attention variants that also write keys and values of the step's own
tokens to the cache. Before these variants wait for earlier launches, they may read the keys and
values of older tokens."""
EIGHT_ROWS = (
    *("norm hidden int8 rows=8", "qkv ternary gemm rows=8"),
    *("norm queries int8 rows=8", "o ternary gemm rows=8"),
    *("norm hidden int8 rows=8", "gate_up ternary gemm rows=8"),
    *("norm ffn int8 rows=8", "down ternary gemm rows=8"),
)
"""Names of the norms and linears that a layer launches in a step of 8 rows. In a step of one row a
layer launches four ternary linears instead."""
PAIR = " ternary pair rows=1"
"""Suffix of the names of variants that compute two linears, with a barrier of all programs."""
MAX_EIGHT_ROWS = 1.3
"""Maximum number of instructions that the launches EIGHT_ROWS run after their waits for earlier
launches, as a multiple of those of the linears for one row."""

PRODUCTS = {"HGMMA", "HMMA", "IGMMA", "IMMA", "IDP.4A"}
"""Instructions of sm_90 that multiply matrices, or four pairs of bytes."""
COMMON_SHARED_BYTES = 48 << 10
"""Bytes of shared memory that every GPU gives a program."""

Identity = tuple[str, str]
"""Module and name of a variant; its ordinary and its dependent launch have the same identity."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """One compilation: the variants that share it, and its machine code or error."""

    uses: list[dict[str, Any]]
    code: dict[str, Any] | None
    error: str = ""

    @property
    def target(self) -> Target:
        """The architecture that the variants were compiled for."""
        return TARGETS[self.uses[0]["arch"]]

    @property
    def name(self) -> str:
        """Name as `module.kernel (first variant)`, with the architecture unless it is sm_90."""
        where = "" if self.target is SM_90 else f" for {self.target.name}"
        return f"{self.uses[0]['kernel']} ({self.uses[0]['name']}){where}"

    def missing(self) -> list[str]:
        """Return the instructions that some variant expects and the machine code lacks."""
        expected = {mnemonic for use in self.uses for mnemonic in use["expects"]}
        opcodes = self.code["opcodes"] if self.code else ()
        return sorted(m for m in expected if not self._has(m, opcodes))

    def _has(self, mnemonic: str, opcodes: Iterable[str]) -> bool:
        wanted = self.target.instead_of(mnemonic)
        return any(one in opcode for one in wanted for opcode in opcodes)

    def products(self, target: Target) -> set[str]:
        """Return the instructions with which the kernel multiplies matrices on a target."""
        expected = {mnemonic for use in self.uses for mnemonic in use["expects"]}
        return {target.instead_of(mnemonic)[-1] for mnemonic in expected & PRODUCTS}

    def offences(self) -> Iterator[str]:
        """Yield the reasons why the gate refuses this compilation."""
        if self.code is None:
            yield f"does not compile:\n{self.error}"
            return
        if (spilled := self.code["spill_bytes"]) > self.target.spill_bytes:
            yield f"spills {spilled} bytes, at most {self.target.spill_bytes} are allowed"
        if atomics := self.code["float_atomics"]:
            yield f"adds floats atomically, {atomics} times"
        if missing := self.missing():
            yield f"lacks {', '.join(missing)}"
        ahead = READ_AHEAD
        names = [use["name"].removesuffix(" dependent") for use in self.uses]
        if all(name.endswith(OWN_WRITTEN) for name in names):
            ahead |= WRITTEN_BEFORE
        if foreign := sorted(set(self.code["read_ahead"]) - ahead):
            yield f"reads {', '.join(foreign)} before it waits for earlier launches"
        if early := self.code["before_wait"]:
            yield f"does not wait for earlier launches before {', '.join(early)}"
        if (shared := self.code["shared_bytes"]) > (most := self.target.limits.shared_bytes):
            yield f"needs {shared} bytes of shared memory, the GPU has {most}"


def identity(use: dict[str, Any]) -> Identity:
    """Return the module and the name of a variant, without the suffix of a dependent launch.

    So an ordinary launch and the dependent launch of the same kernel have the same identity, and so
    do their compilations for all architectures.
    """
    return use["module"], use["name"].removesuffix(" dependent")


def sampled(
    compiled: Iterable[Compiled], target: Target, available: Collection[Identity]
) -> set[Identity]:
    """Return the identities of the variants to compile for an architecture other than sm_90.

    available: identities of the variants that the target can run. The result has

    - each kernel that needs more than COMMON_SHARED_BYTES of shared memory on sm_90, in the variant
      that needs most, because a lack of shared memory keeps a kernel from running elsewhere
    - one of the other kernels of a folder that multiply with the same instructions, in the variant
      with fewest instructions; the architectures get these kernels in rotation, so that each kernel
      is compiled for some of them
    """
    kernels: dict[str, list[Compiled]] = {}
    for one in compiled:
        if one.code is not None and identity(one.uses[0]) in available:
            kernels.setdefault(one.uses[0]["kernel"], []).append(one)
    chosen: set[Identity] = set()
    families: dict[tuple[str, tuple[str, ...]], list[Compiled]] = {}
    for _, own in sorted(kernels.items()):
        largest = max(own, key=lambda one: (_code(one, "shared_bytes"), _code(one, "registers")))
        if _code(largest, "shared_bytes") > COMMON_SHARED_BYTES:
            chosen.add(identity(largest.uses[0]))
            continue
        products = tuple(sorted({p for one in own for p in one.products(target)}))
        least = min(
            (one for one in own if one.products(target) or not products),
            key=lambda one: _code(one, "instructions"),
        )
        folder = least.uses[0]["module"].rpartition(".")[0]
        families.setdefault((folder, products), []).append(least)
    turn = OTHERS.index(target)
    chosen |= {identity(own[turn % len(own)].uses[0]) for own in families.values()}
    return chosen


def _code(compiled: Compiled, field: str) -> int:
    return int((compiled.code or {})[field])


@dataclass(frozen=True, slots=True)
class Gate:
    """All compilations and the gate's verdict on them."""

    triton: str
    compiled: list[Compiled]
    """Every variant, for sm_90."""
    launched: list[str]
    """Names of the kernels that some module launches; `compiled` should have each of them."""
    elsewhere: list[Compiled] = field(default_factory=list)
    """A sample of the variants, for other architectures."""
    unknown: list[str] = field(default_factory=list)
    """Names of architectures that ptxas does not know; nothing was compiled for them."""

    def unplanned(self) -> list[str]:
        """Return the names of kernels that some module launches but that no variant compiles."""
        planned = {use["kernel"] for compiled in self.compiled for use in compiled.uses}
        return sorted(set(self.launched) - planned)

    def launches(self) -> dict[str, int]:
        """Return the number of launches per layer in a decode step of one row, by shape.

        Modules with kernels for the same part of the step, such as dense and weight-only linears,
        are alternatives, so the largest count is taken. The kernels that one module has for a part
        run one after another, so they are added.
        """
        kernels: dict[tuple[str, str], dict[str, set[str]]] = {}
        for use in (use for compiled in self.compiled for use in compiled.uses if use["step"]):
            modules = kernels.setdefault((use["shape"], use["step"]), {})
            modules.setdefault(use["module"], set()).add(use["kernel"])
        totals: dict[str, int] = {}
        for (shape, _), modules in kernels.items():
            totals[shape] = totals.get(shape, 0) + max(map(len, modules.values()))
        return totals

    def behind_wait(self, what: str) -> dict[str, int]:
        """Return the number of barriers or instructions after the wait for earlier launches.

        what: `barriers` or `instructions`. The keys are names of variants; only variants that a
        layer launches in steps of 1 or 8 rows are counted. An ordinary launch has no wait: its
        number is that of the dependent launch of the same kernel, or 0 if there is none.
        """
        return {
            use["name"]: compiled.code[f"{what}_behind_wait"]
            for compiled in self.compiled
            for use in compiled.uses
            if compiled.code
            and (
                use["step"]
                or use["name"].removesuffix(" dependent").endswith(PAIR)
                or use["name"].removeprefix(f"{use['shape']}.") in EIGHT_ROWS
            )
        }

    def behind_barrier(self) -> dict[str, int]:
        """Return the instructions after the barrier of all programs, by variant name."""
        return {
            use["name"]: compiled.code["instructions_behind_arrival"]
            for compiled in self.compiled
            for use in compiled.uses
            if compiled.code and use["name"].removesuffix(" dependent").endswith(PAIR)
        }

    def _ternary(self, what: str) -> dict[str, int]:
        found = self.behind_wait(what).items()
        return {name: count for name, count in found if name.endswith(TERNARY_LINEAR)}

    def eight_rows(self) -> float:
        """Return the instructions of a step of 8 rows, as a multiple of those of one row.

        Only a layer's linears and norms are counted, and of these the instructions after the wait
        for earlier launches. The result is the maximum over all shapes. A shape counts only if all
        of its launches were compiled; the result is 0 if no shape counts.
        """
        counts = self.behind_wait("instructions")
        found = [0.0]
        for shape in {use["shape"] for compiled in self.compiled for use in compiled.uses}:
            own = {n: c for n, c in counts.items() if n.startswith(f"{shape}.")}
            one = [count for name, count in own.items() if name.endswith(TERNARY_LINEAR)]
            eight = [own.get(f"{shape}.{name}", 0) for name in EIGHT_ROWS]
            if one and all(eight):
                found.append(sum(eight) / sum(one))
        return max(found)

    def offenders(self) -> list[str]:
        """Return one message for each reason to fail, with the name of the kernel."""
        every = [*self.compiled, *self.elsewhere]
        found = [f"{c.name} {offence}" for c in every for offence in c.offences()]
        found += [f"{name} is launched, but no variant compiles it" for name in self.unplanned()]
        found += [
            f"{shape} launches {count} kernels per layer, at most {MAX_LAUNCHES} are allowed"
            for shape, count in self.launches().items()
            if count > MAX_LAUNCHES
        ]
        for what, most in (("barriers", MAX_BARRIERS), ("instructions", MAX_INSTRUCTIONS)):
            found += [
                f"{name} has {count} {what} after its wait for earlier launches,"
                f" at most {most} are allowed"
                for name, count in self._ternary(what).items()
                if count > most
            ]
        if (eight := self.eight_rows()) > MAX_EIGHT_ROWS:
            found.append(
                f"8 rows take {eight:.2f} times the instructions of one row after the waits, "
                f"at most {MAX_EIGHT_ROWS} times are allowed"
            )
        return found

    def by_target(self) -> dict[str, dict[str, int]]:
        """Return counts and maxima of the compilations for each architecture other than sm_90."""
        names = dict.fromkeys(one.target.name for one in self.elsewhere)
        return {name: self._counted(name) for name in names}

    def _counted(self, target: str) -> dict[str, int]:
        own = [one for one in self.elsewhere if one.target.name == target]
        codes = [one.code for one in own if one.code]
        return {
            "compilations": len(own),
            "compile_errors": sum(one.code is None for one in own),
            "spill_bytes": sum(code["spill_bytes"] for code in codes),
            "missing_instructions": sum(len(one.missing()) for one in own if one.code),
            "registers_max": max((code["registers"] for code in codes), default=0),
            "shared_bytes_max": max((code["shared_bytes"] for code in codes), default=0),
            "shared_bytes_allowed": own[0].target.limits.shared_bytes,
        }

    def summary(self) -> dict[str, Any]:
        """Return the JSON object that the gate prints as its last line."""
        codes = [compiled.code for compiled in self.compiled if compiled.code]
        launches = self.launches()
        return {
            "kernels": len({use["kernel"] for c in self.compiled for use in c.uses}),
            "variants": sum(len(compiled.uses) for compiled in self.compiled),
            "compilations": len(self.compiled),
            "compile_errors": sum(compiled.code is None for compiled in self.compiled),
            "spill_bytes": sum(code["spill_bytes"] for code in codes),
            "float_atomics": sum(code["float_atomics"] for code in codes),
            "dependent": sum("ACQBULK" in use["expects"] for c in self.compiled for use in c.uses),
            "before_wait": sum(len(code["before_wait"]) for code in codes),
            "missing_instructions": sum(len(c.missing()) for c in self.compiled if c.code),
            "unplanned": self.unplanned(),
            "launches_per_layer": max(launches.values(), default=0),
            "launches": launches,
            "barriers_behind_wait": max(self._ternary("barriers").values(), default=0),
            "instructions_behind_wait": max(self._ternary("instructions").values(), default=0),
            "behind_wait": self.behind_wait("instructions"),
            "behind_barrier": self.behind_barrier(),
            "eight_rows": round(self.eight_rows(), 2),
            "registers_max": max((code["registers"] for code in codes), default=0),
            "shared_bytes_max": max((code["shared_bytes"] for code in codes), default=0),
            "targets": self.by_target(),
            "unknown_targets": self.unknown,
            "triton": self.triton,
        }
