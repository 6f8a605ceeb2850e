"""A turn flushes what it touched once, and what that touches, whatever one of them does."""

from edge.server.outlet import Turn


class Noted:
    """Writes its name down when it is flushed; touches `then`, or fails."""

    def __init__(
        self,
        turn: Turn,
        name: str,
        log: list[str],
        then: "Noted | None" = None,
        fails: bool = False,
    ) -> None:
        self._turn, self._name, self._log = turn, name, log
        self._then, self._fails = then, fails

    def flush(self) -> None:
        self._log.append(self._name)
        if self._then is not None:
            self._turn.touch(self._then)
            self._turn.flush()  # within another flush: it is that one's to go on
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
