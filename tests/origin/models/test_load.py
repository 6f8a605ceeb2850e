"""After loading, glibc keeps the memory that one step frees for the next."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.origin.tiny_checkpoint import write_checkpoint

STEPS = """
import sys
from resource import RUSAGE_SELF, getrusage
import torch
from tailrace.origin.models.load import load_model
from tailrace.origin.models.model import Device

def step(kib):
    held = [torch.ones(kib << 8) for _ in range(16)]

load_model(sys.argv[1], device=Device.CPU, kv_bytes=1 << 20)
for kib in (60, 1000):
    step(kib)
    before = getrusage(RUSAGE_SELF).ru_minflt
    for _ in range(10):
        step(kib)
    print(getrusage(RUSAGE_SELF).ru_minflt - before)
"""
PAGES_OF_A_STEP = (16 * 60 // 4, 16 * 1000 // 4)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="others have settings of their own")
def test_what_a_step_frees_is_there_for_the_next(tmp_path: Path) -> None:
    """In a process of its own: what it has freed before decides what glibc would do by itself."""
    command = [sys.executable, "-c", STEPS, str(write_checkpoint(tmp_path))]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    small, large = map(int, ran.stdout.split())  # in ten steps
    assert small < PAGES_OF_A_STEP[0]
    assert large < PAGES_OF_A_STEP[1]
