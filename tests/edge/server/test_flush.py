"""A batch flushes what is dirty once, and what that makes dirty, whatever one of them does."""

from itertools import count

from tailrace.edge.flush import FLUSHED_TOGETHER, READS_PER_SAMPLE, FlushBatch


class Noted:
    """Writes its name down when it is flushed; touches `then`, or fails."""

    def __init__(
        self,
        batch: FlushBatch,
        name: str,
        log: list[str],
        then: "Noted | None" = None,
        fails: bool = False,
        sends: "Noted | None" = None,
    ) -> None:
        self._batch, self._name, self._log = batch, name, log
        self._then, self._fails, self._sends = then, fails, sends

    def flush(self) -> None:
        self._log.append(self._name)
        if self._then is not None:
            self._batch.mark_dirty(self._then)
            self._batch.flush()  # within another flush: it is that one's to go on
        if self._sends is not None:
            self._batch.pending_writes.append(self._sends)
        if self._fails:
            raise RuntimeError("a fault of one client's")


def test_streams_that_share_a_connection_are_flushed_before_it_and_it_once() -> None:
    batch, log = FlushBatch(), list[str]()
    connection = Noted(batch, "connection", log)
    streams = [Noted(batch, f"stream {n}", log, then=connection) for n in range(2)]
    for stream in [*streams, streams[0]]:
        batch.mark_dirty(stream)
    batch.flush()
    assert log == ["stream 0", "stream 1", "connection"]
    batch.flush()
    assert len(log) == 3


def test_a_fault_of_one_keeps_the_others_from_nothing() -> None:
    batch, log = FlushBatch(), list[str]()
    for name in ("first", "second"):
        batch.mark_dirty(Noted(batch, name, log, fails=name == "first"))
    batch.flush()
    batch.mark_dirty(Noted(batch, "third", log))
    batch.flush()
    assert log == ["first", "second", "third"]


def test_a_few_are_flushed_and_then_what_they_have_written_is_sent() -> None:
    batch, log = FlushBatch(), list[str]()
    for n in range(FLUSHED_TOGETHER + 1):
        transport = Noted(batch, "sent", log, fails=n == 0)
        batch.mark_dirty(Noted(batch, "made", log, sends=transport))
    batch.flush()
    assert log == [*["made"] * FLUSHED_TOGETHER, *["sent"] * FLUSHED_TOGETHER, "made", "sent"]
    assert not batch.pending_writes


def test_one_read_in_a_few_is_timed_of_those_that_bring_something() -> None:
    ticks, timed = count(1), list[float]()
    batch = FlushBatch(clock_s=lambda: float(next(ticks)), observe=timed.append)
    for brings in [False, *[True] * (READS_PER_SAMPLE + 1)]:
        batch.begin()
        if brings:
            batch.mark_dirty(Noted(batch, "stream", []))
        batch.flush()
    assert timed == [1.0, 1.0]
