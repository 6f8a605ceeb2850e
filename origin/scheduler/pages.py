"""The pages of a KV cache: who holds them, and which known prefixes lie in them.

A page holds the keys and values of PAGE_TOKENS consecutive positions of a sequence, for all
layers; a sequence's pages, in order, are its block table (Kwon et al. 2023, PagedAttention).
A full page whose content has a key can be shared by every sequence that begins the same way,
and stays findable after its last holder has let go, until its room is needed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import sha256

from tailrace.kernels.shapes import PAGE_TOKENS


def page_key(previous: bytes, ids: Sequence[int], prefilled: int) -> bytes:
    """What a full page holds, as the SHA-256 of all that its keys and values follow from.

    previous: the key of the page before it, b"" for the first; ids: its PAGE_TOKENS tokens;
    prefilled: how many of them, from the first, came through prefill. The rest came as rows
    of the decode step, and a row may have other last bits than a prefilled position.
    """
    if len(ids) != PAGE_TOKENS:
        raise ValueError(f"ids: {len(ids)} tokens, a page has {PAGE_TOKENS}")
    return sha256(previous + bytes((prefilled,)) + array("Q", ids).tobytes()).digest()


class PagePool:
    """`pages` pages with the ids 0 to pages - 1, each free, held by one or more, or only cached.

    A cached page has a key and no holder. `take` evicts the one that was let go longest ago.
    """

    def __init__(self, pages: int) -> None:
        if pages < 1:
            raise ValueError(f"pages: {pages}, at least 1 is needed")
        self.pages = pages
        self._free = list(range(pages - 1, -1, -1))  # popped from the end: low ids first
        self._holders = [0] * pages
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._cached: dict[int, None] = {}  # in the order in which they were let go

    @property
    def free(self) -> int:
        """Pages that `take` can give: free ones, and those that are only cached."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Pages that nobody holds and `find` can still give."""
        return len(self._cached)

    def holders(self, page: int) -> int:
        """How many hold the page."""
        return self._holders[page]

    def take(self, count: int) -> list[int] | None:
        """`count` pages for one holder, their content undefined; None if there are too few."""
        if count > self.free:
            return None
        taken = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The pages of the longest run of `keys`, from the first, that is here; each is now held.

        `keys` is read no further than the first that is missing, so it may compute them.
        """
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            self._cached.pop(page, None)
            self._holders[page] += 1
            pages.append(page)
        return pages

    def publish(self, page: int, key: bytes) -> None:
        """Let others find a held page that is full. The first of two with the same key stays."""
        if self._holders[page] < 1:
            raise ValueError(f"page {page} is held by nobody")
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def release(self, pages: Sequence[int]) -> None:
        """Let go of a holder's pages, given in the order of its sequence.

        The last ones are evicted first: a page without those before it can never be found.
        """
        for page in reversed(pages):
            if self._holders[page] < 1:
                raise ValueError(f"page {page} is held by nobody")
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._key_of:
                self._cached[page] = None
            else:
                self._free.append(page)

    def _evict(self) -> int:
        page = next(iter(self._cached))
        del self._cached[page]
        del self._page_of[self._key_of.pop(page)]
        return page
