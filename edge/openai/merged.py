"""Several streams in one response: a stream for each choice of each prompt.

Each stream has its own `StreamReader`, which writes into its own `Lane` of the response. All lanes
share the response's send buffer. The response ends when all streams have ended, or with the first
error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response

from tailrace.edge.generate.encoders import stream_headers
from tailrace.edge.generate.group_encoder import grouped
from tailrace.edge.generate.grouping import Grouping
from tailrace.edge.openai.chunks import (
    AnswerShape,
    ChunkEncoder,
    chunk_head,
    error_events,
    usage,
)
from tailrace.edge.server.deadlines import nothing
from tailrace.edge.server.interfaces import Headers
from tailrace.edge.server.stream_reader import StreamReader
from tailrace.edge.stream_answer import ResponseParts, StreamingAnswer
from tailrace.ledger.errors import TailraceError
from tailrace.ledger.frame import Open, Opened, Resume, StreamEnd

PROMPTS_AT_A_TIME = 8
"""Maximum number of prompts of one request that have open streams at a time. Further prompts wait,
to leave capacity for other requests."""


class MergedAnswer(StreamingAnswer["MergedStreams"]):
    """The response to a request for several streams; `opens` has one Open for each prompt."""

    def __init__(
        self,
        shape: AnswerShape,
        opens: Sequence[Open],
        headers: Mapping[str, str],
        *,
        usage: bool,
        grouping: Grouping | None = None,
    ) -> None:
        """Prepare the response; with `usage` it ends with the token counts of all streams.

        `grouping` says how the text of each stream is grouped, if it is.
        """
        super().__init__(headers)
        self._shape = shape
        self._opens = opens
        self._usage = usage
        self._grouping = grouping

    def source(self, parts: ResponseParts) -> MergedStreams:
        """Return the `ResponseSource` that sends the response."""
        return MergedStreams(
            parts, self._shape, self._opens, usage=self._usage, grouping=self._grouping
        )

    def begin(self, source: MergedStreams) -> None:
        """Send the first prompt to an origin."""
        source.start()


class LaneEncoder(ChunkEncoder):
    """The encoder of one lane's stream, which reports to `MergedStreams` that it is open."""

    lane: Lane
    refused = False

    def opened(self, opened: Opened, head: dict[str, Any] | None = None) -> None:
        """Note that the stream is open. Its chunks get the id and fields of the first stream."""
        super().opened(opened, self.lane.merged.opened(self.lane, opened))

    def refusal(self, error: TailraceError) -> Response:
        """Note that the origin refused this stream; return the error response."""
        self.error, self.refused = error, True
        return super().refusal(error)


class Lane:
    """The `ResponseWriter` of one stream of a response that shows several."""

    def __init__(
        self,
        merged: MergedStreams,
        prompt: int,
        choice: int,
        *,
        usage: bool,
        grouping: Grouping | None = None,
    ) -> None:
        self.merged = merged
        self.prompt = prompt
        self.choice = choice
        self.encoder = LaneEncoder(merged.shape, usage=usage, choice=choice, alone=False)
        self.encoder.lane = self
        parts = merged.parts
        self.reader = StreamReader(
            *(parts.link, parts.batch, parts.deadlines, self),
            *(grouped(self.encoder, grouping), (), nothing, parts.metrics),
        )

    def start(self, status: int, headers: Headers) -> None:
        """Begin the whole response, if this is the first stream and it was not refused."""
        if not self.encoder.refused:
            self.merged.begin()

    def write(self, data: bytes) -> None:
        """Write a piece of the stream into the response.

        The body of an error response is dropped: `MergedStreams` writes the error itself.
        """
        if not self.encoder.refused:
            self.merged.write(data)

    def end(self) -> None:
        """Note that the stream has ended."""
        self.merged.ended(self)

    def reset(self) -> None:
        """Break off the whole response."""
        self.merged.parts.writer.reset()

    def writable_bytes(self) -> int:
        """Return how many bytes the response may write; the lanes share them."""
        return self.merged.parts.writer.writable_bytes()


class MergedStreams:
    """The `ResponseSource` of a response that shows several streams.

    First only the first prompt is sent. When its first stream opens, the number of choices for each
    prompt is known, and the response begins. From then on up to PROMPTS_AT_A_TIME prompts have open
    streams.
    """

    def __init__(
        self,
        parts: ResponseParts,
        shape: AnswerShape,
        opens: Sequence[Open],
        *,
        usage: bool,
        grouping: Grouping | None = None,
    ) -> None:
        self.parts = parts
        self.shape = shape
        self._opens = opens
        self._usage = usage
        self._grouping = grouping
        self._next = 0  # number of the prompt that is sent to an origin next
        self._choices = 1  # number of choices for each prompt
        self._lanes: dict[Lane, None] = {}
        self._ends: dict[int, StreamEnd] = {}
        self._head: dict[str, Any] = {}
        self._first: Opened | None = None
        self._begun = False
        self._closed = False

    def start(self) -> None:
        """Send the first prompt to an origin."""
        if not self._closed:
            self._ask_next()

    def _ask_next(self) -> None:
        prompt, self._next = self._next, self._next + 1
        wanted = self._opens[prompt]
        self._lane(prompt, prompt * self._choices).reader.ask(wanted)

    def _lane(self, prompt: int, choice: int) -> Lane:
        lane = Lane(self, prompt, choice, usage=self._usage, grouping=self._grouping)
        self._lanes[lane] = None
        return lane

    # ---- from the lanes ----

    def opened(self, lane: Lane, opened: Opened) -> dict[str, Any]:
        """Open the streams of a prompt's other choices; return the fields that all chunks have."""
        if self._first is None:
            self._first = opened
            self._choices = 1 + len(opened.siblings)
            self._head = chunk_head(self.shape, opened)
        caller = self._opens[lane.prompt].caller
        for nth, sibling in enumerate(opened.siblings, 1):
            resume = Resume(sibling.stream, token=sibling.token or None, caller=caller)
            self._lane(lane.prompt, lane.choice + nth).reader.ask(resume)
        return self._head

    def begin(self) -> None:
        """Write the response's head at the first call, and send further prompts to origins."""
        if self._begun:
            return
        self._begun = True
        assert self._first is not None
        encoder = ChunkEncoder(self.shape)
        self.parts.start(200, stream_headers(self._first), encoder.media_type)
        while not self._closed and self._next < min(PROMPTS_AT_A_TIME, len(self._opens)):
            self._ask_next()

    def write(self, data: bytes) -> None:
        """Write a piece of one stream into the response."""
        if not self._closed:
            self.parts.writer.write(data)

    def ended(self, lane: Lane) -> None:
        """Note the end of a lane's stream.

        After the last stream of a prompt, send the next prompt to an origin. After the last stream
        of all prompts, end the response.
        """
        self._lanes.pop(lane, None)
        if self._closed:
            return
        if lane.encoder.error is not None:
            self._fail(lane.encoder.error)
            return
        if lane.encoder.end is not None:
            self._ends[lane.choice] = lane.encoder.end
        if any(other.prompt == lane.prompt for other in self._lanes):
            return
        if self._next < len(self._opens):
            self._ask_next()
        elif not self._lanes:
            self._finish()

    def _finish(self) -> None:
        assert self._first is not None
        in_order = [end for _, end in sorted(self._ends.items())]
        last = ChunkEncoder(self.shape, usage=self._usage, alone=False)
        last.opened(self._first, self._head)
        used = usage(in_order, len(self._opens)) if self._usage else None
        self.parts.writer.write(last.ending(used))
        self._end()

    def _fail(self, error: TailraceError) -> None:
        """End the response with the error of one stream; stop reading the others."""
        self._detach()
        if self._begun:
            self.parts.writer.write(error_events(error, self.shape.path))
        else:
            self.parts.refuse(ChunkEncoder(self.shape).refusal(error))
        self._end()

    def _end(self) -> None:
        self._closed = True
        self.parts.done()
        self.parts.writer.end()

    def _detach(self) -> None:
        self._closed = True
        lanes, self._lanes = self._lanes, {}
        for lane in lanes:
            lane.reader.disconnected()

    # ---- from the writer ----

    def drained(self) -> None:
        """Let all streams write again, each time beginning with another stream for fairness."""
        if self._lanes:
            first = next(iter(self._lanes))
            self._lanes[first] = self._lanes.pop(first)
        for lane in self._lanes:
            lane.reader.drained()

    def disconnected(self) -> None:
        """Detach from all streams because the client has left; the streams continue to run."""
        if not self._closed:
            self._detach()
            self.parts.done()
