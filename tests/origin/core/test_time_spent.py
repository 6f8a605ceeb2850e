"""Where the time of a stream goes: phases that add up, and the parts of them."""

from __future__ import annotations

from tailrace.origin.core.time_spent import CommitTime, ReaderWait, TimeSpent

NO_WAITS = {"batch": 0, "ledger": 0, "relay": 0, "away": 0}


def test_the_phases_follow_one_another_and_add_up() -> None:
    time, commits = TimeSpent(10.0), CommitTime()
    assert time.parts(11.5) == {"queue": 1.5, "prefill": 0, "decode": 0} | NO_WAITS
    time.placed(12.0, commits, is_begun=False)
    time.begun(15.0)
    assert time.parts(15.25) == {"queue": 2, "prefill": 3, "decode": 0.25} | NO_WAITS
    time.queued(16.0)  # its worker was lost
    time.queued(17.0)
    time.placed(18.0, commits, is_begun=True)
    time.ended(20.0)
    whole = {"queue": 4, "prefill": 3, "decode": 3} | NO_WAITS
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


def test_waits_for_the_batches_of_all_workers_add_up() -> None:
    time, commits = TimeSpent(), CommitTime()
    time.placed(0.0, commits, is_begun=False)
    time.waited_for_batch(0.5)
    time.waited_for_batch(0.75)
    assert time.parts(1.0)["batch"] == 0.75
    time.queued(2.0)
    time.placed(3.0, commits, is_begun=True)
    time.waited_for_batch(0.25)
    assert time.parts(4.0)["batch"] == 1
    time.ended(4.0)
    assert time.parts(9.0)["batch"] == 1


def test_only_time_after_the_first_reader_is_lost_for_want_of_one() -> None:
    time = TimeSpent()
    assert time.parts(2.0)["away"] == 0
    time.readers_changed(2.0, None)
    assert time.parts(3.0)["away"] == 0
    time.readers_changed(3.0, ReaderWait.AWAY)
    assert time.parts(4.0)["away"] == 1
    time.readers_changed(5.0, None)
    time.readers_changed(7.0, ReaderWait.AWAY)
    time.ended(8.0)
    time.readers_changed(9.0, ReaderWait.AWAY)  # the reader leaves after the end
    assert time.parts(20.0) == {"queue": 8, "prefill": 0, "decode": 0} | NO_WAITS | {"away": 3}


def test_readers_without_credit_and_no_readers_are_told_apart() -> None:
    time = TimeSpent()
    time.readers_changed(1.0, ReaderWait.RELAY)
    time.readers_changed(3.0, ReaderWait.RELAY)  # another reader has come, without credit too
    time.readers_changed(4.0, ReaderWait.AWAY)
    assert (time.parts(4.5)["relay"], time.parts(4.5)["away"]) == (3, 0.5)
    time.readers_changed(5.0, ReaderWait.RELAY)
    assert (time.parts(5.5)["relay"], time.parts(5.5)["away"]) == (3.5, 1)
    time.readers_changed(6.0, None)
    assert (time.parts(9.0)["relay"], time.parts(9.0)["away"]) == (4, 1)
