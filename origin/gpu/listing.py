"""The GPUs of this machine, listed without torch and without initialising CUDA."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from tailrace.origin.gpu.placement import VISIBLE, named_gpus

DEVICE_FOLDER = Path("/dev")
_GPU = re.compile(r"nvidia\d+")


def visible_gpus(
    environment: Mapping[str, str] = os.environ, folder: Path = DEVICE_FOLDER
) -> tuple[str, ...]:
    """Return the GPUs that workers may use, as CUDA_VISIBLE_DEVICES names them.

    These are the ones that the variable names, or all of the machine or container. Empty if there
    are none, or if they cannot be counted (as under WSL); CUDA then chooses.
    """
    if (value := environment.get(VISIBLE)) is not None:
        return named_gpus(value)
    try:
        count = sum(bool(_GPU.fullmatch(name)) for name in os.listdir(folder))
    except OSError:
        return ()
    # A container may have only /dev/nvidia3, which is GPU 0 there.
    return tuple(map(str, range(count)))
