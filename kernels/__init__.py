"""Numeric kernels, each with a plain torch oracle that defines its result."""

from pathlib import Path

if __name__ != "tailrace.kernels":
    # Hugging Face's package `kernels` is optional for transformers, which imports what has that
    # name. In a checkout it may find this folder; an empty path keeps it from importing our modules
    # twice.
    __path__ = []

GATE = "gate"
"""The folder that inspects compiled kernels and estimates times; it cannot change any result."""


def sources() -> list[Path]:
    """Return the files that determine the bits of results, for a model's fingerprint."""
    root = Path(__file__).parent
    return [path for path in sorted(root.rglob("*.py")) if path.relative_to(root).parts[0] != GATE]
