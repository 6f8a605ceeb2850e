"""Fixtures of the origin's tests. What needs torch is imported by the fixtures that need it.

CI runs the tests that need no torch a second time, on another Python without it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer

from tailrace.ledger.sqlite.ledger import SqliteLedger
from tests.origin.stage import Stage

if TYPE_CHECKING:
    import torch

    from tailrace.origin.models.cpu_model import CpuModel

if find_spec("torch") is not None:
    import torch

    from tailrace.origin.workers.token_worker import TORCH_THREADS
    from tests.interpreter import kernel_device

    # As in a worker: a second thread costs more than it saves, and may change the last bits.
    torch.set_num_threads(TORCH_THREADS)
    DEVICE = kernel_device()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return where the kernels of a GPU model run."""
    return DEVICE


@pytest.fixture
def few_programs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter each program takes its time, and no tile changes a bit."""
    if device.type == "cpu":
        from tailrace.kernels.linear import (
            ternary_gemm_triton,  # after kernel_device has been asked
        )

        for size, few in (("NARROW_ROWS", 0), ("TILE_PACKED", 256), ("TILE_ROWS", 16)):
            monkeypatch.setattr(ternary_gemm_triton, size, few)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random BitNet of two layers; tests that change a checkpoint write their own."""
    from tests.origin.tiny_checkpoint import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> CpuModel:
    from tailrace.origin.models.cpu_model import load

    return load(checkpoint)


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint / "tokenizer.json"))


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    """Yield an origin without processes."""
    ledger = await SqliteLedger.open(tmp_path / "ledger.db", lambda: 1000)
    yield Stage(ledger)
    await ledger.close()
