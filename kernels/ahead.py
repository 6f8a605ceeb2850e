"""Compilations that a program will ask Triton for, known and made before it asks.

`planned` carries out launches up to the point where Triton would compile, and notes what: types,
alignments and constants are those of the launch itself, so that its key is the launch's.
`compile_ahead` makes what Triton's cache lacks, by several processes; `Compilation.load` puts it
where a launch finds it. Nothing of this needs a GPU, but the name of one (a `target`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from types import ModuleType
from typing import Any

from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime import driver
from triton.runtime.cache import get_cache_key, get_cache_manager
from triton.runtime.jit import JITCallable

from tailrace.kernels.processes import ProcessError, Processes

MAX_JOBS = 16
"""Processes that compile at a time, of some 300 MB each."""
_FILE_CHARS = 150
"""Of a kernel's name, in those of its files."""


@dataclass(frozen=True, slots=True)
class Compilation:
    """A kernel at one set of types and constants."""

    kernel: str
    """`module:function`."""
    data: str
    """JSON that Triton makes it from again."""
    key: str
    """Of the launches that it is for, as Triton compares them."""
    folder: str
    """Its name in Triton's cache."""

    @property
    def is_cached(self) -> bool:
        """Whether Triton would find it."""
        name = f"{self.kernel.partition(':')[2][:_FILE_CHARS]}.json"
        return name in (get_cache_manager(self.folder).get_group(name) or {})

    def load(self) -> None:
        """Into the table that a launch looks in, compiled if need be."""
        module, _, name = self.kernel.partition(":")
        _settled(getattr(import_module(module), name)).preload(self.data)


class _NoDevice:
    """What Triton asks of a device before it launches; its table of kernels stays empty."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> str:
        return "none"

    def get_current_stream(self, _device: str) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


@contextmanager
def no_device(target: GPUTarget) -> Iterator[None]:
    """Triton compiles for `target`, whatever is there."""
    try:
        before = driver.active
    except RuntimeError:  # no GPU is there
        before = None
    driver.set_active(_NoDevice(target))
    try:
        yield
    finally:
        if before is not None:
            driver.set_active(before)


def planned(launch: Callable[[], None], target: GPUTarget) -> list[Compilation]:
    """What the kernels that `launch` launches are compiled as; none of them runs."""
    found: dict[tuple[str, str], Compilation] = {}

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        kernel, data = f"{fn.module}:{fn.name}", compile["specialization_data"]
        if (kernel, data) not in found:
            folder = _folder(_settled(fn.jit_function), compile, json.loads(data), target)
            found[kernel, data] = Compilation(kernel, data, compile["key"], folder)
        return True  # which has Triton compile and launch nothing

    with no_device(target), knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = note
        launch()
    return list(found.values())


def _folder(
    function: JITCallable, compile: dict[str, Any], data: dict[str, Any], target: GPUTarget
) -> str:
    source = ASTSource(function, compile["signature"], compile["constants"], compile["configs"][0])
    backend = make_backend(target)
    # As Triton itself reads them from JSON.
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in data["options"].items()}
    options = backend.parse_options(given)
    key = get_cache_key(source, backend, options, get_cache_invalidating_env_vars())
    return sha256(key.encode()).hexdigest()


def _settled(function: JITCallable) -> JITCallable:
    """The function, its hash the same in every process.

    Triton's hash of a function holds the constants that its callees use, but only of those callees
    whose own hashes are known by then: it depends on what was compiled before. So they go first.
    """
    if function.hash is None:
        names, known = function.fn.__code__.co_names, function.fn.__globals__
        values = [known[name] for name in names if name in known]
        inside = [vars(value) for value in values if isinstance(value, ModuleType)]
        values += [module[name] for module in inside for name in names if name in module]
        for value in values:
            if isinstance(value, JITCallable) and value is not function:
                _settled(value)
        _ = function.cache_key
    return function


def compile_ahead(
    wanted: Sequence[Compilation],
    target: GPUTarget,
    progress: Callable[[int, int], None],
    jobs: int | None = None,
) -> int:
    """Have Triton's cache hold them all; gives how many had to be compiled.

    progress(done, of) is called if any had, at first with 0. Raises ProcessError with the last
    words of a compiler.
    """
    missing = [one for one in wanted if not one.is_cached]
    if not missing:
        return 0
    progress(0, len(missing))
    jobs = min(jobs or len(os.sched_getaffinity(0)), len(missing), MAX_JOBS)
    processes = Processes(jobs, __name__, target.backend, str(target.arch), str(target.warp_size))
    try:
        lines = [json.dumps([one.kernel, one.data]) for one in missing]
        for done, (place, answer) in enumerate(processes.answers(lines), 1):
            if isinstance(answer, ProcessError):
                raise ProcessError(f"{missing[place].kernel} does not compile:\n{answer}")
            progress(done, len(missing))
    finally:
        processes.close()
    return len(missing)


def main(backend: str, arch: str, warp_size: str) -> None:
    """A process that compiles what it reads; what compilers print goes to standard error."""
    answers = sys.stdout
    target = GPUTarget(backend, int(arch) if arch.isdecimal() else arch, int(warp_size))
    with redirect_stdout(sys.stderr), no_device(target):
        print("{}", file=answers, flush=True)
        for line in sys.stdin:
            kernel, data = json.loads(line)
            Compilation(kernel, data, "", "").load()
            print("{}", file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
