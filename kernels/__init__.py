"""Numeric kernels: each with a plain torch oracle that says what it computes."""

from pathlib import Path

if __name__ != "tailrace.kernels":  # a second name would be a second copy of every class
    raise ImportError(f"{__name__}: import tailrace.kernels instead")

GATE = "gate"
"""The folder that reads machine code and draws; nothing in it decides a bit of a result."""


def sources() -> list[Path]:
    """The files whose code decides the bits of results, for the fingerprints of models."""
    root = Path(__file__).parent
    return [path for path in sorted(root.rglob("*.py")) if path.relative_to(root).parts[0] != GATE]
