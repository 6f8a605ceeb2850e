"""What the core needs of aioquic that aioquic does not promise."""

from __future__ import annotations

from importlib.metadata import version

import aioquic.quic.connection
from aioquic.h3.connection import H3Connection
from aioquic.quic.connection import QuicConnection

from edge.quic.aioquic_core import AioquicCores
from tailrace.certificate import CertificateFiles
from tests.edge.quic.net import Net

OF_A_CONNECTION = (
    *("_close_pending", "_events", "_host_cids", "_local_initial_source_connection_id"),
    *("_local_max_data", "_local_max_stream_data_uni", "_local_max_streams_bidi"),
    *("_local_max_streams_uni", "_logger", "_loss", "_network_paths", "_state", "_streams"),
)
OF_HTTP3 = ("_decoder", "_local_control_stream_id", "_stream")
OF_A_SENDER = ("_buffer_start", "_buffer_stop", "_reset_error_code", "highest_offset")
OF_TLS = ("_max_early_data", "_server_handle_hello")
OVERRIDDEN = {
    QuicConnection: (
        *("_initialize", "_replenish_connection_ids"),
        *("_write_connection_limits", "_write_stream_limits"),
    ),
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
