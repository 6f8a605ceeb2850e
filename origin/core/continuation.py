"""Rules for continuing a stream: if a worker can continue it, and which notices readers get."""

from __future__ import annotations

from itertools import chain

from tailrace.ledger.frame import Notice
from tailrace.origin.core.stream import TEXT
from tailrace.origin.generations.recipe import Recipe
from tailrace.origin.generations.stream_log import RETRIED, History
from tailrace.origin.workers.worker_frame import Ready

SHOWN_FINGERPRINT_CHARS = 16


def why_not(recipe: Recipe, ready: Ready, history: History) -> str | None:
    """Return why a worker cannot continue a stream that another worker began; None if it can."""
    if recipe.model != ready.model:
        return f"this origin serves {ready.model!r} now, not {recipe.model!r}"
    if (ready.kind == TEXT) != (not recipe.prompt_ids):
        return f"{ready.model!r} is now served by workers of another kind"
    if ready.kind == TEXT:
        return None
    # The stream's token ids come from the engine in the recipe, so they fit the vocabulary of this
    # engine. There may be a million of them, so they are checked only for another engine.
    is_other = recipe.fingerprint != ready.fingerprint
    if is_other and max(chain(recipe.prompt_ids, history.ids)) >= ready.vocab:
        return f"{ready.model!r} has another vocabulary now"
    if len(recipe.prompt_ids) >= ready.context:
        return f"{ready.model!r} has a shorter context now"
    return None


def notices(
    recipe: Recipe, ready: Ready, history: History, failure: str | None = None
) -> list[Notice]:
    """Return the notices to log before a worker continues, numbered from the next index on.

    `failure` is the message of the failed run that is retried, if there was one.
    """
    told = recipe.first_notices(history.next_index)
    told += _inexact(recipe, ready, history, history.next_index + len(told))
    if failure is not None and not history.retried:
        message = f"the run failed and is tried once more from here: {failure}"
        told.append(Notice(RETRIED, message, history.next_index + len(told)))
    return told


def _inexact(recipe: Recipe, ready: Ready, history: History, index: int) -> list[Notice]:
    """Return a notice at `index` if an uninterrupted run might have continued differently.

    A worker of kind `text` sends such a notice itself if it may continue differently.
    """
    if not history.is_begun or recipe.fingerprint == ready.fingerprint or ready.kind == TEXT:
        return []
    before, now = (
        text[:SHOWN_FINGERPRINT_CHARS] for text in (recipe.fingerprint, ready.fingerprint)
    )
    notice = Notice(
        "inexact",
        f"the engine {before} began this stream, and the engine {now} on {ready.device} continues"
        " it: the text may differ from that of an uninterrupted run",
        index,
    )
    said = {(notice.code, notice.message) for notice in history.notices}
    return [] if (notice.code, notice.message) in said else [notice]
