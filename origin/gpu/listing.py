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

    If the variable is not set, these are all GPUs of the machine or container. The result is empty
    if there are none, or if they cannot be counted (as under WSL); then CUDA chooses a GPU.
    """
    if (value := environment.get(VISIBLE)) is not None:
        return named_gpus(value)
    try:
        count = sum(bool(_GPU.fullmatch(name)) for name in os.listdir(folder))
    except OSError:
        return ()
    # CUDA numbers GPUs from 0, whatever their device files are called: in a container whose only
    # GPU is /dev/nvidia3, this GPU has the number 0.
    return tuple(map(str, range(count)))
