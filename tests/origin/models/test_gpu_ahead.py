"""All of a model's launches are compiled before it is ready, and kept; this needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tailrace.kernels.shapes import Family
from tailrace.origin.workers.kernel_cache import VARIABLE, KernelCache
from tests.origin.tiny_checkpoint import KERNEL_SHAPES, write_checkpoint

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]
QUICK = ["embed_kernel", "norm_int8_kernel", "norm_kernel"]


def told(do: str, cache: Path, *folders: Path) -> list[Any]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.origin.models.ahead_of_launches", do, *map(str, folders)],
        env={**environment, VARIABLE: str(cache)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_whatever_a_model_launches_was_known_before(tmp_path: Path) -> None:
    folders = [tmp_path / family.value for family in Family]
    for folder, family in zip(folders, Family, strict=True):
        write_checkpoint(folder, KERNEL_SHAPES[family])
    for of_family in told("plan", tmp_path / "cache", *folders):
        for launches in of_family.values():
            assert launches["missed"] == [] and launches["known"] >= launches["asked"] > 20


def test_a_start_compiles_what_is_not_kept_whole_and_nothing_else(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "data")
    folder = write_checkpoint(tmp_path, KERNEL_SHAPES[Family.BITNET])
    (first,) = told("start", cache.folder, folder)
    of = first["told"][0][1]
    assert of >= len(QUICK)
    assert first["told"] == [[done, of] for done in range(of + 1)]
    assert cache.keep() == of
    next(cache.folder.rglob("*.cubin")).write_bytes(b"damaged")
    assert cache.restore() == of - 1
    (second,) = told("start", cache.folder, folder)
    assert second["told"] == [[0, 1], [1, 1]]
    for each in (first, second):
        assert each["again"] == each["compiled"] == 0
        assert each["launched"] == QUICK
        assert not set(QUICK) & set(each["asked"])


def test_every_step_is_captured_before_the_model_is_ready(tmp_path: Path) -> None:
    """Whatever is served then, in batches of up to 256 rows, captures nothing.

    Only draws with masks or penalties, and the LM head after prompts, are launched by themselves.
    """
    shape = replace(KERNEL_SHAPES[Family.LLAMA], context=4096)
    (found,) = told("capture", tmp_path / "cache", write_checkpoint(tmp_path, shape))
    kinds, rows, lengths, prefills = 2, 9, 4, 4
    assert found["ready"] == kinds * rows * lengths + prefills
    assert found["told"][0] == ["capture", 0, found["ready"]]
    assert found["told"][-1] == ["capture", found["ready"], found["ready"]]
    assert found["serving"] == 0 and found["replayed"] > 100
    assert found["first_use"] is False
    outside = {"scan", "spread", "split", "settle"}
    assert outside < set(found["launched"])
    layers = {"embed_kernel", "_decode", "_prefill", "_rope_write"}
    assert not layers & set(found["launched"])
