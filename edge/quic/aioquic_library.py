"""HTTP/3 connections on aioquic: the implementation of `interface.py`.

Responses are encoded here; requests are parsed by aioquic. QPACK uses no dynamic table in either
direction, so that no stream waits for another, and the size of each request's fields is bounded.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pylsqpack
from aioquic.buffer import Buffer, encode_uint_var  # type: ignore[attr-defined]
from aioquic.h3 import events as h3
from aioquic.h3.connection import (
    H3_ALPN,
    ErrorCode,
    FrameType,
    encode_frame,
)
from aioquic.quic import events as quic
from aioquic.quic.configuration import SMALLEST_MAX_DATAGRAM_SIZE, QuicConfiguration
from aioquic.quic.connection import (
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

from tailrace.edge.quic.aioquic_connection import AioquicConnection, Http3Parser
from tailrace.edge.quic.congestion import CONGESTION_CONTROL
from tailrace.edge.quic.interface import (
    CONNECTION_WINDOW_BYTES,
    IDLE_TIMEOUT_S,
    MAX_HEADER_BYTES,
    MAX_HELD_BYTES,
    STREAM_WINDOW_BYTES,
    Address,
    Code,
    ConnectionIdIssued,
    ConnectionIdRetired,
    ConnectionTerminated,
    Datagrams,
    DataReceived,
    Event,
    HandshakeCompleted,
    Headers,
    HeadersTooLarge,
    RequestReceived,
    StreamReset,
    UnroutedDatagram,
)
from tailrace.edge.quic.stateless_reset import StatelessResets

CONNECTION_ID_BYTES = 8
FIELD_OVERHEAD_BYTES = 32
"""Bytes that each header field counts in addition to its name and value (RFC 9114, 4.2.2)."""
MAX_SESSION_TICKETS = 4096
"""Maximum number of session tickets that are kept; the oldest are dropped first."""
MIN_INITIAL_CID_BYTES = 8
"""Minimum length of the connection id in a first packet (RFC 9000, 7.2)."""

VERSIONS = (QuicProtocolVersion.VERSION_1, QuicProtocolVersion.VERSION_2)


class AioquicHttp3Connection:
    """The `QuicConnection` on aioquic: HTTP/3 on one QUIC connection."""

    def __init__(self, connection: AioquicConnection) -> None:
        self._quic = connection
        self._http3: Http3Parser | None = None
        self._control_stream = 0  # id of the HTTP/3 control stream of this server
        self._encoder = pylsqpack.Encoder()
        self._events: list[Event] = []
        self._written: dict[int, int] = {}  # bytes written of each open response, by stream
        self._ignored: set[int] = set()  # streams whose further input is dropped
        self._unread: dict[int, int] = {}  # unread bytes of each request's body
        self._all_unread = 0
        self._received = 0  # bytes received in order on all streams
        self._fresh = 0  # bytes written of all responses since `datagrams` was called
        self._next_stream = 0  # the first request stream that the client has not opened
        self.cids: Sequence[bytes] = (
            connection.original_destination_connection_id,
            connection.host_cid,
        )

    # ---- the connection ----

    @property
    def is_closing(self) -> bool:
        return self._quic.is_closing

    def receive(self, datagram: bytes, address: Address, now: float) -> None:
        self._quic.receive_datagram(datagram, address, now)
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
        if self._quic.get_peer_address() is None:
            return []
        datagrams: Datagrams = self._quic.datagrams_to_send(now)
        self._fresh = 0
        self._take_events()  # Making the datagrams may have issued new connection ids.
        return datagrams

    def go_away(self) -> None:
        if self._http3 is not None:
            frame = encode_frame(FrameType.GOAWAY, encode_uint_var(self._next_stream))
            self._quic.send_stream_data(self._control_stream, frame)

    def close(self, code: Code, reason: str = "") -> None:
        self._quic.close(code, reason_phrase=reason)

    # ---- responses ----

    def start(self, stream: int, headers: Headers) -> None:
        if stream in self._written:
            _, block = self._encoder.encode(stream, list(headers))
            self._send(stream, FrameType.HEADERS, block)

    def write(self, stream: int, data: bytes) -> None:
        if data and stream in self._written:
            self._send(stream, FrameType.DATA, data)

    def _send(self, stream: int, kind: FrameType, payload: bytes) -> None:
        frame = encode_frame(kind, payload)
        self._written[stream] += len(frame)
        self._fresh += len(frame)
        self._quic.send_stream_data(stream, frame)

    def end(self, stream: int) -> None:
        if stream in self._written and self._http3 is not None:
            del self._written[stream]
            self._all_unread -= self._unread.pop(stream, 0)
            self._quic.send_stream_data(stream, b"", end_stream=True)
            self._http3.end_sending(stream)
            if stream in self._ignored:
                self._http3.forget(stream)

    def reset(self, stream: int, code: Code) -> None:
        if stream in self._written:
            del self._written[stream]
            self._quic.reset_stream(stream, code)
            self._forget(stream, code)

    def stop(self, stream: int) -> None:
        self._forget(stream, Code.NO_ERROR)

    def writable_bytes(self, stream: int, unsent_bytes: int) -> int:
        written = self._written.get(stream)
        buffer = self._quic.send_buffer(stream)
        if written is None or buffer is None:
            return 0
        unsent = written - buffer.sent
        # Unsent data of other responses uses up the same congestion window, so subtract it.
        others_unsent = max(0, self._fresh - unsent)
        at_once = max(0, self._quic.sendable_bytes(stream) - others_unsent)
        return min(
            unsent_bytes + at_once - unsent,
            MAX_HELD_BYTES - (written - buffer.acknowledged),
        )

    def consumed(self, stream: int, size: int) -> None:
        unread = self._unread.get(stream)
        if unread is not None:
            self._unread[stream] = unread - size
            self._all_unread -= size
            self._grant(stream)

    def _forget(self, stream: int, code: Code) -> None:
        """Ask the client to stop sending a request, and drop input that still arrives."""
        self._all_unread -= self._unread.pop(stream, 0)
        if stream in self._ignored:
            return
        if self._quic.is_receiving(stream):
            self._quic.stop_stream(stream, code)
            self._ignored.add(stream)
        if self._http3 is not None:
            self._http3.forget(stream)

    # ---- events of aioquic ----

    def _take_events(self) -> None:
        while (event := self._quic.next_event()) is not None:
            if isinstance(event, quic.StreamDataReceived):
                self._received += len(event.data)
                self._handle_stream(event, event.end_stream)
            elif isinstance(event, quic.StreamReset):
                self._received += self._quic.missing_bytes(event.stream_id)
                self._handle_stream(event, True)
                self._left(event.stream_id)
            elif isinstance(event, quic.StopSendingReceived):
                self._handle_stream(event, False)
                self._left(event.stream_id)
            elif isinstance(event, quic.ProtocolNegotiated):
                # `Http3Parser` opens the control stream first, so this is its stream id.
                self._control_stream = self._quic.get_next_available_stream_id(
                    is_unidirectional=True
                )
                self._http3 = Http3Parser(self._quic)
            elif isinstance(event, quic.HandshakeCompleted):
                self._quic.established()
                self._events.append(HandshakeCompleted())
            elif isinstance(event, quic.ConnectionIdIssued):
                self._events.append(ConnectionIdIssued(event.connection_id))
            elif isinstance(event, quic.ConnectionIdRetired):
                self._events.append(ConnectionIdRetired(event.connection_id))
            elif isinstance(event, quic.ConnectionTerminated):
                reason = event.reason_phrase or hex(event.error_code)
                self._events.append(ConnectionTerminated(reason))

    def _handle_stream(self, event: Any, ended: bool) -> None:
        """Pass an event of one stream to the HTTP/3 parser, and handle the parsed requests."""
        stream = event.stream_id
        if stream in self._ignored:
            if ended:
                self._ignored.remove(stream)
            else:
                self._grant(stream)
            return
        if self._http3 is None:
            return
        is_request = not stream_is_unidirectional(stream) and stream_is_client_initiated(stream)
        if is_request:
            self._next_stream = max(self._next_stream, stream + 4)
        for each in self._http3.handle_event(event):
            self._handle_request(each)
        if is_request and not ended:
            self._bound_heads(stream)
            self._grant(stream)

    def _handle_request(self, event: h3.H3Event) -> None:
        if isinstance(event, h3.HeadersReceived):
            stream = event.stream_id
            if stream in self._unread:  # the headers are trailers, which no route uses
                if event.stream_ended:
                    self._events.append(DataReceived(stream, b"", True))
            else:
                self._ask(stream, event.headers, event.stream_ended)
        elif isinstance(event, h3.DataReceived) and event.stream_id in self._unread:
            self._unread[event.stream_id] += len(event.data)
            self._all_unread += len(event.data)
            self._events.append(DataReceived(event.stream_id, event.data, event.stream_ended))

    def _ask(self, stream: int, headers: Headers, ended: bool) -> None:
        if self._quic.is_refused(stream):
            return
        self._written[stream] = 0
        size = sum(len(name) + len(value) + FIELD_OVERHEAD_BYTES for name, value in headers)
        if size > MAX_HEADER_BYTES:
            self._refuse_head(stream)
            return
        self._unread[stream] = 0
        self._quic.grant_control()
        self._events.append(RequestReceived(stream, headers, ended))

    def _bound_heads(self, stream: int) -> None:
        assert self._http3 is not None
        if self._http3.is_head_too_long(stream):
            self._written[stream] = 0
            self._refuse_head(stream)
        elif self._http3.are_trailers_too_long(stream):
            self._quic.close(ErrorCode.H3_EXCESSIVE_LOAD, reason_phrase="trailers are too long")

    def _refuse_head(self, stream: int) -> None:
        self._forget(stream, Code.NO_ERROR)
        self._events.append(HeadersTooLarge(stream))

    def _left(self, stream: int) -> None:
        if stream in self._written:
            del self._written[stream]
            self._quic.reset_stream(stream, Code.REQUEST_CANCELLED)
            self._forget(stream, Code.REQUEST_CANCELLED)
            self._events.append(StreamReset(stream))

    def _grant(self, stream: int) -> None:
        self._quic.grant_stream(stream, self._unread.get(stream, 0))
        self._quic.grant(self._received + CONNECTION_WINDOW_BYTES - self._all_unread)


class AioquicLibrary:
    """The `QuicLibrary` on aioquic, with one certificate."""

    cid_bytes = CONNECTION_ID_BYTES

    def __init__(
        self,
        certificate: Path,
        key: Path,
        first_cid_byte: int | None = None,
        secret: bytes | None = None,
    ) -> None:
        """Load a certificate and its key.

        Args:
            certificate: PEM file of the certificate chain.
            key: PEM file of its private key.
            first_cid_byte: First byte of every connection id; random if None.
            secret: Secret of the stateless reset tokens; the bytes of `key` if None.
        """
        self._first_cid_byte = first_cid_byte
        self._secret = secret
        self._retries = QuicRetryTokenHandler()
        self._tickets: OrderedDict[bytes, SessionTicket] = OrderedDict()
        self.load(certificate, key)

    def load(self, certificate: Path, key: Path) -> None:
        configuration = QuicConfiguration(
            alpn_protocols=H3_ALPN,
            congestion_control_algorithm=CONGESTION_CONTROL,
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

    def accept(self, original_cid: bytes, retried_cid: bytes | None) -> AioquicHttp3Connection:
        return AioquicHttp3Connection(
            AioquicConnection(
                self._first_cid_byte,
                self._resets.token,
                configuration=self._configuration,
                original_destination_connection_id=original_cid,
                retry_source_connection_id=retried_cid,
                # A ticket can be used only once (RFC 8446, 8.1).
                session_ticket_fetcher=lambda ticket: self._tickets.pop(ticket, None),
                session_ticket_handler=self._keep_ticket,
            )
        )

    def _keep_ticket(self, ticket: SessionTicket) -> None:
        while len(self._tickets) >= MAX_SESSION_TICKETS:
            self._tickets.popitem(last=False)
        self._tickets[ticket.ticket] = ticket

    # ---- datagrams that belong to no connection ----

    def parse(self, datagram: bytes) -> UnroutedDatagram | None:
        try:
            header = pull_quic_header(Buffer(data=datagram), host_cid_length=CONNECTION_ID_BYTES)
        except ValueError:  # BufferReadError is a ValueError
            return None
        if header.version is None or header.packet_type is QuicPacketType.VERSION_NEGOTIATION:
            return None
        whole = len(datagram) >= SMALLEST_MAX_DATAGRAM_SIZE
        known = header.version in VERSIONS
        if not whole or (known and len(header.destination_cid) < MIN_INITIAL_CID_BYTES):
            return None
        return UnroutedDatagram(
            cid=header.destination_cid,
            source_cid=header.source_cid,
            version=header.version,
            known_version=known,
            initial=header.packet_type is QuicPacketType.INITIAL,
            token=header.token,
        )

    def version_negotiation(self, unrouted: UnroutedDatagram) -> bytes:
        return encode_quic_version_negotiation(
            source_cid=unrouted.cid,
            destination_cid=unrouted.source_cid,
            supported_versions=list(VERSIONS),
        )

    def retry(self, unrouted: UnroutedDatagram, address: Address, now: float) -> bytes:
        cid = os.urandom(CONNECTION_ID_BYTES)
        if self._first_cid_byte is not None:
            cid = bytes([self._first_cid_byte]) + cid[1:]
        return encode_quic_retry(
            version=unrouted.version,
            source_cid=cid,
            destination_cid=unrouted.source_cid,
            original_destination_cid=unrouted.cid,
            retry_token=self._retries.create_token(
                address=address,
                original_destination_connection_id=unrouted.cid,
                retry_source_connection_id=cid,
                now=now,
            ),
        )

    def original_cid(
        self, unrouted: UnroutedDatagram, address: Address, now: float
    ) -> bytes | None:
        try:
            return self._retries.validate_token(
                address=address, destination_cid=unrouted.cid, token=unrouted.token, now=now
            )
        except ValueError:
            return None

    def stateless_reset(self, datagram: bytes, now: float) -> bytes | None:
        return self._resets.answer(datagram, datagram[1 : 1 + CONNECTION_ID_BYTES], now)

    def refusal(self, unrouted: UnroutedDatagram, *, bad_token: bool) -> bytes:
        code = QuicErrorCode.INVALID_TOKEN if bad_token else QuicErrorCode.CONNECTION_REFUSED
        crypto = CryptoPair()
        crypto.setup_initial(cid=unrouted.cid, is_client=False, version=unrouted.version)
        builder = QuicPacketBuilder(
            host_cid=unrouted.cid,
            is_client=False,
            max_datagram_size=SMALLEST_MAX_DATAGRAM_SIZE,
            peer_cid=unrouted.source_cid,
            version=unrouted.version,
        )
        builder.start_packet(QuicPacketType.INITIAL, crypto)
        buffer = builder.start_frame(
            QuicFrameType.TRANSPORT_CLOSE, capacity=TRANSPORT_CLOSE_FRAME_CAPACITY
        )
        for value in (code, QuicFrameType.PADDING, 0):
            buffer.push_uint_var(value)
        datagrams, _ = builder.flush()
        return bytes(datagrams[0])
