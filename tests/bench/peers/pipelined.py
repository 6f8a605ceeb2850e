"""Peers that take many frames in one write to a socket."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from tests.bench.bench_ledger_work import Batch, Replayer, Sample, timed_steps
from tests.bench.peers.server import Server


class Pipelined(Replayer):
    """A peer whose clients write requests in a pipeline and compare the replies as bytes."""

    load_frames: int
    """Frames per write while a long stream is loaded."""
    _server: Server | None = None

    @abstractmethod
    def _step(self, entries: list[tuple[int, int]]) -> Callable[[], None]:
        """Build the requests for these (stream, index) now; return the function that sends them."""

    def append(self, batch: Batch) -> Sample:
        steps = [
            self._step([(number, index) for number in batch.numbers])
            for index in range(batch.steps)
        ]
        return timed_steps(steps, batch.streams * batch.steps)

    def load(self, number: int, count: int) -> None:
        for start in range(0, count, self.load_frames):
            some = range(start, min(start + self.load_frames, count))
            self._step([(number, index) for index in some])()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
