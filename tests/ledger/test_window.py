from hypothesis import given
from hypothesis import strategies as st

from ledger.window import MAX_CREDIT_FRAMES, READ_FRAMES, Window


def test_a_reader_is_sent_no_more_than_its_credit() -> None:
    reader = Window.starting(10, 5)
    assert reader.wanted(released=100) == 5
    reader.next += 5
    assert reader.wanted(released=100) == 0


def test_credit_is_absolute_and_never_shrinks() -> None:
    reader = Window.starting(0, 4)
    reader.grant(8)
    reader.grant(6)
    reader.grant(8)
    assert reader.wanted(released=100) == 8


def test_a_reader_at_the_tip_wants_nothing_until_more_is_released() -> None:
    reader = Window.starting(3, 100)
    assert reader.wanted(released=3) == 0
    assert reader.wanted(released=4) == 1


def test_no_client_can_ask_for_unbounded_credit() -> None:
    reader = Window.starting(0, 2**63)
    reader.grant(2**63)
    assert reader.limit == MAX_CREDIT_FRAMES


def test_credit_is_renewed_when_half_of_it_is_used() -> None:
    reader = Window.starting(10, 8, most=8)
    reader.next += 3
    assert reader.renew() is None
    reader.next += 1
    assert (reader.renew(), reader.limit) == (22, 22)
    assert reader.renew() is None


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2000)), max_size=60))
def test_every_index_is_sent_once_in_order_whatever_credit_and_releases_do(
    moves: list[tuple[bool, int]],
) -> None:
    reader, released, seen = Window.starting(0, 0), 0, list[int]()
    for is_credit, amount in moves:
        if is_credit:
            reader.grant(amount)
        else:
            released += amount
        while (wanted := reader.wanted(released)) > 0:
            assert wanted <= READ_FRAMES
            seen += range(reader.next, reader.next + wanted)
            reader.next += wanted
    assert seen == list(range(min(released, reader.limit)))
