"""How much of its start a model still has to go through before it answers."""

from __future__ import annotations

from enum import IntEnum


class Tier(IntEnum):
    """From nothing at all to a model that has just answered; what a start still has to pay.

    On a CPU: `launched` is a launcher to fork from, `host` weights that were read before and lie
    in the system's page cache, `device` the model in its worker's memory.
    """

    COLD = 0
    LAUNCHED = 1
    """A process has imported what a worker needs."""
    HOST = 2
    """Its weights are in the host's memory."""
    DEVICE = 3
    """They are on the device."""
    COMPILED = 4
    """Its kernels are compiled, the shapes that it has seen were replayed: it may be asked."""
    HOT = 5
    """It has answered since."""

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
"""What a worker has reached by the time that it enters a stage of its start."""
