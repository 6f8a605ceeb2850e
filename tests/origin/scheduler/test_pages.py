"""The pool of KV pages against a model of it: lists and sets, no cleverness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tailrace.kernels.shapes import PAGE_TOKENS
from tailrace.origin.scheduler.pages import PagePool, page_key

IDS = tuple(range(PAGE_TOKENS))


def taken(pool: PagePool, count: int) -> list[int]:
    pages = pool.take(count)
    assert pages is not None
    return pages


def key(number: int) -> bytes:
    return page_key(number.to_bytes(4), IDS, 0)


def cached(pool: PagePool, *numbers: int) -> list[int]:
    """Pages with these keys that were let go."""
    pages = taken(pool, len(numbers))
    for page, number in zip(pages, numbers, strict=True):
        pool.publish(page, key(number))
    pool.release(pages)
    return pages


def test_a_key_follows_from_the_page_before_the_ids_and_how_they_were_computed() -> None:
    other = (*IDS[:-1], 99)
    keys = [
        page_key(b"", IDS, 64),
        page_key(b"", IDS, 63),
        page_key(b"", other, 64),
        page_key(page_key(b"", IDS, 64), IDS, 64),
        page_key(page_key(b"", other, 64), IDS, 64),
    ]
    assert len(set(keys)) == len(keys)
    assert keys[0] == page_key(b"", list(IDS), 64)
    assert {len(each) for each in keys} == {32}


@pytest.mark.parametrize("count", [0, 63, 65])
def test_a_page_that_is_not_full_has_no_key(count: int) -> None:
    with pytest.raises(ValueError, match="ids"):
        page_key(b"", [1] * count, 0)


def test_ids_beyond_32_bits_have_keys_of_their_own() -> None:
    assert page_key(b"", [1] * 64, 0) != page_key(b"", [1 + (1 << 32)] * 64, 0)


def test_a_pool_without_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="pages"):
        PagePool(0)


def test_finding_stops_at_the_first_missing_page_and_computes_no_key_beyond_it() -> None:
    pool = PagePool(4)
    pages = cached(pool, 1, 2, 4)
    asked = []

    def keys() -> Iterator[bytes]:
        for number in range(1, 6):
            asked.append(number)
            yield key(number)

    assert pool.find(keys()) == pages[:2]
    assert asked == [1, 2, 3]


def test_what_nobody_holds_can_be_neither_published_nor_let_go() -> None:
    pool = PagePool(1)
    with pytest.raises(ValueError, match="page 0 has no holder"):
        pool.publish(0, key(1))
    pages = taken(pool, 1)
    pool.release(pages)
    with pytest.raises(ValueError, match="page 0 has no holder"):
        pool.release(pages)


class Pool(RuleBasedStateMachine):
    """Holders take, find, publish and let go; a plain account of it must agree at every moment."""

    @initialize(pages=st.integers(1, 6))
    def begin(self, pages: int) -> None:
        self.pool = PagePool(pages)
        self.holders: list[list[int]] = []
        self.published: dict[bytes, int] = {}
        self.idle: list[int] = []  # published pages without a holder, longest released first

    @property
    def held(self) -> Counter[int]:
        return Counter(page for pages in self.holders for page in pages)

    @rule(count=st.integers(0, 4))
    def take(self, count: int) -> None:
        empty = self.pool.pages - len(self.held) - len(self.idle)
        pages = self.pool.take(count)
        if count > empty + len(self.idle):
            assert pages is None
            return
        assert pages is not None and len(set(pages)) == count
        assert not self.held.keys() & set(pages)
        evicted = self.idle[: max(count - empty, 0)]
        assert set(evicted) == set(self.idle) & set(pages)
        del self.idle[: len(evicted)]
        self.published = {k: page for k, page in self.published.items() if page not in evicted}
        self.holders.append(pages)

    @rule(numbers=st.lists(st.integers(0, 5), max_size=4, unique=True))
    def find(self, numbers: list[int]) -> None:
        expected = []
        for number in numbers:
            if key(number) not in self.published:
                break
            expected.append(self.published[key(number)])
        assert self.pool.find(map(key, numbers)) == expected
        self.idle = [page for page in self.idle if page not in expected]
        self.holders.append(expected)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), number=st.integers(0, 5))
    def publish(self, data: st.DataObject, number: int) -> None:
        page = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.publish(page, key(number))
        if key(number) not in self.published and page not in self.published.values():
            self.published[key(number)] = page

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.release(pages)
        for page in reversed(pages):
            if page not in self.held and page in self.published.values():
                self.idle.append(page)

    @invariant()
    def account(self) -> None:
        held = self.held
        assert [self.pool.holders(p) for p in range(self.pool.pages)] == [
            held[p] for p in range(self.pool.pages)
        ]
        assert self.pool.free == self.pool.pages - len(held)
        assert self.pool.cached == len(self.idle)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30)
