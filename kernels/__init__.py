"""Numeric kernels, each with a plain torch oracle that defines its result."""

from pathlib import Path

if __name__ != "tailrace.kernels":
    # Hugging Face's transformers imports its optional package `kernels` by that name, and in a
    # checkout the import may find this folder instead. The empty path keeps transformers from
    # importing our modules a second time.
    __path__ = []

GATE = "gate"
"""Name of the folder whose code inspects compiled kernels and estimates times. This code changes no
result, so it is no part of a model's fingerprint."""


def sources() -> list[Path]:
    """Return the files whose code determines the bits of results, for a model's fingerprint."""
    root = Path(__file__).parent
    return [path for path in sorted(root.rglob("*.py")) if path.relative_to(root).parts[0] != GATE]
