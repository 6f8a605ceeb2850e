"""Private attributes of aioquic and h2 that the edge uses, checked against the installed versions.

aioquic and h2 offer no public interface for some decisions, so the edge uses private methods and
attributes. This module lists all of them. `require_private_names` runs when the module that uses
them is imported. If an upgrade has removed a name, the edge therefore fails at its start, with an
error that shows the name, and not in a request. docs/decisions/edge.md has the steps of an upgrade.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version

from tailrace.ledger.errors import ConfigError

PAGE = "docs/decisions/edge.md"
"""Page of the documentation with the steps of an upgrade, for error messages."""


@dataclass(frozen=True, slots=True)
class PrivateNames:
    """The private attributes of one library that the edge uses."""

    library: str
    requirement: str
    """The checked versions, as in pyproject.toml, such as `h2>=4.4.1,<4.5`."""
    series: str
    """Major and minor number of the checked versions, such as `4.4`."""
    examples: Callable[[], Mapping[str, object]]
    """Makes an object of each class whose attributes are checked, by the name of the class."""
    paths: Mapping[str, str]
    """Maps each private attribute to the reason for its use. A path such as
    `QuicConnection._streams.0.sender` begins with the name of an example; digits are keys."""


def require_private_names(of: PrivateNames) -> None:
    """Raise ConfigError if the installed version was not checked or lacks a private attribute."""
    installed = version(of.library)
    hint = f"install {of.requirement!r}; {PAGE} says how to check another version"
    if installed.split(".")[:2] != of.series.split("."):
        raise ConfigError(
            f"{of.library} {installed} is installed, but the edge uses private parts of"
            f" {of.library} that were checked with {of.series} only",
            field=of.library,
            hint=hint,
        )
    examples = of.examples()
    missing = [path for path in of.paths if not _leads_somewhere(examples, path)]
    if missing:
        raise ConfigError(
            f"{of.library} {installed} has no {', '.join(missing)}, which the edge uses",
            field=of.library,
            hint=hint,
        )


def _leads_somewhere(examples: Mapping[str, object], path: str) -> bool:
    first, *rest = path.split(".")
    at: object = examples[first]
    for name in rest:
        try:
            at = at[int(name)] if name.isdigit() else getattr(at, name)  # type: ignore[index]
        except (AttributeError, LookupError, TypeError):
            return False
    return True


def _examples_of_aioquic() -> Mapping[str, object]:
    from aioquic.h3.connection import H3Connection
    from aioquic.quic.configuration import QuicConfiguration
    from aioquic.quic.connection import QuicConnection

    connection = QuicConnection(configuration=QuicConfiguration(is_client=True))
    connection.connect(("127.0.0.1", 443), now=0.0)
    http3 = H3Connection(connection)
    http3.send_headers(connection.get_next_available_stream_id(), [(b":method", b"GET")])
    return {"QuicConnection": connection, "H3Connection": http3}


def _examples_of_h2() -> Mapping[str, object]:
    from h2.connection import H2Connection

    return {"H2Connection": H2Connection()}


_FLOW_CONTROL = "flow control: a client may send one window beyond what has been read"
_CONNECTION_IDS = "connection ids: first byte for a shared port, stateless reset tokens"
_SEND_BUFFER = "back-pressure: how much of a response is not sent, and not acknowledged"
_SENDING = "sending: the data of responses is put into packets here"
_PACKETS = "sending: packets of responses are encrypted here, and registered as sent"
_WHEN_TO_SEND = "sending: congestion control, and pacing for timers of a millisecond"
_ACKNOWLEDGEMENTS = "sending: acknowledgements wait for a response to leave with"
_LONG_HEADS = "header limits: a HEADERS frame over the limit is refused before it is collected"

AIOQUIC = PrivateNames(
    "aioquic",
    "aioquic>=1.7.2,<1.8",
    "1.7",
    _examples_of_aioquic,
    {
        "QuicConnection._initialize": "early data: called when `tls` has been made",
        "QuicConnection.tls._max_early_data": "early data: session tickets permit none",
        "QuicConnection._close_event": "closing: requests of a closed connection end at once",
        "QuicConnection._replenish_connection_ids": _CONNECTION_IDS,
        "QuicConnection._local_initial_source_connection_id": _CONNECTION_IDS,
        "QuicConnection._host_cids.0.cid": _CONNECTION_IDS,
        "QuicConnection._host_cids.0.stateless_reset_token": _CONNECTION_IDS,
        "QuicConnection._write_connection_limits": _FLOW_CONTROL,
        "QuicConnection._write_stream_limits": _FLOW_CONTROL,
        "QuicConnection._local_max_data.sent": _FLOW_CONTROL,
        "QuicConnection._local_max_data.used": _FLOW_CONTROL,
        "QuicConnection._local_max_data.value": _FLOW_CONTROL,
        "QuicConnection._streams.0.max_stream_data_local": _FLOW_CONTROL,
        "QuicConnection._streams.0.max_stream_data_local_sent": _FLOW_CONTROL,
        "QuicConnection._streams.0.receiver.highest_offset": _FLOW_CONTROL,
        "QuicConnection._streams.0.receiver.is_finished": _FLOW_CONTROL,
        "QuicConnection._streams.0.receiver.starting_offset": _FLOW_CONTROL,
        "QuicConnection._streams.0.sender.highest_offset": _SEND_BUFFER,
        "QuicConnection._streams.0.sender._buffer_start": _SEND_BUFFER,
        "QuicConnection._streams.0.sender._reset_error_code": "a client that wants no response",
        "QuicConnection._streams_queue.0.is_blocked": _SENDING,
        "QuicConnection._streams_queue.0.is_finished": _SENDING,
        "QuicConnection._streams_queue.0.max_stream_data_remote": _SENDING,
        "QuicConnection._streams_queue.0.receiver.stop_pending": _SENDING,
        "QuicConnection._streams_queue.0.sender.buffer_is_empty": _SENDING,
        "QuicConnection._streams_queue.0.sender.get_frame": _SENDING,
        "QuicConnection._streams_queue.0.sender.next_offset": _SENDING,
        "QuicConnection._streams_queue.0.sender.on_data_delivery": _SENDING,
        "QuicConnection._remote_max_data": _SENDING,
        "QuicConnection._remote_max_data_used": _SENDING,
        "QuicConnection._cryptos": _PACKETS,
        "QuicConnection._flush_builder": _PACKETS,
        "QuicConnection._network_paths": _PACKETS,
        "QuicConnection._packet_number": _PACKETS,
        "QuicConnection._peer_cid.cid": _PACKETS,
        "QuicConnection._spin_bit": _PACKETS,
        "QuicConnection._loss.spaces.0.ack_at": _ACKNOWLEDGEMENTS,
        "QuicConnection._loss.spaces.0.ack_queue": _ACKNOWLEDGEMENTS,
        "QuicConnection._loss.spaces.0.is_application_data": _ACKNOWLEDGEMENTS,
        "QuicConnection._loss.spaces.0.largest_received_packet": _ACKNOWLEDGEMENTS,
        "QuicConnection._loss.spaces.0.largest_received_time": _ACKNOWLEDGEMENTS,
        "QuicConnection._loss._cc": "losses: aioquic repeats the frames that were lost",
        "QuicConnection._loss._pacer": _WHEN_TO_SEND,
        "QuicConnection._loss.bytes_in_flight": _WHEN_TO_SEND,
        "QuicConnection._loss.congestion_window": _WHEN_TO_SEND,
        "QuicConnection._pacing_at": _WHEN_TO_SEND,
        "H3Connection._get_local_settings": "QPACK: no dynamic table is offered",
        "H3Connection._decoder": "QPACK: no dynamic table is kept",
        "H3Connection._stream.0.frame_size": _LONG_HEADS,
        "H3Connection._stream.0.frame_type": _LONG_HEADS,
        "H3Connection._stream.0.headers_recv_state": _LONG_HEADS,
        "H3Connection._stream.0.sending_ended": "memory: what is kept of a request is dropped",
        "H3Connection._stream.0.is_ended": "memory: what is kept of a request is dropped",
    },
)

H2 = PrivateNames(
    "h2",
    "h2>=4.4.1,<4.5",
    "4.4",
    _examples_of_h2,
    {
        "H2Connection._receive_frame": "floods and faults: each frame is counted, and a fault of"
        " one request ends that request only",
    },
)
