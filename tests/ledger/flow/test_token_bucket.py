"""Rate limits with bursts."""

from tailrace.ledger.flow.token_bucket import TokenBucket


def test_so_much_a_second_and_more_at_once_after_a_quiet_time() -> None:
    bucket = TokenBucket(rate=2.0, most=3.0, now=0.0)
    assert [bucket.take(1, 0.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert bucket.take(1, 0.5) == 0.0
    assert bucket.take(2, 1.0) == 0.5
    assert [bucket.take(1, 100.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]


def test_what_was_used_already_may_leave_a_debt() -> None:
    bucket = TokenBucket(rate=2.0, most=3.0, now=0.0)
    bucket.charge(7, 0.0)
    assert bucket.take(1, 0.0) == 2.5
    assert bucket.take(1, 2.5) == 0.0


def test_another_rate_holds_from_now_on() -> None:
    bucket = TokenBucket(rate=1.0, most=10.0, now=0.0)
    bucket.set_rate(4.0, 2.0, now=0.0)
    assert [bucket.take(1, 0.0) for _ in range(3)] == [0.0, 0.0, 0.25]
