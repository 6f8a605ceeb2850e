"""Bytes that a step must read at least."""

from __future__ import annotations

from tailrace.kernels.shapes import DecoderShape, Family


def step_bytes(shape: DecoderShape, rows: int, length: int, int8_head: bool) -> int:
    """Return what a step must read at least: weights once, and every row's keys and values."""
    per_weight = 0.25 if shape.family is Family.BITNET else 2.0
    linears = sum(outputs * inputs for outputs, inputs in shape.linears.values())
    head = shape.vocab * shape.hidden * (1 if int8_head else 2)
    cache = rows * length * 2 * shape.keys * 2
    return int(shape.layers * (linears * per_weight + cache)) + head
