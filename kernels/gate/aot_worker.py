"""Compiler process of the ahead-of-time gate; `kernels.gate.aot` runs several of them.

It first writes one JSON object with the list of all variants, for every architecture that ptxas
knows. Then, for each line of input, which is the index of a variant, it compiles that variant and
writes the binary as a line of JSON. It ends when its input ends. An error ends the process; the
caller finds the reason on its standard error.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from importlib import import_module
from pkgutil import walk_packages
from types import ModuleType
from typing import Any

import triton
from triton.runtime.jit import KernelInterface

from tailrace.kernels.gate.machine_code import compiled
from tailrace.kernels.gate.targets import SM_90, TARGETS, Target, is_known
from tailrace.kernels.shapes import REAL_SHAPES, DecoderShape
from tailrace.kernels.variant import Variant

SUFFIX = "_triton"


@dataclass(frozen=True, slots=True)
class Planned:
    """A variant with the module that defines it, the decoder shape and the target architecture."""

    module: str
    shape: DecoderShape
    variant: Variant
    target: Target = SM_90

    def described(self) -> dict[str, Any]:
        """Return the variant as JSON, without the kernel itself."""
        variant = self.variant
        twin = variant.dependent
        return {
            "arch": self.target.arch,
            "twin": twin.key if twin else variant.key,
            "module": self.module,
            "shape": self.shape.name,
            "name": variant.name,
            "kernel": variant.kernel_name,
            "key": variant.key,
            "step": variant.step,
            "expects": list(variant.instructions),
            "bytes_moved": variant.bytes_moved,
        }


def kernel_modules(package: str) -> list[ModuleType]:
    """Return every `*_triton` module of a package and its subpackages, sorted by name."""
    found = import_module(package)
    inside = walk_packages(found.__path__, f"{package}.")
    return [import_module(name) for name in sorted(m.name for m in inside) if name.endswith(SUFFIX)]


def planned(modules: list[ModuleType], target: Target = SM_90) -> Iterator[Planned]:
    """Yield the variants of all modules that a target runs.

    A module's variants are for its SHAPES, or for REAL_SHAPES if it has none. A module without
    `variants` has only device functions and is skipped. If plans depend on a GPU's limits, they get
    those of the target.
    """
    for module in modules:
        if not hasattr(module, "variants"):
            continue
        limited = "limits" in inspect.signature(module.variants).parameters
        given = {"limits": target.limits} if limited else {}
        for shape in getattr(module, "SHAPES", REAL_SHAPES):
            for variant in module.variants(shape, **given):
                if target.runs(variant):
                    yield Planned(module.__name__, shape, variant, target)


def launched_kernels(module: ModuleType) -> set[str]:
    """Return the names of the kernels that a module launches: `kernel[grid](…)` in its source."""
    calls = [n for n in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(n, ast.Call)]
    places = [c.func.value for c in calls if isinstance(c.func, ast.Subscript)]
    kernels = [getattr(module, place.id, None) for place in places if isinstance(place, ast.Name)]
    functions = [kernel.fn for kernel in kernels if isinstance(kernel, KernelInterface)]
    return {f"{function.__module__}.{function.__name__}" for function in functions}


def main(package: str) -> None:
    """Run the compiler process; what compilers print goes to standard error."""
    answers = sys.stdout
    # No code depends on line numbers, and without them compilation is a sixth faster.
    triton.knobs.compilation.disable_line_info = True
    with redirect_stdout(sys.stderr):
        modules = kernel_modules(package)
        known = {arch: is_known(arch) for arch in TARGETS}
        targets = [target for arch, target in TARGETS.items() if known[arch]]
        plan = [entry for target in targets for entry in planned(modules, target)]
        launched = set[str]().union(*map(launched_kernels, modules))
        contents = {
            "triton": triton.__version__,
            "variants": [entry.described() for entry in plan],
            "launched": sorted(launched),
            "unknown": [TARGETS[arch].name for arch in TARGETS if not known[arch]],
        }
        print(json.dumps(contents), file=answers, flush=True)
        for line in sys.stdin:
            entry = plan[int(line)]
            binary = compiled(entry.variant, entry.target)
            print(json.dumps(asdict(binary)), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
