"""Numeric kernels: each with a plain torch oracle that says what it computes."""

from pathlib import Path

if __name__ != "tailrace.kernels":
    # transformers looks for Hugging Face's package of this name and imports what it finds. In a
    # checkout that may be this folder: nothing below it is there to be imported a second time.
    __path__ = []

GATE = "gate"
"""The folder that reads machine code and draws; nothing in it decides a bit of a result."""


def sources() -> list[Path]:
    """The files whose code decides the bits of results, for the fingerprints of models."""
    root = Path(__file__).parent
    return [path for path in sorted(root.rglob("*.py")) if path.relative_to(root).parts[0] != GATE]
