"""A filter in whose worker the model computes no numbers from some character of a stream on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.origin.filter import PASS, Verdict

if TYPE_CHECKING:  # a supervisor may import this module, and does without torch
    import torch

    from tailrace.origin.models.model import Piece

FACTORY = "tests.origin.no_numbers:Breaking"
PLACE = "NO_NUMBERS_AT"
"""The variable that names the folder of the orders to break."""


def order(folder: Path, characters: int, workers: int) -> None:
    """Have this many workers break, each when a stream of its reaches so many characters."""
    folder.mkdir()
    for number in range(workers):
        (folder / str(number)).write_text(str(characters))


def taken(folder: Path, characters: int) -> bool:
    """Return True if there is an order for a stream of this length, which no other worker gets."""
    for path in sorted(folder.glob("*")):
        try:
            if int(path.read_text()) <= characters:
                path.unlink()
                return True
        except FileNotFoundError:  # another worker was faster
            continue
    return False


class Breaking:
    """The filter."""

    is_broken = False
    """True for the rest of the life of a worker that has taken an order."""

    def __init__(self) -> None:
        self._characters = 0

    def check(self, text: str, last: bool) -> Verdict:
        self._characters += len(text)
        if not Breaking.is_broken and taken(Path(os.environ[PLACE]), self._characters):
            Breaking.is_broken = True
            break_model()
        return PASS


def break_model() -> None:
    """From here on the model of this process computes no numbers."""
    import torch

    from tailrace.origin.models.cpu_model import CpuModel

    forward = CpuModel.forward

    def no_numbers(model: CpuModel, pieces: Sequence[Piece]) -> torch.Tensor:
        return torch.full_like(forward(model, pieces), torch.nan)

    CpuModel.forward = no_numbers  # type: ignore[assignment, method-assign]
