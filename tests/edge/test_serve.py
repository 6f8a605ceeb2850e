"""What an edge asks of its server."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from edge.config import EdgeConfig
from edge.serve import server_config
from tailrace.certificate import development_certificate


@pytest.mark.parametrize("asked", [False, True])
def test_http3_is_served_and_told_only_where_it_was_asked_for(tmp_path: Path, asked: bool) -> None:
    files = development_certificate(tmp_path, datetime.now(UTC))
    config = EdgeConfig(
        http=(),
        https=("127.0.0.1:0",),
        http3=asked,
        certificate=files.certificate,
        key=files.key,
    )
    server = server_config(config)
    made = server.create_sockets()
    for one in (*made.secure_sockets, *made.quic_sockets):
        one.close()
    assert bool(made.quic_sockets) is asked
    assert (b"alt-svc" in dict(server.response_headers("h2"))) is asked


def test_http3_is_off_unless_it_is_asked_for() -> None:
    assert EdgeConfig().http3 is False
