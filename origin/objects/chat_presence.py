"""The presence of chats at an origin: carries out what `origin.core.chat_presence` decides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import structlog

from tailrace.ledger.errors import TailraceError
from tailrace.ledger.interface import NO_READERS, SharedPresence
from tailrace.origin.core.chat_presence import ChatPresence, Round

REPORT_INTERVAL_S = 1.0
"""Minimum seconds between two reports of the number of followers to the same follower. Without it,
a thousand followers that come at once would cause a million reports."""

log = structlog.get_logger("objects")


class Presence:
    """Counts the clients that follow each chat, given as the id of the ledger stream of its turns.

    `shared` has the counts of the other origins of a shared ledger, and `run` exchanges counts with
    them. A ledger that cannot be read or written only delays this exchange.
    """

    def __init__(self, shared: SharedPresence | None) -> None:
        self._core = ChatPresence(shared=shared is not None)
        self._shared = shared
        self._followers: dict[bytes, dict[Callable[[], None], None]] = {}
        # Chats whose followers were notified of their number within the last REPORT_INTERVAL_S.
        self._told = set[bytes]()
        self._due = asyncio.Event()
        if shared is not None:
            shared.watch(self._noticed)

    @property
    def total(self) -> int:
        """The number of clients that follow a chat through this origin."""
        return self._core.total

    def join(self, chat: bytes, changed: Callable[[], None]) -> None:
        """Count a follower, until it leaves.

        `changed` is called when the number has changed, at most once in REPORT_INTERVAL_S.
        """
        self._followers.setdefault(chat, {})[changed] = None
        self._core.join(chat)
        self._tell(chat)

    def leave(self, chat: bytes, changed: Callable[[], None]) -> None:
        """Stop counting a follower that `join` counted."""
        del self._followers[chat][changed]
        if not self._followers[chat]:
            del self._followers[chat]
        self._core.leave(chat)
        self._tell(chat)

    def count(self, chat: bytes) -> int | None:
        """Return the number of followers at all origins; None if it is not known yet."""
        return self._core.count(chat)

    async def read(self, chat: bytes) -> int:
        """Return the number of followers at all origins, even if this origin has none."""
        others = 0
        if self._shared is not None:
            others = (await self._shared.read((chat,))).get(chat, NO_READERS).others
        return self._core.here(chat) + others

    def _tell(self, chat: bytes) -> None:
        """Notify a chat's followers that their number has changed.

        If they were notified less than REPORT_INTERVAL_S ago, this is done later.
        """
        self._due.set()
        if chat in self._told or chat not in self._followers:
            return
        self._told.add(chat)
        told = self._core.count(chat)
        for changed in self._followers[chat]:
            changed()
        asyncio.get_running_loop().call_later(REPORT_INTERVAL_S, self._tell_again, chat, told)

    def _tell_again(self, chat: bytes, told: int | None) -> None:
        self._told.discard(chat)
        if self._core.count(chat) != told:
            self._tell(chat)

    def _noticed(self, chats: Sequence[bytes] | None) -> None:
        self._core.noticed(chats)
        self._due.set()

    # ---- exchange with other origins ----

    async def run(self) -> None:
        """Exchange counts with the other origins of a shared ledger, until cancelled."""
        if self._shared is None:
            return
        clock = asyncio.get_running_loop().time
        while True:
            self._due.clear()
            begun = self._core.begin(clock())
            if begun is not None:
                await self._exchange(self._shared, begun)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._core.wake_at()):
                    await self._due.wait()

    async def _exchange(self, shared: SharedPresence, begun: Round) -> None:
        try:
            if begun.publish:
                await shared.publish(begun.publish)
            found = await shared.read(begun.read) if begun.read else {}
        except TailraceError as error:
            # Presence never ends an origin: a ledger that has failed fails other writes, too.
            log.warning("chat.presence_delayed", error=str(error))
            self._core.failed(begun, asyncio.get_running_loop().time())
            return
        for chat in self._core.done(begun, found):
            for changed in self._followers.get(chat, ()):
                changed()
