"""How far a client has read one stream, whatever connections it took.

Sans-I/O: fed the bytes of frame bodies, gives each logged frame once and in order.
"""

from __future__ import annotations

from ledger.errors import FrameError, TailraceError, Unavailable
from ledger.frame import (
    Frame,
    Heartbeat,
    Logged,
    Splitter,
    Status,
    StreamEnd,
    StreamError,
    StreamState,
    decode,
    to_error,
)


class Position:
    """`next_index` is the index due next; `ended` is set when there is no more to come.

    `fault` is what ended the connection's bytes for good: the error that a StreamError
    tells of, or a retryable one for bytes that are no frames or that leave out an index.
    """

    def __init__(self, after: int | None = None) -> None:
        self.next_index = 0 if after is None else after + 1
        self.ended = False
        self.fault: TailraceError | None = None
        self._splitter = Splitter()

    @property
    def after(self) -> int | None:
        """The index to resume after."""
        return self.next_index - 1 if self.next_index else None

    def reconnect(self) -> None:
        """A new connection begins: what the last one left unfinished is void."""
        self.fault = None
        self._splitter = Splitter()

    def rewind(self, next_index: int) -> None:
        """Read again from an earlier index."""
        self.next_index = next_index
        self.ended = False

    def feed(self, data: bytes) -> list[Logged]:
        """The frames that `data` completes, without those read before, up to a `fault`."""
        logged: list[Logged] = []
        try:
            for raw in self._splitter.feed(data):
                _, frame = decode(raw)
                if isinstance(frame, Logged):
                    if self._advance(frame):
                        logged.append(frame)
                else:
                    self._note(frame)
        except FrameError as error:
            self.fault = Unavailable(f"a broken body: {error}", code="bad_frame")
        except TailraceError as error:
            self.fault = error
        return logged

    def _advance(self, frame: Logged) -> bool:
        """Whether the frame is the one that is due, not one that was read before."""
        if frame.index > self.next_index:
            raise Unavailable(
                f"frame {frame.index} came where {self.next_index} was due", code="frames_missing"
            )
        if frame.index < self.next_index:
            return False
        self.next_index += 1
        self.ended = isinstance(frame, StreamEnd)
        return True

    def _note(self, frame: Frame) -> None:
        """A frame that is no part of the stream itself."""
        if isinstance(frame, StreamError):
            raise to_error(frame)
        if isinstance(frame, Status):
            self.ended = frame.state is StreamState.ENDED
        elif not isinstance(frame, Heartbeat):
            name = type(frame).__name__
            raise Unavailable(f"{name} in the body of a stream", code="bad_frame")
