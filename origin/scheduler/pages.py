"""The pages of a KV cache: their holders, and the known prefixes that they contain.

A page has the keys and values of PAGE_TOKENS consecutive positions of a sequence, for all layers; a
sequence's pages, in order, are its block table (Kwon et al. 2023, PagedAttention). A full page
whose content has a key can be shared by every sequence with the same beginning. It stays cached
after its last holder has released it, until its space is needed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import sha256

from tailrace.kernels.shapes import PAGE_TOKENS


def page_key(previous: bytes, ids: Sequence[int], prefilled: int) -> bytes:
    """Return the SHA-256 of everything that a full page's keys and values depend on.

    previous: the key of the page before it, b"" for the first. ids: its PAGE_TOKENS tokens.
    prefilled: how many of them, from the first, were prefilled. The rest were rows of decode steps,
    whose last bits may differ from those of prefill.
    """
    if len(ids) != PAGE_TOKENS:
        raise ValueError(f"ids: {len(ids)} tokens, but a page has {PAGE_TOKENS}")
    return sha256(previous + bytes((prefilled,)) + array("Q", ids).tobytes()).digest()


class PagePool:
    """A pool of pages with ids 0 to pages - 1, each free, held by one or more runs, or cached.

    A cached page has a key and no holder. `take` evicts the page that was released longest ago.
    """

    def __init__(self, pages: int) -> None:
        if pages < 1:
            raise ValueError(f"pages: {pages}, at least 1 is needed")
        self.pages = pages
        self._free = list(range(pages - 1, -1, -1))  # pop() takes the lowest id first
        self._holders = [0] * pages
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._cached: dict[int, None] = {}  # a set of pages in the order of their release

    @property
    def free(self) -> int:
        """Number of pages that `take` can return: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Number of pages without a holder that `find` can still return."""
        return len(self._cached)

    def holders(self, page: int) -> int:
        """Return the number of holders of a page."""
        return self._holders[page]

    def take(self, count: int) -> list[int] | None:
        """Return `count` pages for one holder, with undefined content.

        None if there are too few.
        """
        if count > self.free:
            return None
        taken = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Return the pages of the longest prefix of `keys` in the pool, and hold each of them.

        `keys` is read no further than the first missing key, so it may compute them lazily.
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
        """Let `find` return a full page that a run holds.

        Of two pages with the same key, `find` returns the one that was published first.
        """
        if self._holders[page] < 1:
            raise ValueError(f"page {page} has no holder")
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def release(self, pages: Sequence[int]) -> None:
        """Release a holder's pages, given in the order of its sequence.

        Later pages are evicted first, since a page cannot be found without those before it.
        """
        for page in reversed(pages):
            if self._holders[page] < 1:
                raise ValueError(f"page {page} has no holder")
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
