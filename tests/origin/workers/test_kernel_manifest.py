"""The manifest of kept kernels, which several workers write; no kernel is compiled for it."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Barrier, Thread

from tailrace.origin.workers.kernel_cache import MANIFEST, KernelCache

WORKERS = 16


def test_workers_that_keep_their_kernels_at_once_lose_none(tmp_path: Path) -> None:
    folder, at_once = KernelCache(tmp_path, "mark").folder, Barrier(WORKERS)

    def compile_and_keep(number: int) -> None:
        at_once.wait()
        made = folder / f"kernel{number}"
        made.mkdir(parents=True)
        (made / "code.so").write_bytes(b"%d" % number)
        KernelCache(tmp_path, "mark").keep()

    workers = [Thread(target=compile_and_keep, args=(number,)) for number in range(WORKERS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    groups = json.loads((folder / MANIFEST).read_text())["groups"]
    assert groups.keys() == {f"kernel{number}" for number in range(WORKERS)}
