"""Tiers: how far a model's start has come, and thus how long its next answer takes."""

from __future__ import annotations

from enum import IntEnum


class Tier(IntEnum):
    """The stages from a cold model to one that has answered requests.

    On a CPU `launched` is a ready fork server, `host` weights in the system's page cache, and
    `device` the model in its worker's memory.
    """

    COLD = 0
    LAUNCHED = 1
    """A process has imported the worker's modules."""
    HOST = 2
    """The model's weights are in the host's memory."""
    DEVICE = 3
    """The model's weights are on the device."""
    COMPILED = 4
    """The model's kernels are compiled and warmed up, so the worker takes requests."""
    HOT = 5
    """The model has answered a request since it was loaded."""

    @property
    def word(self) -> str:
        return self.name.lower()


STAGE_TIERS = {
    "check": Tier.LAUNCHED,
    "read": Tier.LAUNCHED,
    "hash": Tier.LAUNCHED,
    "unpack": Tier.HOST,
    "move": Tier.HOST,
    "tokenizer": Tier.DEVICE,
    "warm-up": Tier.DEVICE,
    "compile": Tier.DEVICE,
    "capture": Tier.DEVICE,
}
"""Tier that a worker has reached when it enters a stage of its start."""
