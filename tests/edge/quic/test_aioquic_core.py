"""What the core needs of aioquic that aioquic does not promise."""

from __future__ import annotations

from dataclasses import fields
from importlib.metadata import version

import aioquic.quic.connection
from aioquic.h3.connection import H3Connection
from aioquic.quic.configuration import SMALLEST_MAX_DATAGRAM_SIZE
from aioquic.quic.connection import QuicConnection
from aioquic.quic.packet_builder import QuicSentPacket
from aioquic.quic.recovery import QuicPacketPacer
from aioquic.tls import Epoch

from tailrace.edge.quic.aioquic_core import AioquicCores
from tailrace.edge.quic.aioquic_packets import BASE_BYTES, Sent
from tailrace.up import CertificateFiles
from tests.edge.quic.net import Net

OF_A_CONNECTION = (
    *("_ack_delay", "_ack_eliciting_sent_since_receipt", "_close_at", "_close_pending"),
    *("_crypto_streams", "_cryptos", "_datagrams_pending", "_events"),
    *("_handshake_confirmed", "_handshake_done_pending", "_host_cids", "_idle_timeout"),
    *("_local_ack_delay_exponent", "_local_initial_source_connection_id", "_local_max_data"),
    *("_local_max_stream_data_uni", "_local_max_streams_bidi", "_local_max_streams_uni"),
    *("_logger", "_loss", "_max_datagram_size", "_network_paths", "_on_ack_delivery"),
    *("_packet_number", "_pacing_at", "_payload_received", "_peer_cid", "_ping_pending"),
    *("_probe_pending", "_remote_max_data", "_remote_max_data_used", "_retire_connection_ids"),
    *("_spaces", "_spin_bit", "_spin_highest_pn", "_state", "_stream_limit", "_streams"),
    *("_streams_blocked_pending", "_streams_queue"),
)
OF_HTTP3 = ("_decoder", "_encode_headers", "_local_control_stream_id", "_stream")
OF_A_SENDER = (
    *("_buffer", "_buffer_fin", "_buffer_start", "_buffer_stop", "_pending", "_pending_eof"),
    *("_reset_error_code", "buffer_is_empty", "highest_offset", "is_finished"),
    *("on_data_delivery", "reset_pending"),
)
OF_A_PACER = ("_max_datagram_size", "bucket_time", "packet_time", "update_bucket")
OF_LOSSES = ("_cc", "_pacer", "_pto_count")
OF_A_SPACE = (
    *("ack_at", "ack_queue", "expected_packet_number", "largest_received_packet"),
    *("largest_received_time", "received_packets"),
)
OF_HEAD_PROTECTION = ("_is_chacha20", "_mask")
OF_A_LOG = {"quic_logger_frames"}
OF_TLS = ("_max_early_data",)
OVERRIDDEN = {
    QuicConnection: (
        *("_initialize", "_replenish_connection_ids", "_write_connection_limits"),
        *("_write_stream_limits", "datagrams_to_send", "receive_datagram"),
    ),
    QuicPacketPacer: ("update_rate",),
    H3Connection: ("_get_local_settings", "_get_or_create_stream", "_init_connection"),
}


def test_the_private_names_that_the_core_uses_are_there(net: Net) -> None:
    client = net.client()
    stream, _ = client.open()
    connection, http3 = client.quic, client.http3
    assert [name for name in OF_A_CONNECTION if not hasattr(connection, name)] == []
    assert [name for name in OF_HTTP3 if not hasattr(http3, name)] == []
    sender = connection._streams[stream].sender
    assert [name for name in OF_A_SENDER if not hasattr(sender, name)] == []
    assert [name for name in OF_LOSSES if not hasattr(connection._loss, name)] == []
    assert hasattr(connection._loss._cc, "_max_datagram_size")
    pacer, space = connection._loss._pacer, connection._spaces[Epoch.ONE_RTT]
    assert [name for name in OF_A_PACER if not hasattr(pacer, name)] == []
    assert [name for name in OF_A_SPACE if not hasattr(space, name)] == []
    protection = connection._cryptos[Epoch.ONE_RTT].send.hp
    assert [name for name in OF_HEAD_PROTECTION if not hasattr(protection, name)] == []
    assert {each.name for each in fields(QuicSentPacket)} - set(dir(Sent)) <= OF_A_LOG
    assert BASE_BYTES == SMALLEST_MAX_DATAGRAM_SIZE == connection._max_datagram_size
    for owner, names in OVERRIDDEN.items():
        assert [name for name in names if name not in vars(owner)] == []
    assert [name for name in OF_TLS if not hasattr(connection.tls, name)] == []
    assert aioquic.quic.connection.END_STATES


def test_it_is_the_release_that_was_read() -> None:
    """Another may mean something else by the same names: look at what changed, then raise this."""
    assert version("aioquic").split(".")[:2] == ["1", "7"]


def test_every_connection_id_begins_with_the_mark_that_was_asked_for(
    certificate: CertificateFiles,
) -> None:
    net = Net(certificate)
    net.server.cores = AioquicCores(certificate.certificate, certificate.key, mark=0x5A)
    client = net.client()
    for _ in range(3):
        net.pass_time(0.5)
        client.quic.change_connection_id()
    net.pass_time(0.5)
    connection = next(iter(net.server._connections))
    ours = connection.cids - {client.quic.original_destination_connection_id}
    assert len(ours) >= 3
    assert {cid[0] for cid in ours} == {0x5A}
    assert client.get(b"/still") == b"GET /still 0"
