"""A reader's credit, in frames and in bytes."""

from hypothesis import given
from hypothesis import strategies as st

from tailrace.ledger.flow.credit_window import MAX_CREDIT_FRAMES, READ_FRAMES, Window


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
    assert not reader.renew(100)
    reader.next += 1
    assert (reader.renew(100), reader.limit, reader.limit_bytes) == (True, 22, 100)
    assert not reader.renew(100)
    reader.passed(1, 50)
    assert (reader.renew(100), reader.limit, reader.limit_bytes) == (True, 23, 150)


def test_bytes_of_credit_are_exceeded_by_one_frame_at_most() -> None:
    reader = Window.starting(0, 100, credit_bytes=25)
    frames = [bytes(10)] * 50
    assert reader.wanted(released=50) > 0
    assert reader.passing(frames) == frames[:3]
    assert (reader.open, reader.wanted(released=50)) == (False, 0)
    reader.grant(100, 25)
    assert not reader.open
    reader.grant(100, 31)
    assert reader.passing(frames[: reader.wanted(released=50)]) == frames[:1]


def test_no_more_is_fetched_than_will_fit_when_frames_are_large() -> None:
    reader = Window.starting(0, 100, credit_bytes=1)
    reader.passing([bytes(1 << 18)])
    reader.grant(100, (1 << 18) + (1 << 14))
    assert reader.wanted(released=100) == 1


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
