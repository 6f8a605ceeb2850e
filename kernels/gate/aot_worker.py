"""Compiler process of the ahead-of-time gate; `kernels.gate.aot` runs several of them.

It first writes the list of all variants as one JSON object. Then it reads the index of a variant,
writes its binary, and so on until its input ends. An error ends the process; the caller finds the
reason on its standard error.
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
from tailrace.kernels.shapes import REAL_SHAPES, DecoderShape
from tailrace.kernels.variant import Variant

SUFFIX = "_triton"


@dataclass(frozen=True, slots=True)
class Planned:
    """A variant, the module that plans it and the shape that it serves."""

    module: str
    shape: DecoderShape
    variant: Variant

    def described(self) -> dict[str, Any]:
        """Return the variant as JSON, without the kernel itself."""
        variant = self.variant
        twin = variant.dependent
        return {
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


def planned(modules: list[ModuleType]) -> Iterator[Planned]:
    """Yield all variants of a module's SHAPES, by default the real ones.

    A module without `variants` has device functions only.
    """
    for module in modules:
        shapes = getattr(module, "SHAPES", REAL_SHAPES)
        for shape in shapes if hasattr(module, "variants") else ():
            for variant in module.variants(shape):
                yield Planned(module.__name__, shape, variant)


def launched_kernels(module: ModuleType) -> set[str]:
    """Return the names of the kernels that a module launches: `kernel[grid](…)` in its source."""
    calls = [n for n in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(n, ast.Call)]
    places = [c.func.value for c in calls if isinstance(c.func, ast.Subscript)]
    kernels = [getattr(module, place.id, None) for place in places if isinstance(place, ast.Name)]
    functions = [kernel.fn for kernel in kernels if isinstance(kernel, KernelInterface)]
    return {f"{function.__module__}.{function.__name__}" for function in functions}


def main(package: str) -> None:
    """Serve the lines of standard input; output of compilers goes to standard error."""
    answers = sys.stdout
    with redirect_stdout(sys.stderr):
        modules = kernel_modules(package)
        plan = list(planned(modules))
        launched = set[str]().union(*map(launched_kernels, modules))
        contents = {
            "triton": triton.__version__,
            "variants": [entry.described() for entry in plan],
            "launched": sorted(launched),
        }
        print(json.dumps(contents), file=answers, flush=True)
        for line in sys.stdin:
            binary = compiled(plan[int(line)].variant)
            print(json.dumps(asdict(binary)), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
