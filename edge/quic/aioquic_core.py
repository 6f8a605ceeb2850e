"""The core on aioquic. Beside it only `aioquic_connection.py` and `aioquic_packets.py` import that,
and touch what is private there.

Requests' fields are bounded, and QPACK has no dynamic table for them: nothing can be blocked, and
nothing that is small on the wire is large here. Nor has it one for responses.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pylsqpack
from aioquic._buffer import Buffer
from aioquic.buffer import encode_uint_var
from aioquic.h3.connection import (
    H3_ALPN,
    ErrorCode,
    FrameType,
    H3Connection,
    HeadersState,
    Setting,
    encode_frame,
)
from aioquic.h3.events import DataReceived, H3Event, HeadersReceived
from aioquic.quic import events as quic
from aioquic.quic.configuration import SMALLEST_MAX_DATAGRAM_SIZE, QuicConfiguration
from aioquic.quic.connection import (
    END_STATES,
    TRANSPORT_CLOSE_FRAME_CAPACITY,
    stream_is_client_initiated,
    stream_is_unidirectional,
)
from aioquic.quic.crypto import CryptoPair
from aioquic.quic.packet import (
    QuicErrorCode,
    QuicFrameType,
    QuicPacketType,
    QuicProtocolVersion,
    encode_quic_retry,
    encode_quic_version_negotiation,
    pull_quic_header,
)
from aioquic.quic.packet_builder import QuicPacketBuilder
from aioquic.quic.retry import QuicRetryTokenHandler
from aioquic.tls import SessionTicket

from tailrace.edge.quic.aioquic_connection import AioquicConnection
from tailrace.edge.quic.core import (
    CONNECTION_WINDOW_BYTES,
    IDLE_TIMEOUT_S,
    MAX_HEADER_BYTES,
    MAX_HELD_BYTES,
    STREAM_WINDOW_BYTES,
    Address,
    Asked,
    Came,
    Code,
    Datagrams,
    Ended,
    Established,
    Event,
    Headers,
    Issued,
    Left,
    Retired,
    Stray,
    TooLong,
)
from tailrace.edge.quic.stateless_reset import StatelessResets

CONNECTION_ID_BYTES = 8
FIELD_OVERHEAD_BYTES = 32
"""What a field counts beside its name and value (RFC 9114, 4.2.2)."""
FULL_DATAGRAM_BYTES = 1000
"""A datagram from so many bytes on is one of many, and its client waits to hear of it."""
MAX_SESSION_TICKETS = 4096
"""Kept for clients that come again; the oldest go first."""
MIN_INITIAL_CID_BYTES = 8
"""RFC 9000, 7.2"""

VERSIONS = (QuicProtocolVersion.VERSION_1, QuicProtocolVersion.VERSION_2)


class _Encoder:
    """QPACK of responses without a dynamic table, of which a client would acknowledge each use:
    a packet of its own, and one that acknowledges it, for the hundred bytes of a head."""

    def __init__(self) -> None:
        encoder = pylsqpack.Encoder()
        self.encode, self.feed_decoder = encoder.encode, encoder.feed_decoder

    def apply_settings(self, **_settings: int) -> bytes:
        return b""


class _Http3(H3Connection):
    def _init_connection(self) -> None:
        self._encoder = _Encoder()  # type: ignore[assignment]
        self._max_table_capacity = self._blocked_streams = 0
        self._decoder = pylsqpack.Decoder(0, 0)
        super()._init_connection()

    def _get_local_settings(self) -> dict[int, int]:
        return {
            Setting.QPACK_MAX_TABLE_CAPACITY: 0,
            Setting.QPACK_BLOCKED_STREAMS: 0,
            Setting.MAX_FIELD_SECTION_SIZE: MAX_HEADER_BYTES,
            Setting.DUMMY: 1,
        }

    def go_away(self, stream_id: int) -> None:
        assert self._local_control_stream_id is not None
        self._quic.send_stream_data(
            self._local_control_stream_id,
            encode_frame(FrameType.GOAWAY, encode_uint_var(stream_id)),
        )


class AioquicCore:
    """A `Core`."""

    def __init__(self, connection: AioquicConnection) -> None:
        self._quic = connection
        self._http3: _Http3 | None = None
        self._events: list[Event] = []
        self._sending: set[int] = set()  # streams whose response is not whole
        self._deaf: set[int] = set()  # streams of which nothing more is wanted
        self._unread: dict[int, int] = {}  # bytes of bodies that nobody has read
        self._all_unread = 0
        self._fresh = 0  # bytes of all responses since the last datagrams
        self._taken = 0  # bytes of all streams, in order
        self._next_stream = 0  # the first that the client has not opened
        self.cids: Sequence[bytes] = (
            connection.original_destination_connection_id,
            connection.host_cid,
        )

    # ---- the connection ----

    @property
    def closing(self) -> bool:
        return self._quic._close_pending or self._quic._state in END_STATES

    def receive(self, datagram: bytes, address: Address, now: float) -> None:
        self._quic.receive_datagram(datagram, address, now)
        if len(datagram) >= FULL_DATAGRAM_BYTES:
            self._quic.acknowledge(now)
        self._take_events()

    def expire(self, now: float) -> None:
        self._quic.handle_timer(now)
        self._take_events()

    def timer(self) -> float | None:
        at: float | None = self._quic.get_timer()
        return at

    def events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def datagrams(self, now: float) -> Datagrams:
        if not self._quic._network_paths:
            return []
        datagrams: Datagrams = self._quic.datagrams_to_send(now)
        self._fresh = 0
        if self._quic._events:  # connection ids that were sent are in use
            self._take_events()
        return datagrams

    def go_away(self) -> None:
        if self._http3 is not None:
            self._http3.go_away(self._next_stream)

    def close(self, code: Code, reason: str = "") -> None:
        self._quic.close(code, reason_phrase=reason)

    # ---- responses ----

    def start(self, stream: int, headers: Headers) -> None:
        if stream in self._sending and self._http3 is not None:
            block = self._http3._encode_headers(stream, list(headers))
            self._quic.send_stream_data(stream, b"\1" + encode_uint_var(len(block)) + block)

    def write(self, stream: int, data: bytes) -> None:
        if data and stream in self._sending:
            self._fresh += len(data)
            self._quic.send_stream_data(stream, b"\0" + encode_uint_var(len(data)) + data)

    def end(self, stream: int) -> None:
        if stream in self._sending and self._http3 is not None:
            self._sending.remove(stream)
            self._all_unread -= self._unread.pop(stream, 0)
            self._quic.send_stream_data(stream, b"", end_stream=True)
            with self._http3._get_or_create_stream(stream) as half:
                half.finish_sending()
            if stream in self._deaf:
                self._http3._stream.pop(stream, None)

    def reset(self, stream: int, code: Code) -> None:
        if stream in self._sending:
            self._sending.remove(stream)
            self._quic.reset_stream(stream, code)
            self._forget(stream, code)

    def stop(self, stream: int) -> None:
        self._forget(stream, Code.NO_ERROR)

    def room(self, stream: int, unsent_bytes: int) -> int:
        found = self._quic._streams.get(stream)
        if found is None or stream not in self._sending:
            return 0
        sender = found.sender
        unsent: int = sender._buffer_stop - sender.highest_offset
        held: int = sender._buffer_stop - sender._buffer_start
        leaves = self._quic.leaves_at_once(found) - max(0, self._fresh - unsent)
        return min(unsent_bytes + max(0, leaves) - unsent, MAX_HELD_BYTES - held)

    def consumed(self, stream: int, size: int) -> None:
        unread = self._unread.get(stream)
        if unread is not None:
            self._unread[stream] = unread - size
            self._all_unread -= size
            self._grant(stream)

    def _forget(self, stream: int, code: Code) -> None:
        """Nothing more of a request is wanted; what of it still comes is dropped."""
        self._all_unread -= self._unread.pop(stream, 0)
        if stream in self._deaf:
            return
        found = self._quic._streams.get(stream)
        if found is not None and not found.receiver.is_finished:
            self._quic.stop_stream(stream, code)
            self._deaf.add(stream)
        if self._http3 is not None:
            self._http3._stream.pop(stream, None)

    # ---- what comes ----

    def _take_events(self) -> None:
        while (event := self._quic.next_event()) is not None:
            if isinstance(event, quic.StreamDataReceived):
                self._taken += len(event.data)
                self._of_stream(event, event.end_stream)
            elif isinstance(event, quic.StreamReset):
                receiver = self._quic._streams[event.stream_id].receiver
                self._taken += receiver.highest_offset - receiver.starting_offset()
                self._of_stream(event, True)
                self._left(event.stream_id)
            elif isinstance(event, quic.StopSendingReceived):
                self._of_stream(event, False)
                self._left(event.stream_id)
            elif isinstance(event, quic.ProtocolNegotiated):
                self._http3 = _Http3(self._quic)
            elif isinstance(event, quic.HandshakeCompleted):
                self._quic.established()
                self._events.append(Established())
            elif isinstance(event, quic.ConnectionIdIssued):
                self._events.append(Issued(event.connection_id))
            elif isinstance(event, quic.ConnectionIdRetired):
                self._events.append(Retired(event.connection_id))
            elif isinstance(event, quic.ConnectionTerminated):
                self._events.append(Ended(event.reason_phrase or hex(event.error_code)))

    def _of_stream(self, event: Any, ended: bool) -> None:
        """What HTTP/3 makes of an event of one stream."""
        stream = event.stream_id
        if stream in self._deaf:
            if ended:
                self._deaf.remove(stream)
            else:
                self._grant(stream)
            return
        if self._http3 is None:
            return
        asked = not stream_is_unidirectional(stream) and stream_is_client_initiated(stream)
        if asked:
            self._next_stream = max(self._next_stream, stream + 4)
        for each in self._http3.handle_event(event):
            self._of_request(each)
        if asked and not ended:
            self._bound(stream)
            self._grant(stream)

    def _of_request(self, event: H3Event) -> None:
        if isinstance(event, HeadersReceived):
            stream = event.stream_id
            if stream in self._unread:  # trailers, of which no route wants any
                if event.stream_ended:
                    self._events.append(Came(stream, b"", True))
            else:
                self._ask(stream, event.headers, event.stream_ended)
        elif isinstance(event, DataReceived) and event.stream_id in self._unread:
            self._unread[event.stream_id] += len(event.data)
            self._all_unread += len(event.data)
            self._events.append(Came(event.stream_id, event.data, event.stream_ended))

    def _ask(self, stream: int, headers: Headers, ended: bool) -> None:
        if self._quic._streams[stream].sender._reset_error_code is not None:
            return  # the client wants no answer
        self._sending.add(stream)
        size = sum(len(name) + len(value) + FIELD_OVERHEAD_BYTES for name, value in headers)
        if size > MAX_HEADER_BYTES:
            self._too_long(stream)
            return
        self._unread[stream] = 0
        self._quic.grant_control()
        self._events.append(Asked(stream, headers, ended))

    def _bound(self, stream: int) -> None:
        """aioquic keeps a HEADERS frame until it is whole, and copies it for each piece."""
        assert self._http3 is not None
        half = self._http3._stream.get(stream)
        if half is None or half.frame_type != FrameType.HEADERS or half.frame_size is None:
            return
        if half.frame_size <= MAX_HEADER_BYTES:
            return
        if half.headers_recv_state is HeadersState.INITIAL:
            self._sending.add(stream)
            self._too_long(stream)
        else:
            self._quic.close(ErrorCode.H3_EXCESSIVE_LOAD, reason_phrase="trailers are too long")

    def _too_long(self, stream: int) -> None:
        self._forget(stream, Code.NO_ERROR)
        self._events.append(TooLong(stream))

    def _left(self, stream: int) -> None:
        if stream in self._sending:
            self._sending.remove(stream)
            self._quic.reset_stream(stream, Code.REQUEST_CANCELLED)
            self._forget(stream, Code.REQUEST_CANCELLED)
            self._events.append(Left(stream))

    def _grant(self, stream: int) -> None:
        self._quic.grant_stream(stream, self._unread.get(stream, 0))
        self._quic.grant(self._taken + CONNECTION_WINDOW_BYTES - self._all_unread)


class AioquicCores:
    """`Cores` for one certificate; `mark` is the first byte of every connection id."""

    cid_bytes = CONNECTION_ID_BYTES

    def __init__(
        self,
        certificate: Path,
        key: Path,
        mark: int | None = None,
        secret: bytes | None = None,
    ) -> None:
        """`secret` makes stateless reset tokens; without one the certificate's key does."""
        self._mark = mark
        self._secret = secret
        self._retries = QuicRetryTokenHandler()
        self._tickets: OrderedDict[bytes, SessionTicket] = OrderedDict()
        self.load(certificate, key)

    def load(self, certificate: Path, key: Path) -> None:
        configuration = QuicConfiguration(
            alpn_protocols=H3_ALPN,
            connection_id_length=CONNECTION_ID_BYTES,
            idle_timeout=IDLE_TIMEOUT_S,
            is_client=False,
            max_data=CONNECTION_WINDOW_BYTES,
            max_stream_data=STREAM_WINDOW_BYTES,
            supported_versions=list(VERSIONS),
        )
        configuration.load_cert_chain(certificate, key)
        self._configuration = configuration
        self._resets = StatelessResets(self._secret or key.read_bytes())

    def accept(self, original_cid: bytes, retried_cid: bytes | None) -> AioquicCore:
        return AioquicCore(
            AioquicConnection(
                self._mark,
                self._resets.token,
                configuration=self._configuration,
                original_destination_connection_id=original_cid,
                retry_source_connection_id=retried_cid,
                # Each is good once (RFC 8446, 8.1).
                session_ticket_fetcher=lambda ticket: self._tickets.pop(ticket, None),
                session_ticket_handler=self._keep_ticket,
            )
        )

    def _keep_ticket(self, ticket: SessionTicket) -> None:
        while len(self._tickets) >= MAX_SESSION_TICKETS:
            self._tickets.popitem(last=False)
        self._tickets[ticket.ticket] = ticket

    # ---- datagrams that belong to no connection ----

    def stray(self, datagram: bytes) -> Stray | None:
        try:
            header = pull_quic_header(Buffer(data=datagram), host_cid_length=CONNECTION_ID_BYTES)
        except ValueError:  # BufferReadError is one
            return None
        if header.version is None or header.packet_type is QuicPacketType.VERSION_NEGOTIATION:
            return None
        whole = len(datagram) >= SMALLEST_MAX_DATAGRAM_SIZE
        known = header.version in VERSIONS
        if not whole or (known and len(header.destination_cid) < MIN_INITIAL_CID_BYTES):
            return None
        return Stray(
            cid=header.destination_cid,
            source_cid=header.source_cid,
            version=header.version,
            known_version=known,
            initial=header.packet_type is QuicPacketType.INITIAL,
            token=header.token,
        )

    def versions(self, stray: Stray) -> bytes:
        return encode_quic_version_negotiation(
            source_cid=stray.cid,
            destination_cid=stray.source_cid,
            supported_versions=list(VERSIONS),
        )

    def retry(self, stray: Stray, address: Address, now: float) -> bytes:
        cid = os.urandom(CONNECTION_ID_BYTES)
        if self._mark is not None:
            cid = bytes([self._mark]) + cid[1:]
        return encode_quic_retry(
            version=stray.version,
            source_cid=cid,
            destination_cid=stray.source_cid,
            original_destination_cid=stray.cid,
            retry_token=self._retries.create_token(
                address=address,
                original_destination_connection_id=stray.cid,
                retry_source_connection_id=cid,
                now=now,
            ),
        )

    def retried(self, stray: Stray, address: Address, now: float) -> bytes | None:
        try:
            return self._retries.validate_token(
                address=address, destination_cid=stray.cid, token=stray.token, now=now
            )
        except ValueError:
            return None

    def reset(self, datagram: bytes, now: float) -> bytes | None:
        return self._resets.answer(datagram, datagram[1 : 1 + CONNECTION_ID_BYTES], now)

    def refusal(self, stray: Stray, *, bad_token: bool) -> bytes:
        code = QuicErrorCode.INVALID_TOKEN if bad_token else QuicErrorCode.CONNECTION_REFUSED
        crypto = CryptoPair()
        crypto.setup_initial(cid=stray.cid, is_client=False, version=stray.version)
        builder = QuicPacketBuilder(
            host_cid=stray.cid,
            is_client=False,
            max_datagram_size=SMALLEST_MAX_DATAGRAM_SIZE,
            peer_cid=stray.source_cid,
            version=stray.version,
        )
        builder.start_packet(QuicPacketType.INITIAL, crypto)
        buffer = builder.start_frame(
            QuicFrameType.TRANSPORT_CLOSE, capacity=TRANSPORT_CLOSE_FRAME_CAPACITY
        )
        for value in (code, QuicFrameType.PADDING, 0):
            buffer.push_uint_var(value)
        datagrams, _ = builder.flush()
        return bytes(datagrams[0])
