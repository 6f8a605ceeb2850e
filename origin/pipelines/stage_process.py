"""A process that runs the stages of kind `cpu` or `gpu` of many streams.

    python -m tailrace.origin.pipelines.stage_process

It answers each order on stdin with a reply on stdout (`stage_orders`), and ends at the end of
stdin.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import BinaryIO

from tailrace.origin.pipelines.stage_orders import LENGTH_BYTES, Order, StageObjects, packed


def _read(source: BinaryIO) -> Order | None:
    head = source.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    order: Order = pickle.loads(source.read(int.from_bytes(head, "little")))
    return order


def main() -> None:
    """Carry out orders until the end of stdin."""
    # A stage that prints must not write between the replies, so stdout becomes stderr.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # as in the worker, operators' stages are imported from here
    objects = StageObjects()
    while (order := _read(sys.stdin.buffer)) is not None:
        replies.write(packed(objects.carry_out(order)))
        replies.flush()


if __name__ == "__main__":
    main()
