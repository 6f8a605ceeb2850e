"""Ahead-of-time compilation of the Triton kernels that a program will launch.

`planned` runs the launches up to the point where Triton would compile, and records each
compilation: types, alignments and constants come from the launch itself, so that the recorded key
equals the key of the real launch. `compile_ahead` compiles what Triton's cache lacks, in several
processes. `Compilation.load` puts a compiled kernel where a launch looks for it. None of this needs
a GPU, only the name of one (a `target`).
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
"""Maximum number of compiler processes; each takes about 300 MB of memory."""
_FILE_CHARS = 150
"""Number of characters to which Triton cuts a kernel's name in the file names of its cache."""


@dataclass(frozen=True, slots=True)
class Compilation:
    """One compilation of a kernel: the kernel with the types and constants to compile it for."""

    kernel: str
    """Name of the kernel as `module:function`."""
    data: str
    """JSON with the types, constants and options from which Triton can compile the kernel."""
    key: str
    """Key under which Triton looks up the compiled kernel at a launch."""
    folder: str
    """Name of the folder in Triton's cache that holds the compiled kernel."""

    @property
    def is_cached(self) -> bool:
        """True if Triton's cache holds the compiled kernel."""
        name = f"{self.kernel.partition(':')[2][:_FILE_CHARS]}.json"
        return name in (get_cache_manager(self.folder).get_group(name) or {})

    def load(self) -> None:
        """Load the kernel into Triton's table of launchable kernels, compiling it if needed."""
        module, _, name = self.kernel.partition(":")
        _settled(getattr(import_module(module), name)).preload(self.data)


class _NoDevice:
    """Stand-in for Triton's GPU driver: gives a launch the device, the stream and the target."""

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
    """Make Triton compile for `target`, even on a machine without a GPU."""
    try:
        before = driver.active
    except RuntimeError:  # the machine has no GPU
        before = None
    driver.set_active(_NoDevice(target))
    try:
        yield
    finally:
        if before is not None:
            driver.set_active(before)


def planned(launch: Callable[[], None], target: GPUTarget) -> list[Compilation]:
    """Return the compilations that `launch` would cause, without running any kernel."""
    found: dict[tuple[str, str], Compilation] = {}

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        kernel, data = f"{fn.module}:{fn.name}", compile["specialization_data"]
        if (kernel, data) not in found:
            folder = _folder(_settled(fn.jit_function), compile, json.loads(data), target)
            found[kernel, data] = Compilation(kernel, data, compile["key"], folder)
        return True  # True makes Triton skip both the compilation and the launch

    with no_device(target), knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = note
        launch()
    return list(found.values())


def _folder(
    function: JITCallable, compile: dict[str, Any], data: dict[str, Any], target: GPUTarget
) -> str:
    source = ASTSource(function, compile["signature"], compile["constants"], compile["configs"][0])
    backend = make_backend(target)
    # Convert lists to tuples, as Triton does when it reads its own JSON.
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in data["options"].items()}
    options = backend.parse_options(given)
    key = get_cache_key(source, backend, options, get_cache_invalidating_env_vars())
    return sha256(key.encode()).hexdigest()


def _settled(function: JITCallable) -> JITCallable:
    """Return the function after setting its hash, which is then the same in every process.

    Triton's hash of a function includes the constants used by its callees, but only by those
    callees whose own hash is already known. So the hash depends on the order of earlier
    compilations. Hashing the callees first removes that dependence.
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
    """Compile the kernels that Triton's cache lacks, and return their number.

    If the cache lacks any, `progress(done, total)` is called before the first compilation and after
    each one. Raises ProcessError with the compiler's last lines of output.
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
    """Run as a compiler process: compile each kernel that a line of standard input names.

    Anything that a compiler prints goes to standard error, since standard output carries the
    answers.
    """
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
