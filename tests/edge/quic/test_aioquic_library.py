"""Settings of aioquic that we change."""

from __future__ import annotations

from tailrace.edge.quic.aioquic_library import AioquicLibrary
from tailrace.up import CertificateFiles
from tests.edge.quic.net import Net


def test_every_connection_id_begins_with_the_mark_that_was_asked_for(
    certificate: CertificateFiles,
) -> None:
    net = Net(certificate)
    net.server.library = AioquicLibrary(
        certificate.certificate, certificate.key, first_cid_byte=0x5A
    )
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
