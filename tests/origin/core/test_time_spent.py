"""Where the time of a stream goes: phases that add up, and the parts of them."""

from __future__ import annotations

from tailrace.origin.core.time_spent import CommitTime, TimeSpent


def test_the_phases_follow_one_another_and_add_up() -> None:
    time, commits = TimeSpent(10.0), CommitTime()
    assert time.parts(11.5) == {"queue": 1.5, "prefill": 0, "decode": 0, "ledger": 0, "reader": 0}
    time.placed(12.0, commits, is_begun=False)
    time.begun(15.0)
    assert time.parts(15.25) == {"queue": 2, "prefill": 3, "decode": 0.25, "ledger": 0, "reader": 0}
    time.queued(16.0)  # its worker was lost
    time.queued(17.0)
    time.placed(18.0, commits, is_begun=True)
    time.ended(20.0)
    whole = {"queue": 4, "prefill": 3, "decode": 3, "ledger": 0, "reader": 0}
    assert time.parts(20.0) == time.parts(99.0) == whole


def test_only_commits_while_the_stream_is_on_the_worker_count() -> None:
    time, one, other = TimeSpent(), CommitTime(5.0), CommitTime(2.0)
    time.placed(0.0, one, is_begun=False)
    one.seconds += 0.25
    other.seconds += 9.0
    assert time.parts(1.0)["ledger"] == 0.25
    time.queued(1.0)
    one.seconds += 3.0
    time.placed(2.0, other, is_begun=True)
    other.seconds += 0.5
    time.ended(3.0)
    other.seconds += 3.0
    assert time.parts(3.0)["ledger"] == 0.75


def test_only_time_after_the_first_reader_is_lost_for_want_of_credit() -> None:
    time = TimeSpent()
    assert time.parts(2.0)["reader"] == 0
    time.read(2.0, is_read=True)
    assert time.parts(3.0)["reader"] == 0
    time.read(3.0, is_read=False)
    assert time.parts(4.0)["reader"] == 1
    time.read(5.0, is_read=True)
    time.read(7.0, is_read=False)
    time.ended(8.0)
    time.read(9.0, is_read=False)  # the reader leaves after the end
    assert time.parts(20.0)["reader"] == 3
