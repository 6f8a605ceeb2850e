"""A turn flushes what it touched once, and what that touches, whatever one of them does, and times
one read in a few."""

from itertools import count

from tailrace.edge.server.outlet import FLUSHED_TOGETHER, READS_A_TIMED_ONE, Turn


class Noted:
    """Writes its name down when it is flushed; touches `then`, or fails."""

    def __init__(
        self,
        turn: Turn,
        name: str,
        log: list[str],
        then: "Noted | None" = None,
        fails: bool = False,
        sends: "Noted | None" = None,
    ) -> None:
        self._turn, self._name, self._log = turn, name, log
        self._then, self._fails, self._sends = then, fails, sends

    def flush(self) -> None:
        self._log.append(self._name)
        if self._then is not None:
            self._turn.touch(self._then)
            self._turn.flush()  # within another flush: it is that one's to go on
        if self._sends is not None:
            self._turn.sending.append(self._sends)
        if self._fails:
            raise RuntimeError("a fault of one client's")


def test_streams_that_share_a_connection_are_flushed_before_it_and_it_once() -> None:
    turn, log = Turn(), list[str]()
    connection = Noted(turn, "connection", log)
    streams = [Noted(turn, f"stream {n}", log, then=connection) for n in range(2)]
    for stream in [*streams, streams[0]]:
        turn.touch(stream)
    turn.flush()
    assert log == ["stream 0", "stream 1", "connection"]
    turn.flush()
    assert len(log) == 3


def test_a_fault_of_one_keeps_the_others_from_nothing() -> None:
    turn, log = Turn(), list[str]()
    for name in ("first", "second"):
        turn.touch(Noted(turn, name, log, fails=name == "first"))
    turn.flush()
    turn.touch(Noted(turn, "third", log))
    turn.flush()
    assert log == ["first", "second", "third"]


def test_a_few_are_flushed_and_then_what_they_have_written_is_sent() -> None:
    turn, log = Turn(), list[str]()
    for n in range(FLUSHED_TOGETHER + 1):
        transport = Noted(turn, "sent", log, fails=n == 0)
        turn.touch(Noted(turn, "made", log, sends=transport))
    turn.flush()
    assert log == [*["made"] * FLUSHED_TOGETHER, *["sent"] * FLUSHED_TOGETHER, "made", "sent"]
    assert not turn.sending


def test_one_read_in_a_few_is_timed_of_those_that_bring_something() -> None:
    ticks, timed = count(1), list[tuple[float, int]]()
    turn = Turn(clock_s=lambda: float(next(ticks)), wrote=lambda *each: timed.append(each))
    for writes in [0, *range(1, READS_A_TIMED_ONE + 2)]:
        turn.begin()
        turn.writes += writes
        turn.flush()
    assert timed == [(1, 1), (1, READS_A_TIMED_ONE + 1)]


def test_what_had_to_wait_is_timed_whenever_it_leaves() -> None:
    ticks, timed = count(1), list[tuple[float, int]]()
    turn = Turn(clock_s=lambda: float(next(ticks)), wrote=lambda *each: timed.append(each))
    turn.begin()
    turn.writes += 1
    came_s = turn.since()
    turn.flush()
    turn.begin()
    held_s = turn.since()  # of a read that is not timed
    turn.flush()
    turn.late += [came_s, held_s]
    turn.flush()
    assert timed == [(1, 1), (3, 1), (1, 1)]
