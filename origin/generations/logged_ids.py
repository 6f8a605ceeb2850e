"""Token ids as the ledger holds them: those that were not drawn are marked."""

from __future__ import annotations

from collections.abc import Sequence

STEERED = 1 << 31
"""Set in the id of a token that came from a Steer order."""
STEER_BEGINS = 1 << 30
"""Set too in the first id of each order, so that a log tells how many orders it holds."""
ID_BITS = STEER_BEGINS - 1


def plain_ids(logged: Sequence[int]) -> list[int]:
    """Logged ids, as `Run.generated_ids` has them, without the marks of steered ones."""
    return [token & ID_BITS for token in logged]
