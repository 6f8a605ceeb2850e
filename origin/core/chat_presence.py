"""Presence of chats: how many clients follow each chat, at all origins that share the ledger.

An origin counts its own followers. On a shared ledger it publishes its counts, and reads the sums
of the other origins, in rounds: at most one a second, and none while no count changes and no chat
has followers at this origin. When an origin dies, its published counts leave the sums with its
lease. Other origins notice this at their next recheck of the chats that have followers there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tailrace.ledger.interface import NO_READERS, PublishedReaders

ROUND_INTERVAL_S = 1.0
"""Minimum seconds between two rounds of an origin."""
RECHECK_INTERVAL_S = 5.0
"""Seconds after which an origin reads the counts that other origins have published again, even
without a notification, and after which it repeats a round that has failed."""
MAX_ROUND_CHATS = 10_000
"""Maximum number of chats that one round publishes, and maximum number that it reads. Other chats
wait for the next round."""
UNKNOWN = -1
"""Stands for a published count when the outcome of publishing is not known."""


@dataclass(frozen=True, slots=True)
class Round:
    """The work of one round: counts to publish, and chats whose other origins' counts to read."""

    publish: Mapping[bytes, int]
    read: tuple[bytes, ...]


class ChatPresence:
    """Counts the followers of chats. A `chat` is given as the id of the ledger stream of its turns.

    `shared` is True if other origins may use the ledger. Times are of the caller's clock, in s.
    """

    def __init__(self, *, shared: bool) -> None:
        self._shared = shared
        self._here: Counter[bytes] = Counter()
        self._others: dict[bytes, int] = {}  # chat with followers here -> followers elsewhere
        self._published: dict[bytes, int] = {}
        # Dicts used as sets that keep the order of insertion.
        self._unpublished: dict[bytes, None] = {}
        self._unread: dict[bytes, None] = {}
        self._round_at = self._recheck_at = -math.inf

    # ---- followers ----

    def join(self, chat: bytes) -> None:
        """Count one more follower at this origin."""
        self._here[chat] += 1
        if self._shared:
            self._unpublished[chat] = None
            if self._here[chat] == 1:
                self._unread[chat] = None

    def leave(self, chat: bytes) -> None:
        """Count one follower less at this origin."""
        self._here[chat] -= 1
        if self._shared:
            self._unpublished[chat] = None
        if not self._here[chat]:
            del self._here[chat]
            self._others.pop(chat, None)
            self._unread.pop(chat, None)

    def here(self, chat: bytes) -> int:
        """Return the number of followers at this origin."""
        return self._here[chat]

    @property
    def total(self) -> int:
        """The number of followers of all chats at this origin."""
        return self._here.total()

    def count(self, chat: bytes) -> int | None:
        """Return the number of followers at all origins.

        Return None while those of other origins are unknown, because no round has read them.
        """
        if self._shared and chat not in self._others:
            return None
        return self._here[chat] + self._others.get(chat, 0)

    # ---- rounds ----

    def noticed(self, chats: Iterable[bytes] | None) -> None:
        """Note that other origins have published counts of these chats; None stands for all."""
        changed = self._here if chats is None else [chat for chat in chats if chat in self._here]
        self._unread |= dict.fromkeys(changed)

    def wake_at(self) -> float | None:
        """Return when the next round is due; None if it waits for a change."""
        if self._unpublished or self._unread:
            return self._round_at
        if self._shared and self._here:
            return max(self._round_at, self._recheck_at)
        return None

    def begin(self, now: float) -> Round | None:
        """Begin a round if one is due. The caller ends it with `done` or `failed`."""
        wake_at = self.wake_at()
        if wake_at is None or now < wake_at:
            return None
        if now >= self._recheck_at:
            self._recheck_at = now + RECHECK_INTERVAL_S
            self._unread |= dict.fromkeys(self._here)
        changed = _take(self._unpublished)
        counts = {chat: self._here[chat] for chat in changed}
        publish = {
            chat: count for chat, count in counts.items() if count != self._published.get(chat, 0)
        }
        read = _take(self._unread)
        if not publish and not read:
            return None
        self._round_at = now + ROUND_INTERVAL_S
        return Round(publish, tuple(read))

    def done(self, finished: Round, found: Mapping[bytes, PublishedReaders]) -> list[bytes]:
        """End a round that was carried out; return the chats whose number of followers has changed.

        A count of this origin that the ledger has lost is published again in the next round.
        """
        for chat, count in finished.publish.items():
            self._published[chat] = count
            if not count:
                del self._published[chat]
        changed = []
        for chat in finished.read:
            if chat not in self._here:
                continue
            own, others = found.get(chat, NO_READERS)
            if own != self._published.get(chat, 0):
                self._published[chat] = own
                self._unpublished[chat] = None
            if self._others.get(chat) != others:
                self._others[chat] = others
                changed.append(chat)
        return changed

    def failed(self, finished: Round, now: float) -> None:
        """End a round that could not be carried out; it may have published its counts or not."""
        self._published |= dict.fromkeys(finished.publish, UNKNOWN)
        self._unpublished |= dict.fromkeys(finished.publish)
        self._unread |= dict.fromkeys(chat for chat in finished.read if chat in self._here)
        self._round_at = now + RECHECK_INTERVAL_S


def _take(chats: dict[bytes, None]) -> list[bytes]:
    """Remove and return the first chats, at most MAX_ROUND_CHATS."""
    taken = list(chats)[:MAX_ROUND_CHATS]
    for chat in taken:
        del chats[chat]
    return taken
