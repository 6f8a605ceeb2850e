"""Why a stream refuses an append: the same words from every ledger."""

from __future__ import annotations

from ledger.errors import Conflict, StaleEpoch, WrongIndex
from ledger.interface import Append


def why_refused(append: Append, *, epoch: int, next_index: int, ended: bool) -> Conflict:
    """The error for an append that cannot be the next one of such a stream."""
    if append.epoch != epoch:
        return StaleEpoch(
            f"epoch {append.epoch} was replaced by epoch {epoch}",
            field="epoch",
            hint="another producer owns this stream now; stop appending",
        )
    if ended:
        return Conflict("the stream has ended", field="index", hint="nothing follows its end")
    return WrongIndex(
        f"index {append.index} is not the next one",
        field="index",
        hint=f"the next index is {next_index}",
    )
