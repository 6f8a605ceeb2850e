"""Prints, as JSON, what a model has compiled ahead and what its launches then ask for.

    python -m tests.origin.models.ahead_of_launches plan|start|capture CHECKPOINT…

Without a GPU, and without TRITON_INTERPRET: Triton compiles for sm_90, and a device that only
counts takes the launches. `plan` compiles nothing; `start` does what a worker's start does, but for
the kernels that take long to compile; `capture` counts captures before and after the model is
ready, and what is launched outside of them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random
from typing import Any

import torch
from triton import knobs

from tailrace.kernels.ahead import compile_ahead, no_device, planned
from tailrace.kernels.sampler.sampler import MASK_BITS, Sampling
from tailrace.kernels.shapes import PAGE_TOKENS
from tailrace.kernels.step_graph import Launch
from tailrace.origin.models import gpu_model
from tailrace.origin.models.gpu_model import GpuModel, compilations
from tailrace.origin.models.model import Draw, Piece
from tests.fake_gpu import SM_90, FakeGpu

BATCHES = 60
MAX_PIECES = 20
QUICK = ("norm_kernel", "norm_int8_kernel", "embed_kernel")


def live(model: GpuModel, random: Random) -> None:
    """Batches as an engine asks for them: prompts, steps, replays; settings of all kinds."""
    words = -(-model.config.vocab // MASK_BITS)
    mask = torch.full((words,), -1, dtype=torch.int32)
    counts = torch.zeros(model.config.vocab, dtype=torch.int32)
    for _ in range(BATCHES):
        pieces = [_piece(random) for _ in range(random.randint(1, random.choice((2, MAX_PIECES))))]
        hidden = model.forward(pieces)
        rows = random.randint(1, len(hidden))
        draws = [
            Draw(
                Sampling(temperature=1.0, presence=random.choice((0.0, 0.5))),
                position=1,
                mask=mask if random.random() < 0.1 else None,
                counts=counts,
            )
            for _ in range(rows)
        ]
        model.draw(hidden[:rows], draws)
        steps = [Piece([1], random.randint(0, 64), (0, 1), prefill=False)] * random.randint(1, 70)
        model.launch(steps, range(len(steps)), [Draw(Sampling(), 1)] * len(steps))


class FakeGraphs:
    """Stand-in for CUDA graphs: a capture notes the launches, and a replay launches nothing.

    As on a GPU, the numbers of a replay are those that its buffers had.
    """

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0

    def __call__(self, launch: Launch) -> Launch:
        self.captured += 1
        result = launch()

        def replay() -> torch.Tensor:
            self.replayed += 1
            return result

        return replay


def capture(folder: Path) -> dict[str, Any]:
    """Return the captures before the model is ready, and what serving captures and launches."""
    graphs, launched = FakeGraphs(), list[str]()
    told: list[tuple[str, int, int]] = []
    found: dict[str, Any] = {}

    def note(*, fn: Any, **_: Any) -> bool:
        launched.append(fn.name)
        return True  # which skips the launch

    with no_device(SM_90), knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = note
        model = gpu_model.load(
            folder,
            lambda *progress: told.append(progress),
            torch.device("cpu"),
            capture=graphs,
            step_rows=256,
        )
        found |= {"ready": graphs.captured, "told": [one for one in told if one[0] == "capture"]}
        launched.clear()
        live(model, Random(1))
        drawn = _generate(model)
    found |= {"serving": graphs.captured - found["ready"], "replayed": graphs.replayed}
    return found | {"launched": sorted(set(launched)), "first_use": drawn}


def _generate(model: GpuModel) -> bool:
    """Launch growing batches of growing lengths; return True if one of them was a first use."""
    context, found = model.config.context, False
    for rows in (1, 2, 3, 8, 17, 64, 65, 129, 256):
        for start in (1, context // 2, context - 1):
            pages = [[0] * (context // PAGE_TOKENS) for _ in range(rows)]
            pieces = [Piece([1], start, table, prefill=False) for table in pages]
            launch = model.launch(pieces, range(rows), [Draw(Sampling(), 1)] * rows)
            found |= launch.first_use
    return found


def _piece(random: Random) -> Piece:
    ids = [1] * random.randint(1, PAGE_TOKENS)
    if random.random() < 0.5:
        return Piece(ids, PAGE_TOKENS * random.randint(0, 1), (0, 1), prefill=True)
    return Piece(random.choice((ids[:1], ids[:9])), random.randint(0, 64), (0, 1), prefill=False)


def plan(folder: Path) -> dict[str, Any]:
    """Return, for each way to launch, the known compilations and the launches that lack one."""
    found = {}
    for dependent in (False, True):
        model = gpu_model.load(folder, device=torch.device("cpu"), dependent=dependent)
        known = {one.key: one for one in compilations(model._decoder, model._draw, SM_90)}
        asked = planned(lambda model=model: live(model, Random(1)), SM_90)  # type: ignore[misc]
        missed = [one.kernel for one in asked if one.key not in known]
        found[str(dependent)] = {"known": len(known), "asked": len(asked), "missed": missed}
    return found


def start(folder: Path) -> dict[str, Any]:
    """Return what was told while compiling, and how launches find it."""
    model = gpu_model.load(folder, device=torch.device("cpu"))
    wanted = compilations(model._decoder, model._draw, SM_90)
    quick = [one for one in wanted if one.kernel.endswith(QUICK)]
    told: list[tuple[int, int]] = []
    compile_ahead(quick, SM_90, lambda done, of: told.append((done, of)), jobs=2)
    again = compile_ahead(quick, SM_90, lambda done, of: None)
    gpu, compiled, asked = FakeGpu(), [], set()

    def ask(*, fn: Any, **_: Any) -> bool:
        asked.add(fn.name)
        return True  # which skips the launch

    knobs.compilation.listener = lambda *, cache_hit, **_: compiled.append(cache_hit)
    for one in quick:
        one.load()
    knobs.runtime.jit_cache_hook = ask
    live(model, Random(1))
    return {
        "told": told,
        "again": again,
        "compiled": compiled.count(False),
        "launched": sorted(set(gpu.launched)),
        "asked": sorted(asked),
    }


if __name__ == "__main__":
    do = {"plan": plan, "start": start, "capture": capture}[sys.argv[1]]
    print(json.dumps([do(Path(folder)) for folder in sys.argv[2:]]))
