"""Kernels that Triton compiles for an H100, kept, damaged, carried elsewhere; no GPU is asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tailrace.ledger.errors import CallerError, ConfigError
from tailrace.origin.workers.kernel_cache import MANIFEST, VARIABLE, KernelCache, fingerprint

pytest.importorskip("triton")

KERNEL = """
import json, sys
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def double(x, n, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(x + at, 2 * tl.load(x + at, at < n), at < n)

compiled = []
import triton.compiler.compiler as made
inner = made.make_backend
def counting(target):
    backend = inner(target)
    stages = backend.add_stages
    def add(found, *rest):
        stages(found, *rest)
        last = found["cubin"]
        found["cubin"] = lambda *given: (compiled.append(1), last(*given))[1]
    backend.add_stages = add
    return backend
made.make_backend = counting
for size in map(int, sys.argv[1:]):
    source = ASTSource(double, {"x": "*fp32", "n": "i32", "SIZE": "constexpr"}, {"SIZE": size})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))
print(len(compiled))
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kernel") / "double.py"
    path.write_text(KERNEL)
    return path


def compile_into(script: Path, cache: KernelCache, *sizes: int) -> int:
    """Return how many had to be compiled."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment[VARIABLE] = str(cache.folder)
    done = subprocess.run(
        [sys.executable, script, *map(str, sizes)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def cubins(cache: KernelCache) -> list[Path]:
    return sorted(cache.folder.rglob("*.cubin"))


def test_what_was_compiled_is_there_at_the_next_start_and_damage_is_compiled_again(
    tmp_path: Path, script: Path
) -> None:
    cache = KernelCache(tmp_path)
    assert compile_into(script, cache, 32, 64) == 2
    assert (cache.keep(), cache.keep()) == (2, 0)
    assert cache.restore() == 2
    assert compile_into(script, cache, 32, 64) == 0
    damaged = cubins(cache)[0]
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1] + b"\xff")
    assert cache.restore() == 1 and not damaged.exists()
    assert compile_into(script, cache, 32, 64) == 1
    assert damaged.read_bytes() == whole
    # Its origin was killed before it was kept, so it is not known to be whole.
    assert cache.restore() == 1
    assert compile_into(script, cache, 32, 64) == 1 and cache.keep() == 1
    (cache.folder / MANIFEST).write_text("{")
    assert cache.restore() == 0


def test_kernels_are_carried_to_another_folder_whole_or_not_at_all(
    tmp_path: Path, script: Path
) -> None:
    here, there = KernelCache(tmp_path / "a"), KernelCache(tmp_path / "b")
    file = tmp_path / "kernels.tar.zst"
    with pytest.raises(ConfigError, match="no compiled kernel of this version"):
        here.export(file)
    compile_into(script, here, 32, 64)
    assert here.export(file) == 2
    packed = file.read_bytes()
    for wrong in (packed[: len(packed) // 2], packed[:-40] + b"\0" * 40, b"no archive"):
        file.write_bytes(wrong)
        with pytest.raises(CallerError, match="is damaged"):
            there.take_in(file)
        assert not there.folder.exists()
    file.write_bytes(packed)
    with pytest.raises(CallerError, match="was exported by another version: format 1, "):
        KernelCache(tmp_path / "b", "other").take_in(file)
    assert (there.take_in(file), there.take_in(file), there.restore()) == (2, 0, 2)
    assert compile_into(script, there, 32, 64) == 0
    manifest = json.loads((there.folder / MANIFEST).read_text())
    assert manifest["fingerprint"] == fingerprint() == there.mark
